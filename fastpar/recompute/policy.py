"""What to recompute: small frozen dataclasses that `apply_recompute` and `checkpoint` take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from fastpar.arguments import checked, checked_fields
from fastpar.recompute import plan as plans
from fastpar.recompute.budget import optimal_plan
from fastpar.recompute.plan import LayerCost, RecomputePlan


class Policy(Protocol):
    """`plan` says which layers of a chain are run again and when; `keep` what survives of a layer that is."""

    def plan(self, num_layers: int) -> RecomputePlan:
        """What each of `num_layers` layers keeps and recomputes."""
        ...


@dataclass(frozen=True)
class NoRecompute:
    """Keep everything."""

    @checked(computed=False)
    def plan(self, num_layers: int) -> RecomputePlan:
        """What each of `num_layers` layers keeps and recomputes."""
        return RecomputePlan(num_layers, plans.keep_all(0, num_layers))


@dataclass(frozen=True)
class Full:
    """Keep each layer's input; run the layer again when its backward comes."""

    @checked(computed=False)
    def plan(self, num_layers: int) -> RecomputePlan:
        """What each of `num_layers` layers keeps and recomputes."""
        return plans.each_layer(num_layers)


@checked_fields
@dataclass(frozen=True)
class Selective:
    """`Full`, but results of the expensive operations and of collectives are kept, so that neither runs twice.

    keep  the operators whose results are kept, as OpOverloads such as torch.ops.aten.mm.default; they must return new
          tensors. None: matrix products, convolutions, attention and functional collectives. fastpar's own linears and
          the differentiable collectives of fastpar.comm are always kept, as wholes.
    """

    keep: tuple[Any, ...] | None = None

    @checked(computed=False)
    def plan(self, num_layers: int) -> RecomputePlan:
        """What each of `num_layers` layers keeps and recomputes."""
        return plans.each_layer(num_layers)


@checked_fields
@dataclass(frozen=True)
class Segments:
    """Cut the chain into `count` stretches, keep their inputs, and the activations of one stretch at a time.

    None: about sqrt(n) stretches, where count + n / count is least.
    """

    count: int | None = None

    @checked(computed=False)
    def plan(self, num_layers: int) -> RecomputePlan:
        """What each of `num_layers` layers keeps and recomputes."""
        return plans.segments(num_layers, round(math.sqrt(num_layers)) if self.count is None else self.count)


@checked_fields
@dataclass(frozen=True)
class Binomial:
    """Hold at most `slots` inputs and one layer's activations, with the fewest recomputations (Revolve)."""

    slots: int

    @checked(computed=False)
    def plan(self, num_layers: int) -> RecomputePlan:
        """What each of `num_layers` layers keeps and recomputes."""
        return plans.binomial(num_layers, self.slots)


@dataclass(frozen=True)
class ConstantMemory:
    """Hold the chain's input and one layer's activations: n (n - 1) / 2 recomputations."""

    @checked(computed=False)
    def plan(self, num_layers: int) -> RecomputePlan:
        """What each of `num_layers` layers keeps and recomputes."""
        return plans.binomial(num_layers, 1)


@checked_fields
@dataclass(frozen=True)
class Budget:
    """The fastest plan that holds at most `bytes` beyond the chain's input (`optimal_plan`).

    costs  of each layer, as `measure_layers` returns them
    """

    bytes: int
    costs: tuple[LayerCost, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", tuple(self.costs))
        optimal_plan(self.costs, self.bytes)  # says at once what does not fit

    @checked(computed=False)
    def plan(self, num_layers: int) -> RecomputePlan:
        """What each of `num_layers` layers keeps and recomputes."""
        if num_layers != len(self.costs):
            raise ValueError(f"the budget has costs of {len(self.costs)} layers, but the chain has {num_layers}")
        return optimal_plan(self.costs, self.bytes)
