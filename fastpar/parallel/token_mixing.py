"""Whether anything but attention mixes a model's tokens, found out by trying: no list knows all models.

Between attention layers a token must need nothing of another, where a sequence is split. A convolution, a token shift,
a pooled summary, statistics over the sequence would see this rank's tokens for all, and compute something else in
silence. So the model runs on a few ids while its attention only hands values on; then with other ids at all places but
one, and what it returns at that place must be the same. What it returns without a place for each token must not change.
Then with the ids and their positions in reverse: queries, keys and outputs must be those of before in reverse, or the
model counts places by itself, as each rank would from 0.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from fastpar.context.region import ContextRegion
from fastpar.parallel.changes import Changes
from fastpar.parallel.context_parallel import connect
from fastpar.parallel.guards.positions import as_it_was
from fastpar.parallel.styles import AttentionStyle
from fastpar.tensor.rehearsal import attributes_as_they_were

_log = logging.getLogger("fastpar.parallelize")
_ROWS, _TOKENS = 2, 11
_OUTPUT = "its output"
_FAR = 1e-2  # of the largest output; other tokens change it by its own size


def refuse_mixing(model: nn.Module, region: ContextRegion, attention: Mapping[str, AttentionStyle]) -> None:
    """ValueError for a model that mixes tokens outside of attention, or counts their places by itself. Five forwards of
    22 ids, in this process.

    Models that take no ids, fail on these, or are on the meta device are not judged, which the logger
    "fastpar.parallelize" says on the first rank (WARNING); nor is any where one rank has all tokens.
    """
    if region.comm.size == 1:
        return
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is None or embedding.weight.is_meta:
        _say_untried(model, region, "has no nn.Embedding of ids" if embedding is None else "is on the meta device")
        return
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randint(embedding.num_embeddings, (_ROWS, _TOKENS), generator=generator).to(embedding.weight.device)
        for _ in range(2)
    )
    changes = Changes()
    try:
        with _undisturbed(model), region.trial("values"):
            connect(model, region, changes)
            for path, style in attention.items():
                style.redirect(path, model.get_submodule(path), region, changes)
            try:
                whole = _run(model, first)
            except Exception as error:  # of the model's own code: any
                _say_untried(model, region, f"fails on [{_ROWS}, {_TOKENS}] ids ({type(error).__name__}: {error})")
                return
            for place in (0, _TOKENS - 1):
                others = second.clone()
                others[:, place] = first[:, place]
                _compare(type(model).__name__, whole, _run(model, others), place)
            _refuse_counting(model, region, first)
    finally:
        changes.undo(gather=False)


def _say_untried(
    model: nn.Module, region: ContextRegion, why: str, what: str = "mixes tokens outside of attention, or counts places"
) -> None:
    if region.comm.rank == 0:
        _log.warning(
            "%s %s, so that nobody has tried whether it %s, which a split sequence would change: compare it with the "
            "whole model (fastpar.verify)",
            type(model).__name__,
            why,
            what,
        )


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients or warnings; generators, buffers and states as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad(), attributes_as_they_were(model), as_it_was(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.eval()
        try:
            yield
        finally:
            for module, is_training in modes.items():
                module.training = is_training


def _refuse_counting(model: nn.Module, region: ContextRegion, ids: Tensor) -> None:
    """ValueError for a model whose positions are not those that it is called with."""
    positions = torch.arange(_TOKENS, device=ids.device).expand(_ROWS, -1)
    taken = inspect.signature(model.forward).parameters
    names = [  # but a place to start from, such as start_pos: int = 0
        name
        for name, each in taken.items()
        if "pos" in name and each.annotation not in (int, "int") and not isinstance(each.default, int)
    ]
    if not names and any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        names = ["position_ids"]
    runs: list[list[Tensor]] = []
    for turned in (False, True):
        x, places = (each.flip(1) if turned else each for each in (ids, positions))
        seen: list[Tensor] = []
        with region.trial("values", seen):
            try:
                found = _run(model, x, **dict.fromkeys(names[:1], places))
            except Exception as error:  # of the model's own code: any
                given = f" and {names[0]}" if names else ""
                why = f"fails on [{_ROWS}, {_TOKENS}] ids{given} ({type(error).__name__}: {error})"
                _say_untried(model, region, why, "counts positions by itself")
                return
        outputs = [y.reshape(_ROWS, _TOKENS, -1) for where, y in found if where.startswith(_OUTPUT) and _is_by_token(y)]
        dims = [(y, 2) for y in seen if y.dim() == 4 and y.shape[2] == _TOKENS] + [(y, 1) for y in outputs]
        runs.append([y.flip(dim) if turned else y for y, dim in dims])
    if any(a.shape == b.shape and _is_far(a, b) for a, b in zip(*runs, strict=False)):
        name = names[0] if names else "position_ids"
        raise ValueError(
            f"{type(model).__name__} counts the places of its tokens by itself (torch.arange(x.size(1)), a table that "
            f"is read from its start): of a split sequence every rank would count from 0. Let it take {name} and read "
            "tables there, and call it with the position_ids of fastpar.context.shard"
        )


def _run(model: nn.Module, ids: Tensor, **given: Tensor) -> list[tuple[str, Tensor]]:
    """By name, what every module and the model returned: tensors of numbers."""
    found: list[tuple[str, Tensor]] = []

    def noting(path: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            x = output[0] if isinstance(output, tuple) and output else output
            if isinstance(x, Tensor) and x.is_floating_point() and _is_by_token(x):
                found.append((f"{path} ({type(module).__name__})", x.clone()))

        return module.register_forward_hook(hook)

    handles = [noting(path, module) for path, module in model.named_modules() if path]
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        output = model(ids, **options, **given)
    finally:
        for handle in handles:
            handle.remove()
    named = dict(output) if hasattr(output, "items") else output
    for keys, leaf in tree_flatten_with_path(named)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            found.append((_OUTPUT + "".join(str(key) for key in keys), leaf.clone()))
    return found


def _is_by_token(x: Tensor) -> bool:
    return x.shape[:2] == (_ROWS, _TOKENS) or (x.dim() > 1 and x.shape[0] == _ROWS * _TOKENS)


def _compare(name: str, first: list[tuple[str, Tensor]], second: list[tuple[str, Tensor]], place: int) -> None:
    differing = [
        (where, a)
        for (where, a), (_, b) in zip(first, second, strict=False)
        if a.shape == b.shape and _differ(a, b, place)
    ]
    outputs = [(where, x) for where, x in differing if where.startswith(_OUTPUT)]
    if not outputs:
        return  # what modules compute is the model's own matter, and heads may look like tokens
    where, x = outputs[0]
    if not _is_by_token(x):
        raise ValueError(
            f"{where} of {name}, {list(x.shape)}, is a summary of tokens (pooled), of which each rank would have one "
            "of its own tokens: split a model without it (add_pooling_layer=False, a base model without a "
            "classifier), and pool its hidden states over all ranks yourself"
        )
    raise ValueError(
        f"{differing[0][0]} of {name} computes at one token from others, beside attention (a convolution, a shift, a "
        "mean, ...): of a split sequence each rank would give it its own tokens for all. Context parallelism splits "
        "softmax attention only"
    )


def _differ(a: Tensor, b: Tensor, place: int) -> bool:
    """Whether two results differ: at one place where there is one for each token."""
    if _is_by_token(a):
        a, b = (x.reshape(_ROWS, _TOKENS, -1)[:, place] for x in (a, b))
    return _is_far(a, b)


def _is_far(a: Tensor, b: Tensor) -> bool:
    return bool(a.numel()) and float((a - b).abs().max()) > _FAR * max(float(a.abs().max()), 1e-6)
