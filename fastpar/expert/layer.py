"""A mixture-of-experts layer under any layout. See `MoELayer`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastpar.arguments import check_counts, checked, checked_fields, shown
from fastpar.comm import (
    Communicator,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_scatter_sequence,
    scatter_to,
    shard_sizes,
)
from fastpar.contracts.linear import autocast_dtype
from fastpar.contracts.moe import ExpertRule, activate
from fastpar.expert.placement import Placement
from fastpar.expert.presets import RouterPreset
from fastpar.expert.presets import preset as find_preset
from fastpar.expert.replicas import ExpertReplicas, check_equal
from fastpar.expert.router import MAX_EXPERTS, Router, check_dtype
from fastpar.expert.weights import ExpertGroups, make_expert_weight, unwrap
from fastpar.mesh import Mesh
from fastpar.ops._autograd import in_backward
from fastpar.ops.moe.capacity import moe_capacity
from fastpar.ops.moe.mlp import moe_mlp
from fastpar.ops.moe.plan import DEFAULT_DISPATCH, Dispatch
from fastpar.ops.moe.weights import ExpertWeights


class Experts(nn.Module):
    """Feed-forward experts whose tokens come from, and go back to, the ranks of a mesh.

        gate_up_proj  [E, 2, I, H]   gate and up ([E, 1, I, H] where the activation has no gate)
        down_proj     [E, H, I]
        gate_up_bias  [E, 2, I], down_bias [E, H]   with bias=True

    Parameters are DTensors where the mesh has ep or etp: E over ep, I over etp.

    forward(x [T, H], indices [T, K], weights [T, K], add [T, H] or None) -> [T, H], each rank with tokens of its own.
    `add` may be a function that gives it, to be called while results travel. With etp, one all-gather of tokens before
    and one reduce-scatter after, over etp. `dispatch`: how tokens travel, see `fastpar.ops.Dispatch`. `replicas`:
    copies of other ranks' experts that a rank may have; `place` says of which, and `fastpar.expert.rebalance` finds
    out.
    """

    @checked(computed=False)
    def __init__(
        self,
        hidden: int,
        inner: int,
        num_experts: int,
        *,
        rule: ExpertRule | None = None,
        bias: bool = False,
        mesh: Mesh | None = None,
        dispatch: Dispatch | None = None,
        replicas: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_counts(hidden=hidden, inner=inner)
        check_counts(MAX_EXPERTS, num_experts=num_experts)
        check_dtype(dtype)
        if replicas < 0:
            raise ValueError(f"replicas must not be negative, got {replicas}")
        self.rule = rule or ExpertRule()
        if self.rule.transposed or self.rule.interleaved:
            raise ValueError("Experts keeps its weights as [E, 2, I, H]: rule.transposed and interleaved must be False")
        self.hidden, self.inner, self.num_experts = hidden, inner, num_experts
        self.groups = ExpertGroups(mesh)
        self.dispatch = dispatch or DEFAULT_DISPATCH
        self.replicas = replicas
        self._replicas: ExpertReplicas | None = None
        products = 2 if self.rule.is_gated else 1

        def weight(shape: tuple[int, ...], split: int | None, fan_in: int) -> nn.Parameter:
            bound = 1 / math.sqrt(fan_in)  # nn.Linear's
            draw = partial(nn.init.uniform_, a=-bound, b=bound)
            return make_expert_weight(shape, self.groups, split, draw, dtype=dtype, device=device)

        self.gate_up_proj = weight((num_experts, products, inner, hidden), 2, hidden)
        self.down_proj = weight((num_experts, hidden, inner), 2, inner)
        self.gate_up_bias = weight((num_experts, products, inner), 2, hidden) if bias else None
        self.down_bias = weight((num_experts, hidden), None, inner) if bias else None

    @property
    def placement(self) -> Placement | None:
        """Which copies there are; None: no copies."""
        return None if self._replicas is None else self._replicas.placement

    @checked(computed=False)
    def place(self, placement: Placement | None) -> None:
        """From the next forward on, have these copies of experts compute (None: no copies).

        Results and gradients stay what they are but for the order of sums; parameters, gradients and checkpoints
        stay where they are. A placement is not saved: after loading, place again. All ranks of ep and etp call it, with
        equal placements: two all-gathers of three numbers. Raises ValueError on all of them for what is wrong on one.
        """
        groups, problem = self.groups, ""
        if placement is not None and (placement.ep, placement.num_experts) != (groups.ep.size, self.num_experts):
            problem = (
                f"the placement is for {placement.num_experts} experts on {placement.ep} ranks, "
                f"not for {self.num_experts} on {groups.ep.size}"
            )
        elif placement is not None and placement.slots > self.replicas:
            problem = f"the placement has {placement.slots} copies on a rank, but replicas is {self.replicas}"
        check_equal(placement, problem, (groups.ep, groups.etp), self.down_proj.device)
        self._replicas = ExpertReplicas(placement, groups.ep) if placement is not None and placement.slots else None

    def forward(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        add: Tensor | Callable[[], Tensor | None] | None = None,
    ) -> Tensor:
        etp = self.groups.etp
        experts, replicas = self._weights(), None
        if self._replicas is not None:
            mine, copies = self._replicas.fetch(experts, autocast_dtype(x))
            experts, replicas = ExpertWeights(*mine), ExpertWeights(*copies)
        run = partial(
            moe_mlp, rule=self.rule, group=self.groups.ep, dispatch=self.dispatch, grad_scale=self.groups.grad_scale
        )
        if etp.size == 1:
            return run(x, self._physical(indices), weights, experts, replicas=replicas, add=add)
        sizes = _sizes(len(x), etp)
        x = gather_sequence(x, etp, dim=0, sizes=sizes)
        weights = gather_sequence(weights, etp, dim=0, sizes=sizes)
        indices = self._physical(etp.all_gather(indices, sizes=sizes))
        experts, replicas = experts.second_bias_once(etp), replicas and replicas.second_bias_once(etp)
        # Added behind the sum over etp: within it, it would be added on every rank.
        given: list[Tensor | None] = [] if callable(add) else [add]
        called = (lambda: given.append(add())) if callable(add) else None
        out = run(x, indices, weights, experts, replicas=replicas, add=called)
        out = reduce_scatter_sequence(out, etp, dim=0, sizes=sizes)
        return out if given[0] is None else out + given[0]

    def _weights(self) -> ExpertWeights:
        """This rank's, as `moe_mlp` takes them."""
        first, second = unwrap(self.gate_up_proj, self.groups), unwrap(self.down_proj, self.groups)
        first_bias = None if self.gate_up_bias is None else unwrap(self.gate_up_bias, self.groups).flatten(1)
        second_bias = None if self.down_bias is None else unwrap(self.down_bias, self.groups)
        return ExpertWeights(first.flatten(1, 2), second, first_bias, second_bias)

    def _physical(self, indices: Tensor) -> Tensor:
        return indices if self._replicas is None else self._replicas.physical(indices)

    def extra_repr(self) -> str:
        ep, etp = self.groups.ep.size, self.groups.etp.size
        copies = f", replicas={self.replicas}" if self.replicas else ""
        return f"hidden={self.hidden}, inner={self.inner}, num_experts={self.num_experts}, ep={ep}, etp={etp}{copies}"


class SharedExpert(nn.Module):
    """An expert that every token goes through: down(activation(gate_up(x))), times sigmoid(gate(x)) if `gated`.

    gate_up_proj.weight [2I, H] (I without gate), down_proj.weight [H, I], gate.weight [1, H]
    """

    @checked(computed=False)
    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        rule: ExpertRule | None = None,
        gated: bool = False,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_counts(hidden=hidden, inner=inner)
        check_dtype(dtype)
        self.rule = rule or ExpertRule()
        products = 2 if self.rule.is_gated else 1
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        self.gate_up_proj = nn.Linear(hidden, products * inner, bias=bias, **like)
        self.down_proj = nn.Linear(inner, hidden, bias=bias, **like)
        self.gate = nn.Linear(hidden, 1, bias=False, **like) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        if (
            not isinstance(x, Tensor)
            or x.dim() < 1
            or x.shape[-1] != self.gate_up_proj.in_features
            or not x.is_floating_point()
            or x.dtype.itemsize < 2  # torch has no GEMM of float8 with other dtypes
        ):
            raise ValueError(f"x must be a floating-point tensor [.., {self.gate_up_proj.in_features}], got {shown(x)}")
        out: Tensor = self.down_proj(activate(self.gate_up_proj(x), self.rule))
        return out if self.gate is None else out * functional.sigmoid(self.gate(x))


@checked_fields
@dataclass(frozen=True)
class Capacity:
    """A limit to the tokens of an expert: the arguments of `fastpar.ops.moe_capacity`. Choices over it go nowhere."""

    factor: float
    policy: str = "probability"
    minimum: int = 0


class MoELayer(nn.Module):
    """out = shared(x) + sum over a token's experts of weight * expert(x), whatever ranks the experts are on.

        x    [..., H]   with tp: the same on all ranks of tp, or with `sequence_parallel` this rank's tokens
        out  [..., H]   likewise

    router   a `Router` (whose `group` is tp: see `from_preset`), or a module [T, H] -> something with `indices` and
             `weights`, [T, K]
    experts  `Experts`
    shared   a module [T, H] -> [T, H], as `SharedExpert`, or None
    capacity None: no choice is dropped

    The shared expert runs while the experts' results are on their way back, and its backward while the gradients are on
    their way to the experts.

    Every token is routed and computed on one rank of tp. Without sequence parallelism a rank takes its part of the
    tokens, and the outputs are gathered: one all-gather in forward and one in backward. Parameters of router and shared
    expert are the same on all ranks of tp; their gradients are summed there, one all-reduce each in backward.

    Gradients of all parameters are those of the mean over data parallelism: average the experts' over mesh["edp"] (the
    ranks with the same part of them; mesh["dp"] where ep and etp are 1), all others over mesh["dp"], as `fp.zero` does.

    `dropped` int64 counts the choices of this rank's tokens that were over capacity since it was last zeroed;
    `router.load` those of each expert, before that.
    """

    dropped: Tensor

    @checked(computed=False)
    def __init__(
        self,
        router: nn.Module,
        experts: Experts,
        shared: nn.Module | None = None,
        *,
        capacity: Capacity | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.capacity, self.sequence_parallel = capacity, sequence_parallel
        self.register_buffer("dropped", torch.empty((), dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """`dropped` 0; router and experts have initialisations of their own."""
        self.dropped.zero_()

    @classmethod
    @checked(computed=False)
    def from_preset(
        cls,
        preset: str | RouterPreset,
        hidden: int,
        inner: int,
        num_experts: int,
        *,
        mesh: Mesh | None = None,
        activation: str = "swiglu",
        bias: bool = False,
        shared_inner: int = 0,
        shared_gated: bool = False,
        router: dict[str, Any] | None = None,
        capacity: Capacity | None = None,
        sequence_parallel: bool = False,
        dispatch: Dispatch | None = None,
        replicas: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **routing: Any,
    ) -> MoELayer:
        """A layer that routes as a known model does.

            layer = MoELayer.from_preset("qwen3_moe", 2048, 768, 128, mesh=mesh, top_k=8)

        preset    a name of `fastpar.expert.PRESETS`, or a `RouterPreset`
        shared_inner, shared_gated  of a `SharedExpert`; 0: there is none
        router    further arguments of `Router`
        dispatch  how tokens travel: see `fastpar.ops.Dispatch`
        replicas  copies of hot experts on every rank, once `rebalance` has placed them
        routing   fields of the preset's rule to change, such as top_k
        """
        chosen = find_preset(preset) if isinstance(preset, str) else preset
        chosen = chosen.routing(**routing) if routing else chosen
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        rule = ExpertRule(activation, weigh=chosen.weigh)
        experts = Experts(
            hidden, inner, num_experts, rule=rule, bias=bias, mesh=mesh, dispatch=dispatch, replicas=replicas, **like
        )
        made = chosen.router(hidden, num_experts, **{"group": experts.groups.tp, **like, **(router or {})})
        shared = SharedExpert(hidden, shared_inner, rule=rule, gated=shared_gated, **like) if shared_inner else None
        return cls(made, experts, shared, capacity=capacity, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != self.experts.hidden or x.is_sparse:
            raise ValueError(f"x must be a tensor [.., {self.experts.hidden}], got {shown(x)}")
        tp = self.experts.groups.tp
        shape = x.shape
        tokens = x.reshape(-1, shape[-1])
        sizes = shard_sizes(len(tokens), tp.size)
        is_cut = tp.size > 1 and not self.sequence_parallel
        if is_cut:
            tokens = scatter_to(tokens, tp, dim=0)
        routing = _on_part_of_tokens(self.router, tokens, tp, **self._sequences(x, sizes if is_cut else None))
        indices = routing.indices
        if self.capacity is not None:
            limit = self.capacity
            indices = moe_capacity(
                indices,
                routing.weights,
                num_experts=self.experts.num_experts,
                factor=limit.factor,
                policy=limit.policy,
                minimum=limit.minimum,
            )
            if not in_backward():  # a recomputation drops no more
                self.dropped += (indices != routing.indices).sum()
        shared: Any = None if self.shared is None else partial(_on_part_of_tokens, self.shared, tokens, tp)
        if shared is not None and torch.compiler.is_compiling():  # into the graph before the experts, which are in none
            shared = shared()
        out = self.experts(tokens, indices, routing.weights, shared)
        if is_cut:
            out = gather_from(out, tp, dim=0, sizes=sizes)
        return out.view(shape)

    def _sequences(self, x: Tensor, sizes: list[int] | None) -> dict[str, Any]:
        """Options of a `Router`: which sequence of x [B, S, H] each of this rank's tokens is of."""
        if x.dim() != 3 or not isinstance(self.router, Router):
            return {}
        sequences = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1])
        if sizes is not None:
            sequences = sequences.split(sizes)[self.experts.groups.tp.rank]
        return {"sequences": sequences, "num_sequences": len(x)}


def _on_part_of_tokens(module: nn.Module, tokens: Tensor, tp: Communicator, **arguments: Any) -> Any:
    """The module on this rank's tokens, its parameters' gradients summed over tp."""
    if tp.size == 1:
        return module(tokens, **arguments)
    parameters = {name: copy_to(p, tp) for name, p in module.named_parameters() if p.requires_grad}
    return torch.func.functional_call(module, parameters, (tokens,), arguments)


def _sizes(rows: int, comm: Communicator) -> list[int]:
    """Rows on each rank."""
    found: list[int] = comm.all_gather(torch.tensor([rows])).tolist()
    return found
