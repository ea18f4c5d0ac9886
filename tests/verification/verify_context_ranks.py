"""What ranks do in the tests of `fp.verify` over split sequences: layouts that are right, and planted mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fastpar as fp
from fastpar.context.region import ContextRegion
from fastpar.ops.context_attention import gather
from fastpar.verification import layout as verified
from fastpar.zero.groups import Groups
from tests.tensor.family_models import tiny_model

GATHER = {"context": fp.Context(method="gather")}


def build() -> nn.Module:
    return tiny_model("llama", "LlamaForCausalLM")


def whole(ignored: int = 0) -> dict[str, Tensor]:
    """ignored: further tokens of the first row whose labels do not count."""
    ids = torch.randint(1, 61, (4, 13), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:, 2:6] = -100  # of a rank's tokens in zigzag three count and of the other's five: no mean is that of all
    labels[0, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def keys_without_the_others() -> Any:
    """dK and dV are what this rank's queries give, and what those of others give is lost."""
    right = gather._scatter

    def wrong(call: Any, dk: Tensor, dv: Tensor) -> Any:
        kept = []
        for x in (dk, dv):
            own = x.new_empty(*x.shape[:2], call.plan.sizes[call.comm.rank], x.shape[3])
            call.plan.order.take(call.comm.rank, x, own)
            call.plan.order.put(call.comm.rank, own, lost := torch.zeros_like(x))
            kept.append(lost)
        return right(call, *kept)

    return mock.patch.object(gather, "_scatter", wrong)


def places_from_zero() -> Any:
    """Every rank counts its positions from 0."""
    right = verified.shard_batch

    def wrong(model: Any, batch: Any) -> Any:
        cut = right(model, batch)
        return {**cut, "position_ids": torch.arange(cut["input_ids"].shape[1]).expand_as(cut["input_ids"])}

    return mock.patch.object(verified, "shard_batch", wrong)


def mean_of_local_tokens() -> Any:
    """Every rank divides by its own labels, and the ranks' means are averaged."""
    right = verified.shard_batch

    def wrong(model: Any, batch: Any) -> Any:
        cut = right(model, batch)
        return {**cut, "num_items_in_batch": 2 * (cut["labels"] != -100).sum()}

    return mock.patch.object(verified, "shard_batch", wrong)


def labels_shifted_after_the_cut() -> Any:
    """The label behind each token that is the last of a rank's is another one's."""
    right = verified.shard_batch

    def wrong(model: Any, batch: Any) -> Any:
        cut = right(model, batch)
        labels = cut["labels"].clone()
        labels[:, -1] = labels[:, 0]
        return {**cut, "labels": labels, "shift_labels": labels}

    return mock.patch.object(verified, "shard_batch", wrong)


def averaged_over_cp() -> Any:
    """Gradients are averaged over the ranks of cp, as over those of data parallelism."""
    return mock.patch.object(Groups, "as_sum_of_parts", lambda self, mean: mean)


@contextmanager
def only_own_keys() -> Iterator[None]:
    """Attention over a rank's own tokens."""

    def wrong(self: ContextRegion, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with nullcontext() if self._trial else self.trial("whole"):  # not where the model is only tried
            return right(self, q, k, v, **options)

    right = ContextRegion.attend
    with mock.patch.object(ContextRegion, "attend", wrong):
        yield


PLANTED: dict[str, tuple[Callable[[], Any], str, str]] = {  # what is found first: its kind, and a part of its module
    "keys_without_the_others": (keys_without_the_others, "gradient", "layers.1.self_attn"),
    "places_from_zero": (places_from_zero, "", "rotary_emb"),
    "only_own_keys": (only_own_keys, "", "layers.0.self_attn"),
    "mean_of_local_tokens": (mean_of_local_tokens, "loss", ""),
    "labels_shifted_after_the_cut": (labels_shifted_after_the_cut, "loss", ""),
    "averaged_over_cp": (averaged_over_cp, "gradient", ""),
}


def found(
    sizes: dict[str, int], names: list[str], options: dict[str, Any], ignored: int = 0
) -> dict[str, list[tuple[str, str, str]]]:
    """By name of a mistake ("": none), (kind, module, text) of what verify finds first."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    results = {}
    for name in names:
        with PLANTED[name][0]() if name else nullcontext():
            report = fp.verify(build, fp.VerifyLayout(mesh, **options), whole(ignored), steps=1)
        results[name] = [(each.kind, each.module, str(each)) for each in report.findings[:1]]
    mesh.close()
    return results
