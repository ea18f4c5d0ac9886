"""How rows of tokens travel between ranks: a file for each transport of `fastpar.ops.moe_dispatch`."""
