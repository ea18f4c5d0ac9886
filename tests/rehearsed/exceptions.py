"""Where CUDA tensors may make the host wait, or travel to it: each with its reason. Everything else is a failure."""

from __future__ import annotations

from collections.abc import Iterable

from tests.rehearsal.watch import Finding

# (kind, file:function of fastpar) -> reason
ALLOWED: dict[tuple[str, str], str] = {
    ("copy", "kernels/triton/kept_tables.py:upload"): "addresses of new tensors, once; from pinned memory",
    ("sync", "fastpar/reference/moe_route.py:route_by_experts"): "the width of the result; give width= for none",
    ("copy", "fastpar/reference/moe_rows.py:row_sources"): "a number a table to the device; waits for nothing",
    ("copy", "fastpar/ops/moe/dispatcher.py:LocalDispatcher.dispatch"): "counts say how large the result is, once",
    ("copy", "fastpar/ops/moe/plan.py:SortedPairs.slots"): "E numbers to the device; waits for nothing",
    ("copy", "fastpar/ops/moe/dispatcher.py:rows_of_pairs"): "E numbers to the device; waits for nothing",
    ("copy", "fastpar/ops/moe/gemms.py:_ends"): "E numbers to the device; waits for nothing",
    ("copy", "fastpar/ops/moe/gemms.py:_triton_rows"): "2 E numbers to the device; waits for nothing",
}
# The same with several ranks.
ALLOWED_ON_RANKS: dict[tuple[str, str], str] = {
    (
        "copy",
        "fastpar/comm/torch/wrappers.py:StagedTransport._there",
    ): "a control message, and no CPU backend for it",
    ("copy", "fastpar/comm/torch/wrappers.py:StagedTransport.all_reduce.<locals>.<lambda>"): "the same",
    ("copy", "fastpar/comm/torch/wrappers.py:StagedTransport._back.<locals>.finish"): "the same",
    (
        "copy",
        "fastpar/parallel/guards/agreement.py:_crc",
    ): "a guard reads what ranks must have alike; not in every step",
    ("on_cpu", "fastpar/parallel/guards/agreement.py:_crc"): "the same",
    ("on_cpu", "fastpar/parallel/guards/agreement.py:generator_state"): "torch keeps it in host memory",
    ("on_cpu", "fastpar/parallel/guards/agreement.py:state_of"): "the same",
    (
        "copy",
        "fastpar/parallel/guards/gradients.py:GradientGuard._compare.<locals>.<listcomp>",
    ): "the same, three numbers each",
    (
        "sync",
        "fastpar/zero/grad_clipping.py:GradClipping.prepare",
    ): "whether a step is finite; skip_nonfinite=False: none",
    ("copy", "fastpar/zero/grad_clipping.py:GradClipping.prepare"): "the same: all counts in one copy",
    ("copy", "fastpar/expert/router.py:Router.load"): "its counters follow the layer to the device, once",
    ("copy", "fastpar/comm/agree.py:Agreement.gather"): "rows of every rank say how large messages are, once",
}
# The same where states, and perhaps parameters, are offloaded: the host has the update, so work there is no finding.
ALLOWED_OFFLOADED: dict[tuple[str, str], str] = {
    ("copy", "fastpar/zero/sharded_param.py:ShardedParam.add_gradient"): "gradients come to where masters are",
    ("copy", "fastpar/zero/masters.py:Masters.write_back"): "rounded masters go to where parameters are",
    ("copy", "fastpar/zero/flat.py:Upload.copy"): "shards go to where they are gathered, on a stream of their own",
    ("sync", "fastpar/zero/flat.py:Upload.settle"): "the step writes to shards that a prefetch may be copying",
    (
        "sync",
        "fastpar/zero/offload/shard_store.py:_ShardReader.begin",
    ): "a read goes to a buffer that was copied two gathers ago",
    (
        "copy",
        "fastpar/zero/optimizer_step.py:Stepper._bring_scalars",
    ): "a loss scale: the host has waited for gradients",
}


def unlisted(found: Iterable[Finding], *, is_offloaded: bool = False) -> list[str]:
    """Findings that nobody has allowed, one line each."""
    allowed = ALLOWED | ALLOWED_ON_RANKS | (ALLOWED_OFFLOADED if is_offloaded else {})
    return sorted(
        {
            str(finding)
            for finding in found
            if (finding.kind, finding.place) not in allowed and not (is_offloaded and finding.kind == "on_cpu")
        }
    )
