"""The planner: which layout, and why, for a model and a machine that need not be at hand.

    plan = fp.plan("llama-3-70b", "h100x64", batch=128, seq=8192)
    print(plan)

| file | what |
|---|---|
| `models`, `configurations`, `machine`, `workload` | what is given: shapes by name or configuration, machines, a step |
| `calibration` | a machine as its own ranks measure it; the only file that imports torch |
| `space`, `table` | all layouts, as columns of numbers |
| `network`, `layer_time`, `cost`, `memory`, `features` | seconds, bytes and error bars of every row |
| `pipelines`, `cuts`, `refine` | a few layouts again: simulated schedules, balanced cuts |
| `search`, `planning` | the best of them, and `Plan` |
| `reasons`, `misses`, `report`, `comparison`, `draw`, `command` | what is said about it |
| `replication` | PipeDream's planner of replicated stages |

No torch: `docs/planner.md` says how far its numbers can be trusted, and by which published rows.
"""

from fastpar.planner.comparison import ComparisonRow, Measurement, PlanComparison
from fastpar.planner.machine import MACHINES, GemmTable, Machine, find_machine
from fastpar.planner.misses import NearMiss, NoLayoutFitsError
from fastpar.planner.models import MODELS, find_model
from fastpar.planner.planning import Plan, plan
from fastpar.planner.reasons import Reason
from fastpar.planner.refine import RefinedLayout
from fastpar.planner.replication import LayerProfile, PipedreamPlan, ReplicatedStage, pipedream
from fastpar.planner.space import ALLOW, PINS
from fastpar.planner.workload import BytesPerParameter, Workload

__all__ = [
    "ALLOW",
    "MACHINES",
    "MODELS",
    "PINS",
    "BytesPerParameter",
    "ComparisonRow",
    "GemmTable",
    "LayerProfile",
    "Machine",
    "Measurement",
    "NearMiss",
    "NoLayoutFitsError",
    "PipedreamPlan",
    "Plan",
    "PlanComparison",
    "Reason",
    "RefinedLayout",
    "ReplicatedStage",
    "Workload",
    "find_machine",
    "find_model",
    "pipedream",
    "plan",
]
