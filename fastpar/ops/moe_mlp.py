"""Feed-forward experts: dispatch, two grouped products with an activation between them, combine."""

from __future__ import annotations

from torch import Tensor

from fastpar.comm import GroupLike
from fastpar.ops._moe_plan import Padding
from fastpar.ops.grouped_linear import grouped_linear
from fastpar.ops.moe import moe_combine, moe_dispatch
from fastpar.reference.moe_mlp import ExpertRule, activate


def moe_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
    rule: ExpertRule | None = None,
    add: Tensor | None = None,
    group: GroupLike = None,
    padding: Padding | None = None,
    transport: str = "auto",
    exact: bool = False,
) -> Tensor:
    """Every token through the experts that it has chosen, which lie on the ranks of `group`.

        x        [T, H]      this rank's tokens
        indices  [T, K]      see `moe_dispatch`
        weights  [T, K]
        first    [E_r, 2I, H]  this rank's experts: gate and up in one ([E_r, I, H] without gate; transposed:
                               [E_r, H, 2I])
        second   [E_r, H, I]   (transposed: [E_r, I, H])
        first_bias [E_r, 2I], second_bias [E_r, H]
        add      [T, H]      added in the combine's sum: a shared expert's output, a residual
        out      [T, H]

    The number of experts is E_r times the ranks of the group.
    """
    rule = rule or ExpertRule()
    num_experts = len(first) * (1 if group is None else _size(group))
    rows, row_weights, plan = moe_dispatch(
        x, indices, weights, num_experts=num_experts, group=group, padding=padding, transport=transport, exact=exact
    )
    scale = row_weights[:, None].to(x.dtype)
    if rule.weigh == "input":
        rows = rows * scale
    hidden = activate(grouped_linear(rows, first, plan.splits, first_bias, transposed=rule.transposed), rule)
    if rule.weigh == "before":
        hidden = hidden * scale
    results = grouped_linear(hidden, second, plan.splits, second_bias, transposed=rule.transposed)
    return moe_combine(results, plan, row_weights if rule.weigh == "after" else None, add=add)


def _size(group: GroupLike) -> int:
    from fastpar.comm import Communicator

    return Communicator.of(group).size
