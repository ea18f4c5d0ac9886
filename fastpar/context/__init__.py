"""Context parallelism: sequences whose tokens are split over ranks, and attention over all of them.

    model = fp.parallelize(model, mesh, context=fp.Context())          # a mesh with cp, a model of Hugging Face
    batch = fp.context.shard(model, batch, documents=lengths)          # this rank's tokens of the whole batch
    loss = model(**batch).loss                                         # this rank's part
    fp.context.total(model, loss)                                      # the loss, for logs

Between attention layers a token needs nothing of another, so that the model runs on this rank's tokens as it is; only
attention exchanges keys and values (`fp.ops.context_attention`). Which tokens a rank holds is data (`layout`), and so
is which of them see each other (`fp.AttentionMask`).
"""

from fastpar.context.attention import ContextAttention
from fastpar.context.batch import shard, total
from fastpar.context.region import Context, ContextRegion, SequencePlacement

__all__ = ["Context", "ContextAttention", "ContextRegion", "SequencePlacement", "shard", "total"]
