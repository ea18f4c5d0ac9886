"""Output projection and cross-entropy over a sharded vocabulary as one op; algebra and costs are in `api`."""

from fastpar.ops.linear_cross_entropy.api import (
    linear_cross_entropy,
    linear_cross_entropy_dgrad,
    linear_cross_entropy_wgrad,
)

__all__ = ["linear_cross_entropy", "linear_cross_entropy_dgrad", "linear_cross_entropy_wgrad"]
