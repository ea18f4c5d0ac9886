"""Pipeline parallelism: schedules as data, and the runtime that executes them.

A `Schedule` says what each rank does, in order: which microbatch goes forward or backward through which stage, when
weight gradients are computed, what is sent where. It can be generated, searched for, read from a file, checked,
simulated, drawn and run; what is drawn is what runs.
"""

from fastpar.pipeline.schedule import Action, ActionType, Chain, Schedule, ScheduleError

__all__ = ["Action", "ActionType", "Chain", "Schedule", "ScheduleError"]
