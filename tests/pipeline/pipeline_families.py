"""A pipeline over a tiny model of any family of transformers, against one process.

run_family_pipeline("gemma2", "Gemma2ForCausalLM") == "equal"       # two ranks, 1f1b
"""

from __future__ import annotations

import copy
import inspect
import traceback
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import fastpar as fp
from tests.dist import run_ranks
from tests.tensor.family_models import tiny_config, tiny_model

# Sums of a few hundred float32 terms in another order, amplified by routers and norms. What is wrong is off by a term.
TOLERANCE = 1e-3
LENGTH, MICROBATCHES = 8, 2
MOST_PARAMETERS = 20_000_000


def all_families() -> list[tuple[str, str]]:
    """(model type, class name) of every causal and masked language model of the installed transformers."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for mapping in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        for model_type, name in mapping.items():
            found.setdefault(name if isinstance(name, str) else name[0], model_type)
    return [(model_type, name) for name, model_type in found.items()]


def family_batch(vocab: int = 61) -> tuple[Tensor, Tensor]:
    """Ids [4, 8], and labels of which two microbatches ignore unequal numbers."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocab, (2 * MICROBATCHES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[1, :3] = -100
    return ids, labels


def one_process(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(ids, labels=labels, use_cache=False).loss if _takes_cache(model) else model(ids, labels=labels).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def _takes_cache(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return "use_cache" in parameters or "kwargs" in parameters


def family_rank(model_type: str, class_name: str, schedule: str) -> dict[str, Any]:
    """What one rank finds: "equal", "wrong ...", "refused ...", "error ..." or "not built ..."."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about missing kernels and special tokens
        try:
            model = tiny_model(model_type, class_name)
            ids, labels = family_batch()
            loss, grads = one_process(copy.deepcopy(model), ids, labels)
        except Exception as error:
            return {"result": f"not built: {type(error).__name__}: {error}", "names": []}
        return _pipeline(model, ids, labels, loss, grads, schedule)


def _pipeline(
    model: nn.Module, ids: Tensor, labels: Tensor, loss: Tensor, grads: dict[str, Tensor], schedule: str
) -> dict[str, Any]:
    mesh = fp.init_mesh(pp=2, device="cpu")
    pipe = None
    try:
        pipe = fp.parallelize_pipeline(model, mesh, schedule, num_microbatches=MICROBATCHES, timeout=50)
        found = pipe.step(ids, labels=labels)
        own = {n: p.grad for stage in pipe.stages.values() for n, p in _named(stage.module)}
        return {"result": _compare(found, loss, own, grads), "names": [n for n, g in own.items() if g is not None]}
    except (ValueError, TypeError) as error:
        kind = "refused" if "/fastpar/" in _trace_root(error) else "error"
        return {"result": f"{kind}: {error}", "names": [], "trace": traceback.format_exc()}
    except Exception as error:
        return {"result": f"error: {type(error).__name__}: {error}", "names": [], "trace": traceback.format_exc()}
    finally:
        if pipe is not None:
            pipe.close()
        mesh.close()


def _named(module: nn.Module) -> Any:
    return module.named_parameters(remove_duplicate=False)


def _trace_root(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].filename


def _compare(loss: Tensor, wanted: Tensor, own: dict[str, Tensor | None], grads: dict[str, Tensor]) -> str:
    off = float((loss - wanted).abs() / wanted.abs())
    if not off < TOLERANCE:
        return f"wrong: loss {float(loss):.6f} and not {float(wanted):.6f}"
    for name, grad in own.items():
        whole = grads.get(name)
        if (grad is None) != (whole is None):
            only = whole if grad is None else grad
            if only is not None and only.abs().max() > 1e-6:
                return f"wrong: {name} has {'no' if grad is None else 'a'} gradient"
            continue
        if grad is not None and whole is not None:
            largest = whole.abs().max().clamp(min=1e-4)
            if not float((grad - whole).abs().max() / largest) < TOLERANCE:
                return f"wrong: gradient of {name} by {float((grad - whole).abs().max() / largest):.2g}"
    return "equal"


def _is_tiny(model_type: str, class_name: str) -> str:
    """Empty, or why the family cannot be built small: some have parts with sizes of other names."""
    import transformers

    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            config = tiny_config(model_type)
            if max(getattr(config, name, 0) or 0 for name in ("num_hidden_layers", "vocab_size")) > 4096:
                return "its configuration has sizes of other names"
            count = sum(p.numel() for p in getattr(transformers, class_name)(config).parameters())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "" if count < MOST_PARAMETERS else f"{count:,} parameters, by sizes of other names"


def run_family_pipeline(model_type: str, class_name: str, schedule: str = "1f1b") -> str:
    """The result of both ranks: "equal", "refused: why", "wrong: what", "error: what", or "not built: why"."""
    problem = _is_tiny(model_type, class_name)
    if problem:
        return f"not built: {problem}"
    results = run_ranks(2, family_rank, model_type, class_name, schedule)
    for result in results:
        if result["result"] != "equal":
            return result["result"]
    return "equal"
