"""What the ranks of tests/dist.py import sooner or later: imported once, by the process that they are forks of."""

import contextlib
import gc

with contextlib.suppress(ImportError):  # each rank says itself what is wrong
    import torch._dynamo
    import torch.distributed.tensor  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import fastpar

    for name in fastpar.__all__:  # most of which are imported when they are asked for
        getattr(fastpar, name)

gc.collect()
gc.freeze()  # a collection in a rank would write to all of it, and so have a copy
