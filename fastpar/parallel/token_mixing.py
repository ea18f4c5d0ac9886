"""Whether anything but attention mixes a model's tokens, found out by trying: no list knows all models.

Between attention layers a token must need nothing of another, where a sequence is split. A convolution, a token shift,
a pooled summary, statistics over the sequence would see this rank's tokens for all, and compute something else in
silence. So the model runs on a few ids while its attention only hands values on; then with other ids at all places but
one, and what it returns at that place, and its queries and keys there, must be the same. What it returns without a
place for each token must not change. Then on the first few ids alone, of which all must be the same as well, or it goes
by the length of the sequence, of which every rank has a part. Then with the ids and their positions in reverse:
queries, keys and outputs must be those of before in reverse, or the model counts places by itself, as each rank would
from 0. All that in evaluation and in training mode: batch statistics, capacities of experts are of the latter only.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from fastpar.context.region import ContextRegion
from fastpar.parallel.changes import Changes
from fastpar.parallel.context_parallel import connect
from fastpar.parallel.guards.positions import as_it_was
from fastpar.parallel.styles import AttentionStyle
from fastpar.tensor import LayoutDropout

_log = logging.getLogger("fastpar.parallelize")
_ROWS, _TOKENS = 2, 11
_SHORT = 7  # tokens of the sequence's beginning
_OUTPUT, _ATTENDED = "its output", "queries or keys of its attention"
_GOES_BY_LENGTH = (
    "{} computes something else for the same tokens in a longer sequence, beside attention (a factor of x.size(1), a "
    "mean): of a split sequence every rank has a part. Take the length from the whole batch"
)
_COUNTS_PLACES = (
    "{} counts the places of its tokens by itself (torch.arange(x.size(1)), a table that is read from its start): of a "
    "split sequence every rank would count from 0. Let it take {} and read tables there, and call it with the "
    "position_ids of fastpar.context.shard"
)
_FAR = 1e-2  # of the largest output; other tokens change it by its own size


def refuse_mixing(model: nn.Module, region: ContextRegion, attention: Mapping[str, AttentionStyle]) -> None:
    """ValueError for a model that mixes tokens outside of attention, goes by their number, or counts their places by
    itself. Five forwards of 22 ids in each mode, in this process.

    Models that take no ids, fail on these, or are on the meta device are not judged, which the logger
    "fastpar.parallelize" says on the first rank (WARNING); nor is any where one rank has all tokens.
    """
    if region.comm.size == 1:
        return
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is None or embedding.weight.is_meta:
        _say_untried(model, region, "has no nn.Embedding of ids" if embedding is None else "is on the meta device")
        return
    changes = Changes()
    try:
        connect(model, region, changes)
        for path, style in attention.items():
            style.redirect(path, model.get_submodule(path), region, changes)
        for training in (False, True):
            with _undisturbed(model, training) as rewind:
                if not _judge(model, region, embedding, rewind):
                    return
    finally:
        changes.undo(gather=False)


def _judge(model: nn.Module, region: ContextRegion, embedding: nn.Embedding, rewind: Callable[[], None]) -> bool:
    """Refuse the model in its mode of now; False if it does not run."""
    generator = torch.Generator().manual_seed(0)
    ids, other_ids = (
        torch.randint(embedding.num_embeddings, (_ROWS, _TOKENS), generator=generator).to(embedding.weight.device)
        for _ in range(2)
    )
    positions = torch.arange(_TOKENS, device=ids.device).expand(_ROWS, -1)
    before = torch.get_rng_state()

    def run(ids: Tensor, positions: Tensor | None) -> list[tuple[str, Tensor]]:
        rewind()  # what is drawn is drawn alike
        return _run(model, region, ids, positions)

    whole: list[tuple[str, Tensor]] | None = None
    for given in (positions, None):
        try:
            whole = run(ids, given)
            break
        except Exception as error:  # of the model's own code: any
            mode = " in training mode" if model.training else ""
            why = f"fails on [{_ROWS}, {_TOKENS}] ids{mode} ({type(error).__name__}: {error})"
    if whole is None:
        _say_untried(model, region, why)
        return False
    if given is None:  # it runs without positions only
        _say_untried(model, region, why, "counts positions by itself")
    draws = not torch.equal(before, torch.get_rng_state())
    for place in (0, _TOKENS - 1):
        others = other_ids.clone()
        others[:, place] = ids[:, place]
        _compare(type(model).__name__, whole, run(others, given), place)
    if given is None or draws:  # other draws would be made for other places
        return True
    short = run(ids[:, :_SHORT], positions[:, :_SHORT])
    _refuse_if_far(whole, short, lambda x: x[:, :_SHORT], _GOES_BY_LENGTH.format(type(model).__name__))
    turned = run(ids.flip(1), positions.flip(1))
    name = next(iter(_names_of_positions(model)), "position_ids")
    _refuse_if_far(whole, turned, lambda x: x.flip(1), _COUNTS_PLACES.format(type(model).__name__, name))
    return True


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
def _undisturbed(model: nn.Module, training: bool) -> Iterator[Callable[[], None]]:
    """A mode without gradients, warnings or masks of dropout; generators, buffers and states as before afterwards,
    and whenever what this yields is called."""
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad(), as_it_was(model) as rewind, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modes:
            module.training = training and not isinstance(module, nn.modules.dropout._DropoutNd | LayoutDropout)
        try:
            yield rewind
        finally:
            for module, is_training in modes.items():
                module.training = is_training


def _refuse_if_far(
    whole: list[tuple[str, Tensor]], found: list[tuple[str, Tensor]], part: Callable[[Tensor], Tensor], problem: str
) -> None:
    """ValueError for queries, keys and outputs that are not the `part` of the whole ones that they should be."""
    for a, b in zip(_results(whole), _results(found), strict=False):
        if a.dim() != b.dim() or not _is_by_token(a):
            continue
        a = part(a.reshape(_ROWS, _TOKENS, -1))
        if a.numel() == b.numel() and _is_far(a, b.reshape(a.shape)):
            raise ValueError(problem)


def _results(found: list[tuple[str, Tensor]]) -> list[Tensor]:
    return [x for where, x in found if where.startswith((_OUTPUT, _ATTENDED))]


def _names_of_positions(model: nn.Module) -> list[str]:
    """Arguments of the model that say where its tokens are."""
    taken = inspect.signature(model.forward).parameters
    names = [  # but a place to start from, such as start_pos: int = 0
        name
        for name, each in taken.items()
        if "pos" in name and each.annotation not in (int, "int") and not isinstance(each.default, int)
    ]
    return names or ["position_ids"] * any(each.kind is each.VAR_KEYWORD for each in taken.values())


def _run(model: nn.Module, region: ContextRegion, ids: Tensor, positions: Tensor | None) -> list[tuple[str, Tensor]]:
    """What every module and the model returned, by name, and queries and keys [rows, tokens, heads, D]: tensors of
    numbers."""
    found: list[tuple[str, Tensor]] = []

    def noting(path: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            x = output[0] if isinstance(output, tuple) and output else output
            if isinstance(x, Tensor) and x.is_floating_point() and _is_by_token(x):
                found.append((f"{path} ({type(module).__name__})", x.clone()))

        return module.register_forward_hook(hook)

    handles = [noting(path, module) for path, module in model.named_modules() if path]
    options: dict[str, Any] = {}
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    if positions is not None:
        options |= dict.fromkeys(_names_of_positions(model)[:1], positions)
    seen: list[Tensor] = []
    try:
        with region.trial("values", seen):
            output = model(ids, **options)
    finally:
        for handle in handles:
            handle.remove()
    named = dict(output) if hasattr(output, "items") else output
    for keys, leaf in tree_flatten_with_path(named)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            found.append((_OUTPUT + "".join(str(key) for key in keys), leaf.clone()))
    return found + [(_ATTENDED, x.transpose(1, 2).clone()) for x in seen if x.dim() == 4]


def _is_by_token(x: Tensor) -> bool:
    return x.shape[:2] == (_ROWS, _TOKENS) or (x.dim() > 1 and x.shape[0] == _ROWS * _TOKENS)


def _compare(name: str, first: list[tuple[str, Tensor]], second: list[tuple[str, Tensor]], place: int) -> None:
    differing = [
        (where, a)
        for (where, a), (_, b) in zip(first, second, strict=False)
        if a.shape == b.shape and _differ(a, b, place)
    ]
    # What modules compute is the model's own matter, and heads may look like tokens.
    results = [(where, x) for where, x in differing if where.startswith((_OUTPUT, _ATTENDED))]
    if not results:
        return
    where, x = results[0]
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
