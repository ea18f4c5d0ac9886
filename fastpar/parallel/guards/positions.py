"""Positions, which nothing beside the blocks may mix while the sequence is split.

Blocks gather their input; what else a layer does must work on each position by itself. A convolution along the
sequence, a state-space model, a token shift in the layer's own code would see the positions of one rank and compute
something else, and no name tells them. So one layer of every kind is run again after a forward that is watched, with
what it was called with: once as it was, and once with other numbers at all positions but one, while its blocks return
what they returned (with other numbers there as well). At that one position the output must be the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.comm import Communicator
from fastpar.contracts.rehearsal import attributes_as_they_were, buffers_as_they_were
from fastpar.tensor.sequence import SequenceRegion, map_hidden, map_output

_log = logging.getLogger("fastpar")
_FAR = 1e-2  # of the largest output; other positions change it by its own size


class _Recorded(nn.Module):
    """A module in the place of a block: returns what it returned, or the same with other numbers at other positions."""

    def __init__(self, block: nn.Module, output: Any):
        super().__init__()
        self.__dict__["block"], self.output = block, output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)


@dataclass
class _LayerCall:
    """A layer of one kind, what it was called with, and what its blocks returned."""

    path: str
    layer: nn.Module
    blocks: tuple[str, ...]  # relative to the layer
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


class PositionGuard:
    """Watches one layer of each kind during a forward, and tries it afterwards. Collective: one byte a rank, and what
    the layer's own modules send."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._calls: list[tuple[_LayerCall, SequenceRegion]] = []
        self._handles: list[Any] = []

    def start(self, layers: Mapping[str, tuple[nn.Module, SequenceRegion]], blocks: Sequence[str]) -> None:
        """Watch the forward that begins. `layers` pass the split stream on; `blocks` gather it."""
        self.stop()
        kinds = set()
        for path, (layer, region) in layers.items():
            inside = tuple(b[len(path) + 1 :] for b in blocks if b.startswith(path + "."))
            kind = (type(layer).__qualname__, inside, tuple((n, type(m).__name__) for n, m in layer.named_modules()))
            if kind not in kinds and path not in blocks:
                kinds.add(kind)
                self._watch(_LayerCall(path, layer, inside), region)

    def stop(self) -> None:
        """No longer watch."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._calls = [], []

    def _watch(self, call: _LayerCall, region: SequenceRegion) -> None:
        def called(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call.args, call.kwargs = args, kwargs

        def returned(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                call.outputs[name] = output

            return hook

        self._calls.append((call, region))
        self._handles.append(call.layer.register_forward_pre_hook(called, with_kwargs=True))
        for name in call.blocks:
            self._handles.append(call.layer.get_submodule(name).register_forward_hook(returned(name)))

    @torch.no_grad()
    def check(self) -> None:
        """Try the layers that were called; ValueError on every rank names the first thing that mixes positions."""
        calls = self._calls
        self.stop()
        found = ""
        for call, region in calls:
            if (call.args or call.kwargs) and min(region.sizes) > 1:
                found = found or _mixes(call, region)
        if self.comm.all_gather(torch.tensor([bool(found)], device="cpu")).any():
            raise ValueError(
                f"{found or 'a layer on another rank'} mixes positions, and with sequence_parallel=True sees those of "
                "this rank only. Give it the style 'block' and its linears 'colwise' and 'rowwise', so that its input "
                "is gathered, or use sequence_parallel=False"
            )


def _mixes(call: _LayerCall, region: SequenceRegion) -> str:
    """The path of what makes the layer's output at one position depend on others, or nothing."""
    at = region.sizes[region.comm.rank] // 2
    try:
        with as_it_was(call.layer) as rewind:
            seen, out = _run(call, region, at, None)
            rewind()
            seen_again, again = _run(call, region, at, torch.Generator().manual_seed(0))
    except Exception as error:  # whatever the layer's own code says of being called again
        _log.warning("%s could not be tried for whether it mixes positions: %s", call.path, error)
        return ""
    for path, x in seen.items():
        if path in seen_again and _differ(x, seen_again[path]):
            return f"{call.path}.{path} ({type(call.layer.get_submodule(path)).__name__})"
    return f"{call.path} ({type(call.layer).__name__}), in its own forward," if _differ(out, again) else ""


def _differ(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    scale = float(a.abs().max()) if a.numel() else 0.0
    return bool(((a - b).abs() > _FAR * scale + 1e-12).any())


def _run(
    call: _LayerCall, region: SequenceRegion, at: int, generator: torch.Generator | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Outputs at position `at` of the layer's own modules, in the order in which they end, and of the layer."""

    def other(x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if generator is None:
            return x.clone()  # the layer may add to what a block has returned, in place
        noise = torch.randn(x.shape, generator=generator, device="cpu").to(x) * (x.std() + 1)
        noise.select(region.dim, at).copy_(x.select(region.dim, at))
        return noise

    seen: dict[str, Tensor] = {}

    def noting(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            x = output[0] if isinstance(output, tuple) and output else output
            rows = _at(x, region, at)
            if rows is not None:
                seen[path] = rows

        return hook

    args, kwargs = map_hidden(call.args, call.kwargs, other)
    with contextlib.ExitStack() as stack:
        for name in call.blocks:
            if name in call.outputs:
                stack.enter_context(_replaced(call.layer, name, map_output(call.outputs[name], other)))
        for path, module in call.layer.named_modules():
            if path and not isinstance(module, _Recorded):
                handle = module.register_forward_hook(noting(path))
                stack.callback(handle.remove)
        output = type(call.layer).forward(call.layer, *args, **kwargs)
    x = output[0] if isinstance(output, tuple) else output
    rows = _at(x, region, at)
    return seen, x.new_zeros(0) if rows is None else rows


def _at(x: Any, region: SequenceRegion, at: int) -> Tensor | None:
    """The part of a tensor at one position of every sequence, or None where it has no positions."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        return None
    mine = region.sizes[region.comm.rank]
    if x.dim() > region.dim + 1 and x.size(region.dim) == mine:
        return x.select(region.dim, at)
    if x.dim() == 2 and region.dim == 1 and x.size(0) == region.batch * mine:
        return x[at::mine]
    return None


@contextlib.contextmanager
def _replaced(layer: nn.Module, name: str, output: Any) -> Iterator[None]:
    parent_path, _, leaf = name.rpartition(".")
    parent = layer.get_submodule(parent_path)
    block = parent._modules[leaf]
    assert block is not None
    parent._modules[leaf] = _Recorded(block, output)
    try:
        yield
    finally:
        parent._modules[leaf] = block


@contextlib.contextmanager
def as_it_was(layer: nn.Module) -> Iterator[Callable[[], None]]:
    """Leave generators, buffers (running means, counts of tokens) and modules' attributes as they are; yields what sets
    them back."""
    devices = sorted({b.device.index or 0 for b in layer.parameters() if b.device.type == "cuda"})
    with (
        attributes_as_they_were(layer) as rewind_attributes,
        buffers_as_they_were(layer) as rewind_buffers,
        torch.random.fork_rng(devices=devices),
    ):
        cpu = torch.get_rng_state()
        cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

        def rewind() -> None:
            rewind_attributes()
            rewind_buffers()
            torch.set_rng_state(cpu)
            for device, state in cuda.items():
                torch.cuda.set_rng_state(state, device)

        try:
            yield rewind
        finally:
            rewind()
