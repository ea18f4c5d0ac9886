"""`Workload`: a model, the batch that a step trains on, and what training keeps and computes in."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastpar.arguments import checked_fields
from fastpar.layouts import ModelShape

PRECISIONS = ("bf16", "fp16", "fp8", "fp32")


_MOST = 2**31 - 1


@checked_fields
@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes that training keeps for each parameter; the defaults are those of bf16 with float32 masters and AdamW.

    param   the parameter that layers compute with
    grad    the gradient that is summed over microbatches
    state   what the optimizer keeps: masters and moments
    wire    a gradient, or a parameter, that travels
    """

    param: float = 2.0
    grad: float = 4.0
    state: float = 12.0
    wire: float = 2.0

    @staticmethod
    def of(precision: str) -> BytesPerParameter:
        """The bytes of AdamW in this precision."""
        return BytesPerParameter(4.0, 4.0, 8.0, 4.0) if precision == "fp32" else BytesPerParameter()


@checked_fields
@dataclass(frozen=True)
class Workload:
    """One training step.

    batch, seq        sequences of a step over all ranks, and their length
    precision         "bf16", "fp16", "fp8" (GEMMs only) or "fp32"
    bytes             kept per parameter
    fused_attention   no scores are kept, and those above the diagonal are not computed
    fused_loss        the head's logits are made in chunks, and not kept
    fused_kernels     RMSNorm and SwiGLU are one op each, as `fp.apply_kernels` makes them; False: several, as in
                      transformers, each of which keeps what it reads
    overlaps_pipeline gradients of pipelines travel during backward; fastpar reduces them after the last microbatch
    copies_gradients  gradients are summed outside of the buckets that they travel in, and gone between steps, as with
                      `fp.zero` and `zero_grad`; False: they are kept, and summed where they travel
    balanced          layers are cut by cost; False: every pipeline rank has equally many
    expert_load       the busiest rank's share of expert rows over the mean
    """

    model: ModelShape
    batch: int
    seq: int
    precision: str = "bf16"
    bytes: BytesPerParameter = field(default_factory=BytesPerParameter)
    fused_attention: bool = True
    fused_loss: bool = False
    fused_kernels: bool = True
    overlaps_pipeline: bool = False
    copies_gradients: bool = False
    balanced: bool = True
    expert_load: float = 1.1

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
            if getattr(self, name) > _MOST:  # whose divisors are not found by trying
                raise ValueError(f"{name} must be at most 2**31 - 1, got {getattr(self, name)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2
