"""Experts as Hugging Face's models hold them: one module with the weights of all, stacked along the first dim.

    gate_up_proj  [E, 2I, H]   gate and up in one; without a gate: up_proj [E, I, H]
    down_proj     [E, H, I]
    gate_up_proj_bias [E, 2I], down_proj_bias [E, H]   or none

A module is known by these parameters and not by its class, and how it computes by what it says of itself (the flags of
transformers' `use_experts_implementation`: is_transposed, is_concatenated) and by its activation's values.

Note: rules are found by trying
    Models write the function between the two products (`_apply_gate`, `act_fn`) as code. `rule_of` calls it on a few
    hundred numbers of all magnitudes and looks which `ExpertRule` gives the same; `moe_mlp` then does the work. Where
    none does, or where a norm follows the experts, the module's own functions run between `moe_dispatch`, the grouped
    products and `moe_combine`: slower, with more activations saved, and right for any function of single rows.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastpar.comm import (
    Communicator,
    gather_from,
    gather_sequence,
    reduce_scatter_sequence,
    scatter_to,
    shard_range,
    shard_sizes,
)
from fastpar.comm.communicator import GroupLike
from fastpar.contracts.moe import ExpertRule, activate
from fastpar.ops._autograd import scale_grad
from fastpar.ops.moe.dispatch_combine import moe_combine, moe_dispatch
from fastpar.ops.moe.grouped_linear import grouped_linear
from fastpar.ops.moe.mlp import moe_mlp
from fastpar.ops.moe.weights import ExpertWeights
from fastpar.tensor.parameter import RowMap

_FIRST = ("gate_up_proj", "up_proj")
_SECOND = "down_proj"
_GATED = ("swiglu", "geglu", "clamped_swiglu")
_PLAIN = ("relu2", "gelu", "silu", "relu")


def is_stacked(module: nn.Module) -> bool:
    """True for a module of stacked experts: a first and a second weight of three dims, of as many experts."""
    own = module._parameters
    first, second = own.get(_first_name(module)), own.get(_SECOND)
    return first is not None and second is not None and first.dim() == second.dim() == 3 and len(first) == len(second)


def num_experts_of(module: nn.Module) -> int:
    """E of a module that `is_stacked`: of all experts, also where a rank has some of them."""
    return cast(Tensor, module._parameters[_SECOND]).shape[0]


def own_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters that are stacked by expert; TypeError for others beside them."""
    known = [name + suffix for name in (_first_name(module), _SECOND) for suffix in ("", "_bias")]
    own = [name for name, param in module._parameters.items() if param is not None]
    strangers = sorted(set(own) - set(known))
    if strangers:
        raise TypeError(
            f"{type(module).__name__} has the parameters {strangers} beside those of stacked experts, {known}"
        )
    return own


def _first_name(module: nn.Module) -> str:
    return next((name for name in _FIRST if name in module._parameters), _FIRST[0])


def _is_gated(module: nn.Module) -> bool:
    return _first_name(module) == "gate_up_proj"


def is_transposed(module: nn.Module) -> bool:
    """True where weights are [E, in, out]: what the module says, else what the shapes do."""
    said = getattr(module, "is_transposed", None)
    if said is not None or not _is_gated(module):
        return bool(said)
    first, second = (cast(Tensor, module._parameters[name]) for name in (_first_name(module), _SECOND))
    return first.shape[1] == second.shape[2]  # H twice; of [E, out, in] it would be 2I and I


def inner_cuts(module: nn.Module, ranks: int) -> dict[str, tuple[int, RowMap]]:
    """How each parameter is cut so that a rank has a part of every expert's inner features: dim and rows by name.

    Gate and up that lie one behind the other are cut each on its own; a second bias, added to the sum, is whole.
    """
    transposed, gated = is_transposed(module), _is_gated(module)
    inner = inner_size(module)
    first = RowMap.chunk(inner, ranks)
    if gated and getattr(module, "is_concatenated", True):
        first = RowMap.packed((inner, inner), ranks)
    elif gated:  # gate and up of each feature side by side
        first = RowMap.chunk(2 * inner, ranks)
    name = _first_name(module)
    cuts = {name: (2 if transposed else 1, first), f"{name}_bias": (1, first)}
    return cuts | {_SECOND: (1 if transposed else 2, RowMap.chunk(inner, ranks))}


def inner_size(module: nn.Module) -> int:
    """I of a module that `is_stacked`: of whole experts."""
    return cast(Tensor, module._parameters[_SECOND]).shape[1 if is_transposed(module) else 2]


# ---- what an expert computes between its two products


def _between(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module's own function from the first product to the input of the second."""
    if not _is_gated(module):
        return cast(Callable[[Tensor], Tensor], module.act_fn)
    if hasattr(module, "_apply_gate"):
        return cast(Callable[[Tensor], Tensor], module._apply_gate)

    def gated(hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, -1)
        return cast(Tensor, cast(Any, module).act_fn(gate) * up)

    return gated


_RULES: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ExpertRule | None]] = weakref.WeakKeyDictionary()


def rule_of(module: nn.Module) -> ExpertRule | None:
    """The `ExpertRule` of a module that `is_stacked`, or None where only its own functions say what it computes."""
    limit = _number(module, "limit", "swiglu_limit", default=7.0)
    alpha = _number(module, "alpha", "swiglu_alpha", default=1.702)
    gate, act = getattr(type(module), "_apply_gate", None), getattr(module, "act_fn", None)
    asked = (gate, act, limit, alpha, is_transposed(module), getattr(module, "is_concatenated", True))
    known = _RULES.get(module)
    if known is None or known[0] != asked:
        rule = None
        if not getattr(module, "has_post_expert_norm", False) and not _has_other_tensors(module):
            rule = _try_rules(module, limit, alpha)
        known = _RULES[module] = asked, rule
    return known[1]


def _number(module: nn.Module, *names: str, default: float) -> float:
    values = (getattr(module, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, int | float)), default)


def _has_other_tensors(module: nn.Module) -> bool:
    """True where there are tensors that the activation may depend on, and that may change."""
    weights = {id(param) for param in module._parameters.values()}
    rest = [*module.parameters(), *module.buffers()]
    return any(id(tensor) not in weights for tensor in rest)


@torch.no_grad()
def _try_rules(module: nn.Module, limit: float, alpha: float) -> ExpertRule | None:
    sample = _sample()
    try:
        found = _between(module)(sample).double()
    except RuntimeError:  # a function of other shapes than these
        return None
    interleaved = _is_gated(module) and not getattr(module, "is_concatenated", True)
    options: dict[str, Any] = {"transposed": is_transposed(module), "interleaved": interleaved}
    for activation in _GATED if _is_gated(module) else _PLAIN:
        rule = ExpertRule(activation, limit=limit, alpha=alpha, **options)
        wanted = activate(sample, rule)
        # Wide enough for a function that computes in float32, and far too narrow for another approximation of gelu.
        if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6):
            return rule
    return None


@functools.cache
def _sample() -> Tensor:
    """[256, 8] of either sign, from 0.01 to 1000 and somewhat beyond."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(256, 8, generator=generator, dtype=torch.float64, device="cpu")
    return rows * torch.logspace(-2, 3, 256, dtype=torch.float64, device="cpu")[:, None]


# ---- running them


class ExpertSpread(NamedTuple):
    """How the experts of a module lie on ranks.

    group        over whose ranks the experts are spread; the module then has this rank's, as plain tensors
    same_tokens  ranks that hold the same tokens, and the same losses: each takes its part of them to the experts, and
                 outputs are gathered, so that nothing is computed twice. Gradients come out as if it were one rank.
    etp          ranks that share each expert: the module has a part of their inner features (`inner_cuts`)
    grad_scale   a factor of the experts' gradients
    """

    group: GroupLike = None
    same_tokens: GroupLike = None
    etp: GroupLike = None
    grad_scale: float = 1.0


ON_ONE_RANK = ExpertSpread()


def run_experts(
    module: nn.Module,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    spread: ExpertSpread = ON_ONE_RANK,
    *,
    weigh: str = "after",
    add: Tensor | None = None,
) -> Tensor:
    """Every token through the experts of `module` that it has chosen.

        x        [T, H]
        indices  [T, K]   of all experts of the group; -1, or their number, for a choice that goes nowhere
        weights  [T, K]   of the choices; see `ExpertRule.weigh` for where they come in
        add      [T, H]   added to the sum over the choices
        out      [T, H]   in the dtype of x

    Collectives: those of `moe_mlp`; with same_tokens an all-gather in forward, and one each for dx and dweights; with
    etp tokens, indices and weights are gathered before, and results reduced to each rank's tokens after.
    """
    comm, (group, _, etp, grad_scale) = Communicator.of(spread.same_tokens), spread
    if comm.size > 1:
        sizes = shard_sizes(len(x), comm.size)
        begin, end = shard_range(len(x), comm.size, comm.rank)
        x, weights = (scatter_to(tensor, comm, dim=0, sizes=sizes) for tensor in (x, weights))
        add = None if add is None else scatter_to(add, comm, dim=0, sizes=sizes)
        parts = x, indices[begin:end], weights
        out = run_experts(module, *parts, spread._replace(same_tokens=None), weigh=weigh, add=add)
        return gather_from(out, comm, dim=0, sizes=sizes)
    parameters = _parameters(module)
    rule, sharing = rule_of(module), Communicator.of(etp)
    if rule is not None:
        first, first_bias, second, second_bias = parameters
        experts = ExpertWeights(first, second, first_bias, second_bias)
        run = functools.partial(
            moe_mlp, rule=dataclasses.replace(rule, weigh=weigh), group=group, grad_scale=grad_scale
        )
        if sharing.size == 1:
            return run(x, indices, weights, experts, add=add).to(x.dtype)
        sizes = sharing.all_gather(torch.tensor([len(x)])).tolist()
        rows, row_weights = (gather_sequence(each, sharing, dim=0, sizes=sizes) for each in (x, weights))
        out = run(rows, sharing.all_gather(indices, sizes=sizes), row_weights, experts.second_bias_once(sharing))
        out = reduce_scatter_sequence(out, sharing, dim=0, sizes=sizes)
        return (out if add is None else out + add).to(x.dtype)
    assert sharing.size == 1, "check_experts has let a function of whole rows through"
    if weigh != "after":
        raise TypeError(f"{type(module).__name__}: weigh={weigh!r} is for experts with a known activation")
    scaled: list[Any] = [None if p is None else scale_grad(p, grad_scale) for p in parameters]
    first, first_bias, second, second_bias = scaled
    transposed, num_experts = is_transposed(module), len(first) * Communicator.of(group).size
    rows, row_weights, handle = moe_dispatch(x, indices, weights, num_experts=num_experts, group=group)
    hidden = _between(module)(grouped_linear(rows, first, handle.splits, first_bias, transposed=transposed))
    results = grouped_linear(hidden, second, handle.splits, second_bias, transposed=transposed)
    if getattr(module, "has_post_expert_norm", False):
        results = cast(Any, module).post_expert_norm(results)
    return moe_combine(results, handle, row_weights, add=add).to(x.dtype)


def _parameters(module: nn.Module) -> list[Any]:
    """First weight and bias, second weight and bias; None where a bias is missing."""
    return [getattr(module, name + suffix, None) for name in (_first_name(module), _SECOND) for suffix in ("", "_bias")]
