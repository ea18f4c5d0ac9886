"""What a rank of a pipeline holds of the model: a module's methods, under the names of the whole model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.pipeline.runtime.sharded_head import ShardedHead
from fastpar.pipeline.stages.stage import Stage

_Rank = TypeVar("_Rank", bound="RankModules")


class RankModules:
    """The stages of a rank by their numbers, and its shard of the head, if it has one; `Pipeline` sets both."""

    stages: dict[int, Stage]
    head: ShardedHead | None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages and its shard of the head, each once, under the names that they have in
        the whole model: what `fp.zero.shard(pipe, optimizer, group=mesh)` and checkpoints go by.

        All ranks together have every parameter of the model. One name stands for equal values wherever it appears: what
        several parts share is on each of them under its name, tied weights under the names they have there (the
        embedding's on one part, the head's on another). A second copy on the same rank is called "name@part3".
        """
        seen: set[nn.Parameter] = set()
        names: set[str] = set()
        parts = [stage.part for stage in self.stages.values()]
        for (module, prefix), part in itertools.zip_longest(self._named_modules(), parts):
            for name, parameter in module.named_parameters(prefix=prefix):
                if parameter in seen:
                    continue
                seen.add(parameter)
                unique = f"{name}@part{part}" if name in names else name
                names.add(unique)
                yield unique, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """`named_parameters` without names, which parameters carry as the attribute `pipeline_name`: whoever gets them
        alone, as an optimizer or `fastpar.zero.shard`, can tell those of all stages apart."""
        for name, parameter in self.named_parameters():
            vars(parameter)["pipeline_name"] = name
            yield parameter

    def modules(self) -> Iterator[nn.Module]:
        """The modules of this rank's stages and its shard of the head."""
        for module, _ in self._named_modules():
            yield from module.modules()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of this rank's stages, by their names in the whole model."""
        for module, prefix in self._named_modules():
            yield from module.named_buffers(prefix=prefix)

    @checked(computed=False)
    def train(self: _Rank, mode: bool = True) -> _Rank:
        """Put this rank's stages into training mode."""
        for module, _ in self._named_modules():
            module.train(mode)
        return self

    def eval(self: _Rank) -> _Rank:
        """`train(False)`."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """What this rank holds, under the names that it has in the whole model."""
        state: dict[str, Any] = {}
        for module, prefix in self._named_modules():
            state |= module.state_dict(prefix=f"{prefix}." if prefix else "")
        return state

    @checked(computed=False)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a state dict, which may be that of the whole model (but for a sharded head, which
        takes its own shard).

        Raises RuntimeError where something is missing, or has another shape.
        """
        for module, prefix in self._named_modules():
            dotted = f"{prefix}." if prefix else ""
            names = module.state_dict()
            module.load_state_dict({n: state_dict[dotted + n] for n in names if dotted + n in state_dict})

    def _named_modules(self) -> list[tuple[nn.Module, str]]:
        """This rank's stages and its shard of the head, each with the prefix of its names."""
        heads = [] if self.head is None else [(self.head, self.head.name)]
        return [*((stage.module, stage.prefix) for stage in self.stages.values()), *heads]
