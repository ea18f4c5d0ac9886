"""A mixture-of-experts layer under any layout. See `MoELayer`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastpar.comm import (
    Communicator,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_scatter_sequence,
    scatter_to,
    shard_sizes,
)
from fastpar.expert.weights import ExpertGroups, make_expert_weight, unwrap
from fastpar.mesh import Mesh
from fastpar.ops.moe_mlp import moe_mlp
from fastpar.reference.moe_mlp import ExpertRule, activate


class Experts(nn.Module):
    """Feed-forward experts whose tokens come from, and go back to, the ranks of a mesh.

        gate_up_proj  [E, 2, I, H]   gate and up ([E, 1, I, H] where the activation has no gate)
        down_proj     [E, H, I]
        gate_up_bias  [E, 2, I], down_bias [E, H]   with bias=True

    Parameters are DTensors where the mesh has ep or etp: E over ep, I over etp.

    forward(x [T, H], indices [T, K], weights [T, K], add [T, H] or None) -> [T, H], each rank with tokens of its own.
    With etp, one all-gather of tokens before and one reduce-scatter after, over etp.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        num_experts: int,
        *,
        rule: ExpertRule | None = None,
        bias: bool = False,
        mesh: Mesh | None = None,
        transport: str = "auto",
        exact: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.rule = rule or ExpertRule()
        if self.rule.transposed or self.rule.interleaved:
            raise ValueError("Experts keeps its weights as [E, 2, I, H]: rule.transposed and interleaved must be False")
        self.hidden, self.inner, self.num_experts = hidden, inner, num_experts
        self.groups = ExpertGroups(mesh)
        self.transport, self.exact = transport, exact
        products = 2 if self.rule.is_gated else 1

        def weight(shape: tuple[int, ...], split: int | None, fan_in: int) -> nn.Parameter:
            bound = 1 / math.sqrt(fan_in)  # nn.Linear's
            draw: Callable[[Tensor], Any] = lambda x: nn.init.uniform_(x, -bound, bound)  # noqa: E731
            return make_expert_weight(shape, self.groups, split, draw, dtype=dtype, device=device)

        self.gate_up_proj = weight((num_experts, products, inner, hidden), 2, hidden)
        self.down_proj = weight((num_experts, hidden, inner), 2, inner)
        self.gate_up_bias = weight((num_experts, products, inner), 2, hidden) if bias else None
        self.down_bias = weight((num_experts, hidden), None, inner) if bias else None

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        etp = self.groups.etp
        first = unwrap(self.gate_up_proj, self.groups).flatten(1, 2)
        second = unwrap(self.down_proj, self.groups)
        first_bias = None if self.gate_up_bias is None else unwrap(self.gate_up_bias, self.groups).flatten(1)
        second_bias = None if self.down_bias is None else unwrap(self.down_bias, self.groups)
        options: dict[str, Any] = {"group": self.groups.ep, "transport": self.transport, "exact": self.exact}
        if etp.size == 1:
            return moe_mlp(
                x, indices, weights, first, second,
                first_bias=first_bias, second_bias=second_bias, rule=self.rule, add=add, **options,
            )  # fmt: skip
        sizes = _sizes(len(x), etp)
        x = gather_sequence(x, etp, dim=0, sizes=sizes)
        weights = gather_sequence(weights, etp, dim=0, sizes=sizes)
        indices = etp.all_gather(indices, sizes=sizes)
        if second_bias is not None:
            second_bias = _OnOneRank.apply(second_bias, etp.rank == 0)
        out = moe_mlp(
            x, indices, weights, first, second,
            first_bias=first_bias, second_bias=second_bias, rule=self.rule, **options,
        )  # fmt: skip
        out = reduce_scatter_sequence(out, etp, dim=0, sizes=sizes)
        return out if add is None else out + add

    def extra_repr(self) -> str:
        ep, etp = self.groups.ep.size, self.groups.etp.size
        return f"hidden={self.hidden}, inner={self.inner}, num_experts={self.num_experts}, ep={ep}, etp={etp}"


class _OnOneRank(torch.autograd.Function):
    """A bias that every rank of etp has and one of them adds; each has all tokens' gradients, so each its whole."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, is_mine: bool) -> Tensor:
        return bias.clone() if is_mine else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class SharedExpert(nn.Module):
    """An expert that every token goes through: down(activation(gate_up(x))), times sigmoid(gate(x)) if `gated`.

    gate_up_proj.weight [2I, H] (I without gate), down_proj.weight [H, I], gate.weight [1, H]
    """

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
        self.rule = rule or ExpertRule()
        products = 2 if self.rule.is_gated else 1
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        self.gate_up_proj = nn.Linear(hidden, products * inner, bias=bias, **like)
        self.down_proj = nn.Linear(inner, hidden, bias=bias, **like)
        self.gate = nn.Linear(hidden, 1, bias=False, **like) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(activate(self.gate_up_proj(x), self.rule))
        return out if self.gate is None else out * functional.sigmoid(self.gate(x))


class MoELayer(nn.Module):
    """out = shared(x) + sum over a token's experts of weight * expert(x), whatever ranks the experts are on.

        x    [..., H]   with tp: the same on all ranks of tp, or with `sequence_parallel` this rank's tokens
        out  [..., H]   likewise

    router   a module: [T, H] -> something with `indices` [T, K] and `weights` [T, K], as `fastpar.expert.Router`
    experts  `Experts`
    shared   a module [T, H] -> [T, H], as `SharedExpert`, or None

    Every token is routed and computed on one rank of tp. Without sequence parallelism a rank takes its part of the
    tokens, and the outputs are gathered: one all-gather in forward and one in backward. Parameters of router and shared
    expert are the same on all ranks of tp; their gradients are summed there, one all-reduce each in backward.

    Gradients of all parameters are those of the mean over data parallelism: average the experts' over mesh["edp"] (the
    ranks with the same part of them; mesh["dp"] where ep and etp are 1), all others over mesh["dp"].

    `load` int64 [E] counts the choices of each expert on this rank since `reset_load()`, in forward passes of training.
    """

    load: Tensor

    def __init__(
        self,
        router: nn.Module,
        experts: Experts,
        shared: nn.Module | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.sequence_parallel = sequence_parallel
        self.register_buffer("load", torch.zeros(experts.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tp = self.experts.groups.tp
        shape = x.shape
        tokens = x.reshape(-1, shape[-1])
        sizes = shard_sizes(len(tokens), tp.size)
        is_cut = tp.size > 1 and not self.sequence_parallel
        if is_cut:
            tokens = scatter_to(tokens, tp, dim=0)
        routing = _on_part_of_tokens(self.router, tokens, tp)
        if self.training:
            self._count(routing.indices)
        shared = None if self.shared is None else _on_part_of_tokens(self.shared, tokens, tp)
        out = self.experts(tokens, routing.indices, routing.weights, shared)
        if is_cut:
            out = gather_from(out, tp, dim=0, sizes=sizes)
        return out.view(shape)

    @torch.no_grad()
    def _count(self, indices: Tensor) -> None:
        """Without a synchronisation, and without what goes nowhere."""
        bins = torch.zeros(len(self.load) + 2, dtype=torch.int64, device=indices.device)
        flat = indices.reshape(-1).long() + 1  # -1 and E have bins of their own
        self.load += bins.scatter_add_(0, flat, torch.ones_like(flat))[1:-1]

    def reset_load(self) -> None:
        self.load.zero_()


def _on_part_of_tokens(module: nn.Module, tokens: Tensor, tp: Communicator) -> Any:
    """The module on this rank's tokens, its parameters' gradients summed over tp."""
    if tp.size == 1:
        return module(tokens)
    parameters = {name: copy_to(p, tp) for name, p in module.named_parameters() if p.requires_grad}
    return torch.func.functional_call(module, parameters, (tokens,))


def _sizes(rows: int, comm: Communicator) -> list[int]:
    """Rows on each rank."""
    found: list[int] = comm.all_gather(torch.tensor([rows])).tolist()
    return found
