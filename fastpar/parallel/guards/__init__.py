"""Guards of a parallelised model while it runs: for what no plan can show before.

    agreement   that the ranks of a tensor-parallel group get the same batch, and draw the same random numbers
    draws       that dropout is not drawn where a rank sees a part of a tensor only
    gradients   that parameters which are whole on every rank have the same gradient there
    positions   that nothing beside the blocks mixes positions while the sequence is split
    parts       that no part of a tensor leaves the model as if it were the whole

    token_draws that nothing but modules fastpar knows draws for the tokens of a rank of cp
    members     that no module has been put into the model since it was split, but such as work on each feature

All but the last two look at the first forwards and at one in 256 from then on: a fault of this kind is there from the
first step, or comes with a change that lasts. What they find is an error on every rank of the group.

Note: what stays on the forward path
    Between the looks a parallelised model has these hooks. On the model one before its forward: counting, and the
    identity of all children (2.5 us, and 3 for every hundred modules). On a block one before it, which prepares the
    shared input, and two behind it: what was not taken is forgotten, and what it returns beside its result is marked.
    On modules outside of blocks one that marks, with sequence parallelism only. On the modules that hold the layers one
    that gathers what is marked, which returns at once for a plain tensor.
"""

from fastpar.parallel.guards.agreement import checksum, sync_weights
from fastpar.parallel.guards.parts import PartGuard
from fastpar.parallel.guards.token_draws import TokenDrawGuard
from fastpar.parallel.guards.watch import Watch, WatchedPlan

__all__ = ["PartGuard", "TokenDrawGuard", "Watch", "WatchedPlan", "checksum", "sync_weights"]
