"""What of a layout has been measured, and how far its prediction may be off.

| feature | error until calibrated | backed by |
|---|---|---|
| base: tp, pp (1f1b, interleaved), dp, ZeRO 0 to 2, recomputation | 12 %; data sheets 35 % | published rows |
| zero3_net: ZeRO 3 across nodes | 25 % | published rows, with an efficiency of their own |
| cp, ep | 25 %, 40 % | few rows |
| schedule: zero-bubble and V-shaped ones | 25 % | the simulator only |
| floor: layers shorter than what launching them takes | 40 % | |

An error bar is the root of the summed squares of the errors of a layout's features.
"""

from __future__ import annotations

import numpy as np

from fastpar.planner.cost import StepTime
from fastpar.planner.machine import Machine
from fastpar.planner.table import SCHEDULES, Column, LayoutTable

ERRORS = {"base": 0.12, "zero3_net": 0.25, "cp": 0.25, "ep": 0.40, "schedule": 0.25, "floor": 0.40}
_DATA_SHEET = 0.35
_MEASURED_SCHEDULES = tuple(SCHEDULES.index(name) for name in ("gpipe", "1f1b", "interleaved_1f1b"))


def feature_columns(machine: Machine, x: LayoutTable, time: StepTime) -> dict[str, Column]:
    """Which rows have which feature beyond the base."""
    ranks = x.dp_shard * x.cp * x.tp
    return {
        "zero3_net": (x.stage == 3) & (ranks > machine.per_node),
        "cp": x.cp > 1,
        "ep": x.ep > 1,
        "schedule": (x.pp > 1) & ~np.isin(x.schedule, _MEASURED_SCHEDULES),
        "floor": time.is_floor,
    }


def error_of(machine: Machine, feature: str) -> float:
    """The relative error of a feature on this machine."""
    if feature in machine.errors:
        return machine.errors[feature]
    return _DATA_SHEET if feature == "base" and machine.source == "data sheet" else ERRORS[feature]


def error_bars(machine: Machine, features: dict[str, Column]) -> Column:
    """The relative error of every row."""
    squares = error_of(machine, "base") ** 2 + sum(error_of(machine, name) ** 2 * has for name, has in features.items())
    return np.sqrt(np.asarray(squares, dtype=float))


def is_backed(machine: Machine, features: dict[str, Column]) -> Column:
    """Rows all of whose features were measured: on this machine by calibration, or by published rows."""
    missing = [has for name, has in features.items() if name not in machine.errors]
    return ~np.any(np.array(missing), axis=0)
