"""What the ranks of tests/dist.py import sooner or later: imported once, by the process that they are forks of."""

import contextlib
import gc

with contextlib.suppress(ImportError):  # each rank says itself what is wrong
    import torch._dynamo
    import torch.distributed.tensor  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import fastpar  # noqa: F401  (its modules in each rank: a rank died of SIGSEGV when they were here, once)

gc.collect()
gc.freeze()  # a collection in a rank would write to all of it, and so have a copy
