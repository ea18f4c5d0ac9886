"""A trial: a module on virtual ranks against the whole module; see the notes of `fastpar.parallel.trial`."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fastpar.comm import shard_range
from fastpar.contracts.rehearsal import MadeTensors, put_back_lists, same_generators
from fastpar.parallel.heads import HeadSplit
from fastpar.parallel.styles import BlockStyle, GatheredStyle, HeadsStyle, ReplicateStyle, Style
from fastpar.parallel.styles.linear import is_colwise, is_rowwise, splits_features
from fastpar.parallel.trial.calls import RecordedCall
from fastpar.parallel.trial.copies import (
    fresh_leaves,
    held_numbers,
    noisy_copy,
    replace_parameter,
    sharing_copy,
    training_copy,
    trains_differently,
)
from fastpar.parallel.trial.ranks import (
    CodeError,
    DifferenceError,
    ThreadMeeting,
    TrialError,
    VirtualColumn,
    VirtualRank,
    VirtualRow,
)
from fastpar.tensor.parameter import RowMap
from fastpar.tensor.sequence import map_hidden, map_output, map_stream

TOLERANCE = 1e-3


@dataclass
class Trial:
    """A trial of one module and the styles of what it holds, paths relative to the module ("" is itself)."""

    module: nn.Module
    call: RecordedCall
    styles: Mapping[str, Style]
    splits: Mapping[str, HeadSplit]  # by the module that holds the linears
    size: int
    cuts_all: bool = True  # under sequence parallelism all tensors shaped like the hidden states are parts, not one
    also_parts: tuple[torch.Size, ...] = ()  # shapes of other inputs that are parts of the sequence, too
    whole_dropouts: list[str] = field(default_factory=list)  # found by `run`: those whose input no rank has a part of
    split_dropouts: list[str] = field(default_factory=list)  # whose input each rank has other heads or features of
    floor: float = 0.0  # the largest gradient; what is five digits smaller is rounding

    def run(self, sequence: bool) -> dict[str, str]:
        """TrialError, or of every parameter that stays whole its style: "partial" or "replicate"; by path."""
        source = noisy_copy(self.module)
        try:
            kinds = self._run(sequence, source)
            twin = training_copy(source)
            if trains_differently(source, twin, self._inputs(self.call.hidden().shape, _seeded())):
                self._run(sequence, twin)
            return kinds
        except TrialError:
            raise
        except Exception as error:  # of the module's own code: any
            self._run_without_gradients(sequence, source)
            text = str(error).split("\n")[0][:120]
            raise CodeError(f"its code fails on {self.size} parts: {type(error).__name__}: {text}") from None
        finally:
            put_back_lists(self.call.lists)

    def _run_without_gradients(self, sequence: bool, source: nn.Module) -> None:
        """TrialError for other outputs of code that has no backward here, as flex attention on a CPU."""
        try:
            with torch.no_grad():
                self._run(sequence, source)
        except TrialError:
            raise
        except Exception:  # as with gradients
            return

    def _run(self, sequence: bool, source: nn.Module) -> dict[str, str]:
        shape = self.call.hidden().shape
        if sequence and len(shape) < 3:
            raise TrialError("it is called with tokens of all sequences in one dim, which has no part to gather")
        generator = _seeded()
        inputs = self._inputs(shape, generator)
        wanted = self._one(source, inputs)
        weigh = torch.randn(wanted[0].shape, generator=generator)
        wanted_grads = _gradients([(wanted[0] * weigh).sum()], [*wanted[1], *wanted[2].values()])
        ranks = self._ranks(source, inputs, sequence, shape)
        if not sequence:
            self._look_at_dropouts([seen for *_, seen, _ in ranks], wanted[0].shape)
        parts = [weigh[:, _part(weigh.size(1), self.size, r)] if sequence else weigh for r in range(self.size)]
        outs = [out for out, *_ in ranks]
        found = [torch.cat(outs, 1)] if sequence else outs
        for out in found:
            _compare(out, wanted[0], "its output")
        for *_, held in ranks:
            _compare_held(held, wanted[3])
        if not torch.is_grad_enabled():
            return {}
        self.floor = max((float(g.abs().max()) for g in wanted_grads if g is not None and g.numel()), default=0.0)
        losses = [(out * part).sum() for out, part in zip(outs, parts, strict=True)]
        num_inputs = len(wanted[1])
        leaves = [leaf for _, tensors, params, *_ in ranks for leaf in (*tensors, *params.values())]
        grads = _gradients(losses, leaves)
        each = len(leaves) // self.size
        by_rank = [grads[r * each : (r + 1) * each] for r in range(self.size)]
        for i in range(num_inputs):
            self._compare_input(i, [rank[i] for rank in by_rank], wanted_grads[i], sequence, shape)
        kinds: dict[str, str] = {}
        unknown: list[str] = []
        for i, name in enumerate(wanted[2]):
            kind = self._kind(name, [rank[num_inputs + i] for rank in by_rank], wanted_grads[num_inputs + i], sequence)
            if kind is not None:
                kinds[name] = kind
            grad = wanted_grads[num_inputs + i]
            if grad is None or _equal(grad, torch.zeros_like(grad), self.floor):
                unknown.append(name)
        # A gradient of zero, as of a key's bias, is alike on all ranks whatever it is: as its module's others.
        summed = {name.rpartition(".")[0] for name, kind in kinds.items() if kind == "partial" and name not in unknown}
        return kinds | {name: "partial" for name in unknown if name in kinds and name.rpartition(".")[0] in summed}

    def _inputs(self, shape: torch.Size, generator: torch.Generator) -> Any:
        """The call's arguments, with random numbers for hidden states: all tensors shaped like the first."""

        def one(tensor: Tensor) -> Tensor:
            if tensor.shape == shape and tensor.is_floating_point():
                return torch.randn(shape, generator=generator).requires_grad_()
            return tensor

        return tree_map_only(Tensor, one, (self.call.args, self.call.kwargs))

    def _cut(self, rank: VirtualRank, shape: torch.Size, index: int, tensor: Tensor) -> Tensor:
        """A rank's part of an input, if it is one; of those with gradients the first is the hidden states."""
        is_part = tensor.shape == shape and (self.cuts_all or index == 0)
        is_part = (is_part or tensor.shape in self.also_parts) and tensor.is_floating_point()
        return tensor.narrow(rank.dim, *rank.span()) if is_part else tensor

    def _one(self, source: nn.Module, inputs: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        twin = sharing_copy(source)
        inputs, leaves = fresh_leaves(inputs)
        params: dict[str, Tensor] = dict(twin.named_parameters())
        with torch.random.fork_rng(devices=[]):
            out = _hidden_of(twin(*inputs[0], **inputs[1]))
        return out, leaves, params, held_numbers(twin)

    def _ranks(self, source: nn.Module, inputs: Any, sequence: bool, shape: torch.Size) -> list[Any]:
        meeting, has_grad = ThreadMeeting(self.size), torch.is_grad_enabled()
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size

        def work(index: int) -> None:
            try:
                rank = VirtualRank(meeting, index, sequence, shape[1])
                with meeting.turn, torch.set_grad_enabled(has_grad):
                    results[index] = self._rank(source, inputs, rank, shape)
            except BaseException as error:
                errors[index] = error
                meeting.barrier.abort()

        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(self.size)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        first = next((e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)), None)
        first = first or next((e for e in errors if e is not None), None)
        if first is not None:
            raise first
        return results

    def _rank(self, source: nn.Module, inputs: Any, rank: VirtualRank, shape: torch.Size) -> Any:
        twin = sharing_copy(source)
        params = dict(twin.named_parameters())
        modules = dict(twin.named_modules())
        for path, style in self.styles.items():
            if isinstance(style, HeadsStyle):
                rows = next(split.parameters[path] for split in self.splits.values() if path in split.parameters)
                replace_parameter(twin, path, rows.take(params[path], 0, rank.rank))
        for path, split in self.splits.items():
            for name, value in split.attributes.items():
                setattr(modules[path], name, value)
        for path, style in self.styles.items():
            if splits_features(style):
                twin.set_submodule(path, self._linear(path, style, modules[path], rank))
        for path, style in self.styles.items():
            if isinstance(style, BlockStyle):
                modules[path].register_forward_pre_hook(_entering(rank.enter), with_kwargs=True)
            elif isinstance(style, GatheredStyle) and rank.sequence:
                modules[path].register_forward_pre_hook(_entering(rank.whole, map_stream), with_kwargs=True)
                modules[path].register_forward_hook(lambda _m, _a, out: map_output(out, rank.cut))
        seen: dict[str, Tensor] = {}
        for path, child in twin.named_modules():
            if type(child) is nn.Dropout:
                child.register_forward_pre_hook(lambda _m, args, path=path: seen.update({path: args[0].detach()}))
        inputs, leaves = fresh_leaves(inputs, functools.partial(self._cut, rank, shape) if rank.sequence else None)
        out = _hidden_of(twin(*inputs[0], **inputs[1]))
        return out, leaves, params, seen, held_numbers(twin)

    def _look_at_dropouts(self, seen: list[dict[str, Tensor]], shape: torch.Size) -> None:
        """Dropout on what all ranks have alike draws one mask for all; on features or heads each rank has its own."""
        first = seen[0]
        alike = [name for name, x in first.items() if all(_equal(other[name], x) for other in seen if name in other)]
        self.whole_dropouts = [name for name in alike if first[name].shape == shape]
        self.split_dropouts = [name for name in first if name not in alike]

    def _linear(self, path: str, style: Style, linear: nn.Module, rank: VirtualRank) -> nn.Module:
        stored = cast(Tensor, linear._parameters["weight"])
        weight = stored if isinstance(linear, nn.Linear) else stored.t()
        bias = cast("Tensor | None", linear._parameters.get("bias"))
        parent = path.rpartition(".")[0]
        if is_rowwise(style):
            return VirtualRow(rank, weight, bias, RowMap.chunk(weight.size(1), self.size))
        blocks = [p for p, s in self.styles.items() if isinstance(s, BlockStyle)]
        in_block = any(path.startswith(f"{p}." if p else "") for p in blocks)
        return VirtualColumn(rank, weight, bias, self.splits[parent].rows[path], not in_block)

    def _compare_input(
        self, index: int, grads: list[Tensor | None], wanted: Tensor | None, sequence: bool, shape: torch.Size
    ) -> None:
        what = "the gradient of its input" + (f" {index}" if index else "")
        if wanted is None:
            return
        found = [torch.zeros_like(wanted) if grad is None else grad for grad in grads]
        if sequence and wanted.shape == shape:
            pieces = [torch.zeros_like(wanted[:, :0]) if grad is None else grad for grad in grads]
            _compare(torch.cat(pieces, 1), wanted, what, self.floor)
            return
        if sequence:
            raise TrialError("it has a trained input beside the hidden states")
        for grad in found:
            _compare(grad, wanted, what, self.floor)

    def _kind(self, name: str, grads: list[Tensor | None], wanted: Tensor | None, sequence: bool) -> str | None:
        """The way in which the ranks' gradients of a parameter make the whole one."""
        module, _, leaf = name.rpartition(".")
        style = self.styles.get(module)
        if wanted is None and grads[0] is not None:
            wanted = torch.zeros_like(grads[0])
        if wanted is None:
            return None if splits_features(style) else "partial"
        found = [torch.zeros_like(wanted) if grad is None else grad for grad in grads]
        own = self.styles.get(name)  # found in a trial of what is inside
        is_split = (
            not isinstance(own, ReplicateStyle | None) or is_colwise(style) or (is_rowwise(style) and leaf == "weight")
        )
        total = torch.stack(found).sum(0)
        gathered = [p for p, s in self.styles.items() if isinstance(s, GatheredStyle)]
        is_gathered = any(name.startswith(f"{p}." if p else "") for p in gathered)
        if is_split or (sequence and not is_gathered):
            _compare(total, wanted, f"the gradient of {name}", self.floor)
            return None if is_split or is_rowwise(style) else "partial"
        if all(_equal(grad, wanted, self.floor) for grad in found):
            return None if is_rowwise(style) else "replicate"
        if is_gathered:
            raise TrialError(f"the gradient of {name} differs from rank to rank")
        _compare(total, wanted, f"the gradient of {name}", self.floor)
        return "partial"


def keeps_results(module: nn.Module, call: RecordedCall) -> bool:
    """True if tensors that a module computes stay where others may read them when it has returned: in attributes, in
    lists, wherever hooks inside have put them."""
    if call.keeps_results is None:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            try:
                source = noisy_copy(module)
                call.keeps_results = any(_keeps_results(twin, call) for twin in (source, training_copy(source)))
            except Exception:  # of the module's own code: any
                call.keeps_results = False
    return call.keeps_results


def _keeps_results(twin: nn.Module, call: RecordedCall) -> bool:
    inputs, _ = fresh_leaves(Trial(twin, call, {}, {}, 1)._inputs(call.hidden().shape, _seeded()))
    twin._forward_hooks.clear()  # which see what it returns
    made = MadeTensors()
    with same_generators(), made:
        twin(*inputs[0], **inputs[1])
    del inputs
    is_kept = any(x.grad_fn is not None for x in made.left())
    put_back_lists(call.lists)
    return is_kept


def is_per_token(module: nn.Module, call: RecordedCall, size: int) -> bool:
    """True if a module computes each token by itself: the same for a part of the sequence as for all of it.

    Tokens may be flattened, hidden states [T, H] instead of [1, T, H]: a module inside of one that does so.
    """
    shape = call.hidden().shape
    dim = 1 if len(shape) > 2 else 0
    trial = Trial(module, call, {}, {}, size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            source = noisy_copy(module)
            inputs = trial._inputs(shape, _seeded())
            twin = training_copy(source)
            modes = [source, twin] if trains_differently(source, twin, inputs) else [source]
            return all(_is_per_token(trial, mode, inputs, dim) for mode in modes)
        except Exception:  # of the module's own code: any
            return False
        finally:
            put_back_lists(call.lists)


def _is_per_token(trial: Trial, source: nn.Module, inputs: Any, dim: int) -> bool:
    shape, size = trial.call.hidden().shape, trial.size
    whole, _ = fresh_leaves(inputs)
    one = sharing_copy(source)
    wanted = _tensors_of(one(*whole[0], **whole[1]))
    parts = []
    for index in range(size):
        rank = VirtualRank(ThreadMeeting(size), index, True, shape[dim], dim)
        cut, _ = fresh_leaves(inputs, functools.partial(trial._cut, rank, shape))
        twin = sharing_copy(source)
        parts.append(_tensors_of(twin(*cut[0], **cut[1])))
        _compare_held(held_numbers(twin), held_numbers(one))
    batch, tokens = (shape[0], shape[1]) if dim else (1, shape[0])
    return all(_joins(list(pieces), all_, batch, tokens) for *pieces, all_ in zip(*parts, wanted, strict=True))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _tensors_of(output: Any) -> list[Tensor]:
    values = list(output.values()) if isinstance(output, Mapping) else output
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _joins(pieces: list[Tensor], wanted: Tensor, batch: int, tokens: int) -> bool:
    """True if the pieces, tokens along dim 1 or flattened with the batch into dim 0, make up the whole."""
    if wanted.dim() and wanted.size(0) == batch * tokens:
        sizes = [shard_range(tokens, len(pieces), index) for index in range(len(pieces))]
        if any(p.size(0) != batch * (hi - lo) for p, (lo, hi) in zip(pieces, sizes, strict=True)):
            return False
        shaped = [p.reshape(batch, hi - lo, *p.shape[1:]) for p, (lo, hi) in zip(pieces, sizes, strict=True)]
        return _equal(torch.cat(shaped, 1).double(), wanted.reshape(batch, tokens, *wanted.shape[1:]).double())
    if wanted.dim() > 1 and wanted.size(1) == tokens:
        return _equal(torch.cat(pieces, 1).double(), wanted.double())
    return False


def _part(total: int, size: int, rank: int) -> slice:
    return slice(*shard_range(total, size, rank))


def _entering(fn: Callable[[Tensor], Tensor], apply: Callable[..., Any] = map_hidden) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return apply(args, kwargs, fn)

    return hook


def _hidden_of(output: Any) -> Tensor:
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor):
        raise TrialError(f"it returns {type(output).__name__}, not hidden states")
    return hidden


def _gradients(losses: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or not any(loss.requires_grad for loss in losses):
        return [None] * len(leaves)
    grads = iter(torch.autograd.grad(torch.stack(list(losses)).sum(), wanted, allow_unused=True))
    return [next(grads) if leaf.requires_grad else None for leaf in leaves]


def _equal(found: Tensor, wanted: Tensor, floor: float = 0.0) -> bool:
    if found.shape != wanted.shape or not bool((torch.isfinite(found) & torch.isfinite(wanted)).all()):
        return False  # an infinite scale would allow any difference
    if wanted.numel() == 0:
        return True
    scale = float(wanted.detach().abs().max())
    return float((found - wanted).detach().abs().max()) <= TOLERANCE * scale + 1e-5 * floor + 1e-6


def _compare(found: Tensor, wanted: Tensor, what: str, floor: float = 0.0) -> None:
    if found.shape != wanted.shape:
        raise DifferenceError(f"{what} has the shape {list(found.shape)} and not {list(wanted.shape)}")
    if not _equal(found, wanted, floor):
        scale = float(wanted.detach().abs().max()) + 1e-30
        error = float((found - wanted).detach().abs().max()) / scale
        raise DifferenceError(f"{what} would be off by {error:.0%}")


def _compare_held(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """What a forward has written to buffers and attributes: every rank's are to be those of the whole."""
    for name, value in wanted.items():
        mine = found.get(name, value)
        if not (mine.shape == value.shape and torch.equal(mine.nan_to_num(), value.nan_to_num())):
            _compare(mine.double(), value.double(), f"what it writes to {name}")
