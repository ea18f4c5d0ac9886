"""Splitting a model that exists over the ranks of a mesh: `fastpar.parallelize`, and the styles that its plans name.

    plan = {"layers.*.mlp.up": "colwise", "layers.*.attn.qkv": fp.parallel.ColwiseStyle(sections=3), ...}

| file | what it holds |
|---|---|
| `api.py`, `pipeline_api.py` | `parallelize`, `explain`, `unparallelize`; `parallelize_pipeline` |
| `plan.py`, `styles/` | patterns and words of a plan; what each style checks and changes |
| `checks.py`, `swap.py`, `changes.py` | a plan on a model: checked as a whole, applied, recorded, undone |
| `declared.py`, `guesses.py`, `layer_plan.py`, `proving.py`, `trial/` | the plan "auto": found, tried, kept if right |
| `heads.py`, `stacked_experts.py`, `model_methods.py` | attention heads, experts, and methods as models have them |
| `guards/` | what a parallelised model is watched for while it runs |

The package is not called `parallelize`: importing one of its files would bind that name over the function.
"""

from fastpar.parallel import styles
from fastpar.parallel.model_methods import label_shift
from fastpar.parallel.styles import *  # noqa: F403

__all__ = [*styles.__all__, "label_shift"]
