"""Where CUDA tensors may make the host wait, or travel to it: each with its reason. Everything else is a failure."""

from __future__ import annotations

from collections.abc import Iterable

from tests.rehearsal.watch import Finding

# (kind, file:function of fastpar) -> reason
ALLOWED: dict[tuple[str, str], str] = {
    ("copy", "kernels/triton/optimizer.py:make_table"): "addresses of new tensors, once; from pinned memory",
    ("copy", "fastpar/reference/square_sum.py:square_sum_norm"): "a sum of 21 numbers is divided on the host",
    ("sync", "fastpar/reference/square_sum.py:square_sum_norm"): "a sum of 21 numbers is divided on the host",
    ("sync", "fastpar/reference/moe_route.py:route_by_experts"): "the width of the result; give width= for none",
    ("sync", "fastpar/ops/_moe_plan.py:check_arguments"): "a wrong expert raises on every rank",
    ("copy", "fastpar/ops/_moe_plan.py:check_arguments"): "a wrong expert raises on every rank",
    ("sync", "kernels/triton/moe_sort.py:sort_pairs"): "how many choices go somewhere: the size of a result",
    ("copy", "fastpar/reference/moe_rows.py:row_sources"): "a number a table to the device; waits for nothing",
    ("copy", "fastpar/ops/_moe_exchange.py:LocalExchange.dispatch"): "counts of experts say how large the result is",
    ("copy", "fastpar/ops/_moe_plan.py:Pairs.slots"): "E numbers to the device; waits for nothing",
    ("copy", "fastpar/ops/_moe_exchange.py:rows_of_pairs"): "E numbers to the device; waits for nothing",
    ("copy", "fastpar/comm/staged.py:StagedTransport._there"): "a control message, and no CPU backend to carry it",
    ("copy", "fastpar/comm/staged.py:StagedTransport.all_reduce.<locals>.<lambda>"): "the same",
    ("copy", "fastpar/comm/staged.py:StagedTransport._back.<locals>.finish"): "the same",
    (
        "sync",
        "fastpar/zero/sharding.py:Zero._prepare",
    ): "whether a step is finite, once a step; skip_nonfinite=False: none",
    ("copy", "fastpar/ops/_expert_products.py:_ends"): "E numbers to the device; waits for nothing",
}


def unlisted(found: Iterable[Finding]) -> list[str]:
    """Findings that nobody has allowed, one line each."""
    return sorted({str(finding) for finding in found if (finding.kind, finding.place) not in ALLOWED})
