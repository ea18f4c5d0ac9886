"""Parts of tensors, none of which may leave the model as if it were the whole.

What a forward returns beside its result is often recorded on the way: hidden states of inner layers, the routers'
logits, attention probabilities. Where the sequence is split these are of this rank's positions, and inside a block of
this rank's heads. They are known by the module that made them, so that every rank takes the same decision, and gathered
where they leave the module that holds the layers: before a model's own loss (such as a router's balance loss) reads
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastpar.comm import Communicator, gather_from
from fastpar.tensor.grid import GridRegion
from fastpar.tensor.sequence import SequenceRegion

_MARK = "_fastpar_part"


@dataclass(frozen=True)
class _Part:
    """The whole of which a tensor is a part."""

    path: str  # of the module that made it
    region: SequenceRegion | None  # whose positions it has some of; None: some heads of a block
    num_heads: int = 0  # on this rank
    grid: GridRegion | None = None  # around the block


class PartGuard:
    """Marks the tensors that modules return as parts, and gathers those that leave."""

    def __init__(self, comm: Communicator):
        self.comm = comm

    def __deepcopy__(self, memo: Any) -> PartGuard:
        return self  # holds nothing but the group

    def enter(self, region: SequenceRegion, path: str) -> Any:
        """`region.enter`, whose result is the first part: models record what goes into their first layer."""

        def fn(x: Tensor) -> Tensor:
            part = region.enter(x)
            _mark(part, _Part(path, region))
            return part

        return fn

    def mark_positions(self, module: nn.Module, path: str, region: SequenceRegion) -> Any:
        """Mark what `module` returns as this rank's positions; a number is refused. Returns the hook's handle."""
        part = _Part(path, region)

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                for x in output if isinstance(output, tuple | list) else (output,):
                    if isinstance(x, Tensor) and x.is_floating_point():
                        if not region.is_whole:
                            _refuse_number(x, path)
                        _mark(x, part)

        return module.register_forward_hook(hook)

    def mark_heads(self, module: nn.Module, path: str, region: SequenceRegion | None, num_heads: int) -> Any:
        """Mark what a block returns beside its result as this rank's heads. Returns the hook's handle."""
        result = None if region is None else _Part(path, region)
        part = _Part(path, None, num_heads, region if isinstance(region, GridRegion) else None)

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if (result is None and isinstance(output, Tensor)) or torch.compiler.is_compiling():
                return
            outputs = output if isinstance(output, tuple | list) else (output,)
            if result is not None and outputs and isinstance(outputs[0], Tensor):
                _mark(outputs[0], result)
            for x in outputs[1:]:
                if isinstance(x, Tensor) and x.is_floating_point():
                    _mark(x, part)

        return module.register_forward_hook(hook)

    def gather(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """A forward hook of a module that parts leave: the whole of each. Collective: one all-gather a part."""
        if isinstance(output, Tensor) or torch.compiler.is_compiling():
            return None
        return tree_map_only(Tensor, self._whole, output)

    def _whole(self, x: Tensor) -> Tensor:
        part: _Part | None = getattr(x, _MARK, None)
        if part is None or (part.region is not None and part.region.is_whole):
            return x
        if part.region is not None:
            whole = part.region.whole_of(x)
            if whole is None:
                raise RuntimeError(
                    f"the model returns a tensor of shape {list(x.shape)} that {part.path} made of this rank's "
                    f"{part.region.sizes[part.region.comm.rank]} of the {part.region.total} positions; it cannot be "
                    f"told how the ranks' parts form the whole. Do not ask for it with {part.region.option}"
                )
            return whole
        if x.dim() == 4 and part.num_heads and x.size(1) == part.num_heads:
            if part.grid is not None:
                return part.grid.whole_heads(x, part.num_heads)
            return gather_from(x, self.comm, dim=1, sizes=[part.num_heads] * self.comm.size)
        raise RuntimeError(
            f"the model returns a tensor of shape {list(x.shape)} that {part.path} made of this rank's heads or "
            "features; it cannot be told how the ranks' parts form the whole. Do not ask for it, or leave this block "
            "out of the plan"
        )


def _mark(x: Tensor, part: _Part) -> None:
    setattr(x, _MARK, part)


def _refuse_number(x: Tensor, path: str) -> None:
    if x.dim() == 0:
        raise RuntimeError(
            f"{path} returns a number beside its hidden states, which with sequence_parallel=True is computed from "
            "this rank's positions alone (a balance loss, for instance). Turn it off, or use sequence_parallel=False"
        )
