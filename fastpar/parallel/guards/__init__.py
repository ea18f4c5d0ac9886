"""What a parallelised model is watched for while it runs: what no plan can show before.

    agreement   that the ranks of a tensor-parallel group get the same batch, and draw the same random numbers
    draws       that dropout is not drawn where a rank sees a part of a tensor only
    gradients   that parameters which are whole on every rank have the same gradient there
    positions   that nothing beside the blocks mixes positions while the sequence is split
    parts       that no part of a tensor leaves the model as if it were the whole

All but the last look at the first forwards and at one in 256 from then on: a fault of this kind is there from the first
step, or comes with a change that lasts. What they find is an error on every rank of the group.
"""

from fastpar.parallel.guards.agreement import checksum, sync_weights
from fastpar.parallel.guards.parts import PartGuard
from fastpar.parallel.guards.watch import Watch, WatchedPlan

__all__ = ["PartGuard", "Watch", "WatchedPlan", "checksum", "sync_weights"]
