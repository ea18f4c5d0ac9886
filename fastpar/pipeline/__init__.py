"""Pipeline parallelism: schedules as data, and the runtime that executes them.

A `Schedule` says what each rank does, in order: which microbatch goes forward or backward through which stage, when
weight gradients are computed, what is sent where. It can be generated, searched for, read from a file, checked,
simulated, drawn and run; what is drawn is what runs.

Schedules and what is made of them need no torch. Names that do are looked up on first use, as in `fastpar` itself.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fastpar.pipeline.schedules.asynchronous import pipedream, pipedream_2bw
from fastpar.pipeline.schedules.bidirectional import dualpipe, dualpipev
from fastpar.pipeline.schedules.costs import Costs
from fastpar.pipeline.schedules.flush import eager_1f1b, gpipe, interleaved_1f1b, looped_bfs, naive, one_f_one_b
from fastpar.pipeline.schedules.generators import make_schedule, schedule_names
from fastpar.pipeline.schedules.lowering import (
    add_communication,
    add_reduce_grad,
    add_unshard,
    merge_backward,
    split_backward,
)
from fastpar.pipeline.schedules.schedule import Action, ActionType, Chain, Schedule, ScheduleError
from fastpar.pipeline.schedules.v_shape import v_half, v_min, zbv
from fastpar.pipeline.schedules.validate import Problem, check, validate
from fastpar.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from fastpar.pipeline.search.find import find_schedule
from fastpar.pipeline.search.head_schedule import shard_head
from fastpar.pipeline.simulation.evaluate import Evaluator
from fastpar.pipeline.simulation.simulate import Simulation, activation_peaks, measured_costs, simulate
from fastpar.pipeline.simulation.timeline import Comparison, Event, Timeline, compare

if TYPE_CHECKING:
    from fastpar.pipeline.runtime.pipeline import Pipeline, PipelineError
    from fastpar.pipeline.runtime.sharded_head import CrossEntropy, ShardedHead
    from fastpar.pipeline.stages.architecture import Architecture
    from fastpar.pipeline.stages.batch import Microbatches
    from fastpar.pipeline.stages.calling import StageOutput
    from fastpar.pipeline.stages.partition import Partition, partition
    from fastpar.pipeline.stages.stage import Stage

# None of these names may be that of a module of the package: importing that module would bind its name here.
_HOME = {
    "Architecture": "fastpar.pipeline.stages.architecture",
    "Microbatches": "fastpar.pipeline.stages.batch",
    "Partition": "fastpar.pipeline.stages.partition",
    "Pipeline": "fastpar.pipeline.runtime.pipeline",
    "PipelineError": "fastpar.pipeline.runtime.pipeline",
    "CrossEntropy": "fastpar.pipeline.runtime.sharded_head",
    "ShardedHead": "fastpar.pipeline.runtime.sharded_head",
    "Stage": "fastpar.pipeline.stages.stage",
    "StageOutput": "fastpar.pipeline.stages.calling",
    "partition": "fastpar.pipeline.stages.partition",
}
__all__ = [
    "Action",
    "ActionType",
    "Architecture",
    "Chain",
    "Comparison",
    "Costs",
    "CrossEntropy",
    "Evaluator",
    "Event",
    "Microbatches",
    "Partition",
    "Pipeline",
    "PipelineError",
    "Problem",
    "Schedule",
    "ScheduleError",
    "ShardedHead",
    "Simulation",
    "Stage",
    "StageOutput",
    "Timeline",
    "activation_peaks",
    "add_communication",
    "add_reduce_grad",
    "add_unshard",
    "check",
    "compare",
    "dualpipe",
    "dualpipev",
    "eager_1f1b",
    "find_schedule",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "make_schedule",
    "measured_costs",
    "merge_backward",
    "naive",
    "one_f_one_b",
    "partition",
    "pipedream",
    "pipedream_2bw",
    "schedule_names",
    "shard_head",
    "simulate",
    "split_backward",
    "v_half",
    "v_min",
    "validate",
    "zb_h1",
    "zb_h2",
    "zbv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fastpar.pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
