"""One part of a model on the rank that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.pipeline.stages.calling import Keywords, StageOutput, call
from fastpar.pipeline.stages.chain import ModuleChain
from fastpar.pipeline.stages.weighting import LossMean


def registered(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter as `named_parameters` gives it, of whatever class: `get_parameter` refuses some of split layers."""
    path, _, leaf = name.rpartition(".")
    parameter = module.get_submodule(path)._parameters[leaf]
    assert parameter is not None
    return parameter


@dataclass(frozen=True)
class Tied:
    """One parameter that several parts use; each of them has its own copy, and their gradients belong together.

    names  part to the parameter's full names on that part: Tied({0: ("embed_tokens.weight",), 3: ("lm_head.weight",)})
    """

    names: Mapping[int, tuple[str, ...]]

    @property
    def parts(self) -> tuple[int, ...]:
        return tuple(sorted(self.names))

    def parameter(self, stage: Stage) -> nn.Parameter:
        """The copy of one of its parts."""
        return registered(stage.module, self.names[stage.part][0])

    def __str__(self) -> str:
        return ", ".join(f"{' = '.join(self.names[part])} on part {part}" for part in self.parts)


class StreamParts(Protocol):
    """The hidden states between two parts where ranks beside the pipeline have each a part of them, and hand it to the
    same rank of the next part."""

    def arrive(self, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Keep what the module's first layer is to get. Returns something of the whole's shape, which the module is
        called with in its place."""

    def depart(self, part: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """(part, shape of the whole) of what the module returns."""


@dataclass
class Stage:
    """One part of a model.

    part, num_parts  which part of how many
    module           module(*inputs, **keywords) -> tensor, tuple or dict (or a StageOutput); see `run`
    units            paths of the modules that this part alone holds, in the order in which they run
    keywords         keyword inputs of the batch that it takes: `name in stage.keywords`
    sends            skip tensors that go past the next part: name to the parts that receive them
    receives         skip tensors from before the previous part: name to the part that sends them
    passes, takes    skip tensors to the next and from the previous part, which go along with the output
    tied             parameters of this part that others use as well
    loss_mean        what the model's own loss is the mean of, on a part that returns it
    fingerprint      checksums of the whole model's parameters before it was cut, to compare between ranks
    prefix           of the names of its parameters, where the module does not hold them under their full names
    taken, sent      where hidden states come from the previous, and go to the next part as a rank's part; None: whole
    """

    part: int
    num_parts: int
    module: nn.Module
    units: tuple[str, ...]
    keywords: Keywords
    sends: Mapping[str, tuple[int, ...]]
    receives: Mapping[str, int]
    tied: tuple[Tied, ...]
    prefix: str = ""
    passes: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    loss_mean: LossMean = field(default_factory=LossMean)
    fingerprint: Mapping[str, int] = field(default_factory=dict)
    taken: StreamParts | None = None
    sent: StreamParts | None = None

    @staticmethod
    @checked(computed=False)
    def of_module(module: nn.Module, part: int, num_parts: int) -> Stage:
        """A module that is a part by itself, called by the signature of its forward; its parameters are named as in
        `nn.ModuleList(parts)`."""
        return Stage(part, num_parts, module, (), Keywords.of(module), {}, {}, (), prefix=str(part))

    @property
    def is_first(self) -> bool:
        """Whether it takes the batch."""
        return self.part == 0

    @property
    def is_last(self) -> bool:
        """Whether its output is the model's."""
        return self.part == self.num_parts - 1

    @property
    def trainable(self) -> bool:
        """Whether any parameter here needs a gradient."""
        return any(p.requires_grad for p in self.module.parameters())

    def run(
        self, received: Any, keywords: Mapping[str, Any] | None = None, skips: Mapping[str, Tensor] | None = None
    ) -> tuple[Any, dict[str, Tensor]]:
        """Forward of one microbatch: (what the next part receives, skip tensors to send).

        received  what `run` of the part before returned; for part 0 the positional inputs, as a tuple, which may be
                  empty
        keywords  the batch's keyword inputs; the part takes those it knows
        skips     one tensor for each name in `receives`
        """
        skips = skips or {}
        if skips.keys() != self.receives.keys():
            raise ValueError(f"part {self.part} receives skips {sorted(self.receives)}, but got {sorted(skips)}")
        named = {**(self.keywords.select(keywords) if keywords else {}), **skips}
        if self.takes:
            received, taken = received
            named |= taken
        if self.taken is not None:
            received = self.taken.arrive(*received)
        if isinstance(self.module, (ModuleChain, nn.Sequential)) and self.part:
            output = self.module(received, **named)  # their own rule for tuples and dicts holds between parts as well
        else:
            output = call(self.module, received, named)
        value, found = (output.output, output.skips) if isinstance(output, StageOutput) else (output, {})
        if self.sent is not None:
            value = self.sent.depart(value)
        if not (found or self.sends or self.passes):
            return value, found
        if set(found) != {*self.sends, *self.passes}:
            declared = sorted({*self.sends, *self.passes})
            raise ValueError(f"part {self.part} sends skips {declared}, but returned {sorted(found)}")
        if self.passes:
            value = (value, {name: found[name] for name in self.passes})
        return value, {name: found[name] for name in self.sends}
