"""Attention layers over a split sequence, for models that are not Hugging Face's."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.context.region import REGION, ContextRegion
from fastpar.contracts.attention import AttentionMask


class ContextAttention(nn.Module):
    """Softmax attention of this rank's tokens over the tokens of all ranks of a region.

        q    [b, h_q, s, D]     this rank's tokens, as `fastpar.context.shard` has placed them
        k    [b, h_k, s, D]     query head h reads head h // (h_q / h_k)
        v    [b, h_k, s, D_v]
        out  [b, h_q, s, D_v]

        region = fp.context.ContextRegion(mesh["cp"], fp.Context())
        layer.attention = fp.context.ContextAttention(region, causal=True)

    In the place of `F.scaled_dot_product_attention`; collectives, errors and gradients: `fp.ops.context_attention`. All
    layers of a model share one region.

    Args:
        causal, window, chunk: see `AttentionMask`; documents come with the batch.
        scale: 1 / sqrt(D) by default.
        softcap: see `fp.ops.attention`.
        dropout: of probabilities while training; its seed is drawn from torch's CPU generator, which has to stand alike
            on the ranks of the region.
        first_head: the global index of this rank's first query head, where heads are split by tensor parallelism.
    """

    @checked(computed=False)
    def __init__(
        self,
        region: ContextRegion,
        *,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        chunk: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        first_head: int = 0,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        setattr(self, REGION, region)
        self.mask = AttentionMask(causal, window, chunk)
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        self.first_head = first_head

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, sink: Tensor | None = None) -> Tensor:
        region = cast(ContextRegion, getattr(self, REGION))
        return region.attend(
            q,
            k,
            v,
            mask=self.mask,
            scale=self.scale,
            softcap=self.softcap,
            sink=sink,
            dropout=self.dropout if self.training else 0.0,
            first_head=self.first_head,
        )
