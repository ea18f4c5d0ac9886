"""What ranks do in the walk over model families: a layout's loss, gradients and update against one process."""

from __future__ import annotations

import copy
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.parallel.stacked_experts import is_stacked
from fastpar.pipeline import PipelineError
from fastpar.tensor import full_parameter
from tests.tensor.family_models import batch, tiny_model

# One rounding of float32 is 6e-8, and sums of a few hundred terms in another order move a gradient by 1e-5 of its
# largest entry; routers and norms amplify that. What is wrong is wrong by a term, in the order of 1.
TOLERANCE = 2e-3
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2": ({"tp": 2}, {}),
    "tp2 sp": ({"tp": 2}, {"sequence_parallel": True}),
    "ep2": ({"dp_shard": 2, "ep": 2}, {}),
    "tp3": ({"tp": 3}, {}),
    "tp3 sp": ({"tp": 3}, {"sequence_parallel": True}),
}


def walk_family(model_type: str, class_name: str, layouts: list[str], seed: int = 0) -> dict[str, Any]:
    """Per layout "equal", "refused: why", "wrong: by how much" or "error: what", and what was left whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about missing kernels and special tokens
        ids = batch()
        try:
            plain = tiny_model(model_type, class_name, seed=seed)
            wanted = step(copy.deepcopy(plain), ids)
        except Exception as error:
            return {name: {"result": f"not built: {type(error).__name__}: {error}", "notes": []} for name in layouts}
        has_experts = any(is_stacked(module) for module in plain.modules())
        found = {}
        for name in layouts:
            if "ep" in name and not has_experts:
                found[name] = {"result": "-", "notes": []}
            elif "pp" in name:
                found[name] = walk_pipeline(copy.deepcopy(plain), ids, wanted)
            elif "cp" in name:
                found[name] = walk_context(copy.deepcopy(plain), ids, wanted)
            else:
                found[name] = walk_layout(copy.deepcopy(plain), ids, wanted, name)
        return found


def walk_layout(model: nn.Module, ids: Tensor, wanted: dict[str, Tensor], name: str) -> dict[str, Any]:
    sizes, options = LAYOUTS[name]
    mesh = fp.init_mesh(**sizes, device="cpu")
    try:
        fp.parallelize(model, mesh, **options)
        notes = sorted({_note(row) for row in fp.explain(model).rows if row["style"] in ("whole", "gathered")})
        found = step(model, ids)
        return {"result": compare(found, wanted), "notes": notes}
    except Exception as error:
        return _failure(error)
    finally:
        mesh.close()


def _failure(error: Exception) -> dict[str, Any]:
    """A refusal is an error of the caller's that fastpar raises; everything else is an error of fastpar's."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    refused = isinstance(error, ValueError | TypeError | PipelineError) and "/fastpar/" in last.filename
    kind = "refused" if refused else f"error: {type(error).__name__}"
    return {"result": f"{kind}: {error}", "notes": [], "trace": traceback.format_exc()}


def walk_pipeline(model: nn.Module, ids: Tensor, wanted: dict[str, Tensor]) -> dict[str, Any]:
    """Two stages, a sequence each: the loss and the gradients of this rank's stage."""
    mesh = fp.init_mesh(pp=2, device="cpu")
    names = {id(param): f"gradient of {name}" for name, param in model.named_parameters()}
    tied = model.named_parameters(remove_duplicate=False)  # the last stage calls a tied embedding by the head's name
    aliases = {f"gradient of {name}": names[id(param)] for name, param in tied}
    try:
        pipe = fp.parallelize_pipeline(model, mesh, "1f1b", num_microbatches=2)
        loss = pipe.step(ids, labels=ids)
        found = {f"gradient of {key}": p.grad for key, p in pipe.named_parameters() if p.grad is not None}
        if loss is not None:
            found["loss"] = loss.detach()
        found = {aliases.get(key, key): value for key, value in found.items()}
        here = {key: wanted[key] for key in found if key in wanted}
        missing = [key for key in found if key not in wanted]
        return {"result": f"wrong: {missing[0]} is new" if missing else compare(found, here), "notes": []}
    except Exception as error:
        return _failure(error)
    finally:
        mesh.close()


def walk_context(model: nn.Module, ids: Tensor, wanted: dict[str, Tensor]) -> dict[str, Any]:
    """Sequences split over two ranks: the whole loss, and gradients summed over the ranks."""
    mesh = fp.init_mesh(cp=2, device="cpu")
    torch.manual_seed(0)  # the layouts before have drawn other numbers on each rank
    try:
        fp.parallelize(model, mesh, context=fp.Context())
        loss = model(**fp.context.shard(model, {"input_ids": ids, "labels": ids})).loss
        loss.backward()
        found = {"loss": fp.context.total(model, loss)}
        for key, param in model.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            summed = full_parameter(param, grad).clone()
            dist.all_reduce(summed, group=mesh["cp"].get_group())
            if param.grad is not None or float(summed.abs().max()) > 0:
                found[f"gradient of {key}"] = summed
        here = {key: value for key, value in wanted.items() if not key.startswith("update")}
        return {"result": compare(found, here), "notes": []}
    except Exception as error:
        return _failure(error)
    finally:
        mesh.close()


def _note(row: dict[str, str]) -> str:
    parts = ["*" if part.isdigit() else part for part in row["module"].split(".")]
    return f"{'.'.join(parts)}: {row['note']}"


def step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The loss, every whole gradient, and every whole parameter after a step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for key, param in model.named_parameters():
        if param.grad is not None:
            found[f"gradient of {key}"] = full_parameter(param, param.grad)
    optimizer.step()
    return found | {f"update of {key}": full_parameter(param) for key, param in model.named_parameters()}


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """ "equal", or the tensor that is furthest off."""
    largest = max(float(value.abs().max()) for key, value in wanted.items() if key.startswith("gradient"))
    worst, where = 0.0, ""
    for key, value in wanted.items():
        if key not in found:
            if float(value.abs().max()) > 0:
                return f"wrong: no {key}"
            continue
        scale = float(value.abs().max()) + (1e-3 * largest if key.startswith("gradient") else 0) + 1e-12
        error = float((found[key] - value).abs().max()) / scale
        if not error <= worst:
            worst, where = error, key
    extra = [key for key in found if key not in wanted and float(found[key].abs().max()) > 0]
    if extra:
        return f"wrong: {extra[0]}, which one process has not"
    return "equal" if worst <= TOLERANCE else f"wrong: {where} by {worst:.1e}"
