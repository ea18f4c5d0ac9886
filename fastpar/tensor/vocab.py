"""Embedding and output head split over the vocabulary.

The head leaves the logits sharded: `fastpar.ops.vocab_parallel_cross_entropy` takes them as they are, with one
collective of a few floats per token, and nothing of vocabulary size ever crosses the group unless asked for. With
`VocabParallelHead.loss` the logits are not even made: the projection and the loss run a chunk of tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fastpar.arguments import check_counts, checked
from fastpar.comm import Communicator, gather_from, shard_range, shard_sizes
from fastpar.comm.shards import check_is_tensor
from fastpar.ops.embedding import agree_on_ids, vocab_parallel_embedding
from fastpar.ops.linear_cross_entropy import linear_cross_entropy
from fastpar.ops.parallel_linear.api import copy_to_linear
from fastpar.tensor.binding import BoundGroup, GroupLike, bind, blank
from fastpar.tensor.grid_blocks import DeferredSum, twin_of
from fastpar.tensor.linear import ColumnParallelLinear
from fastpar.tensor.own_forward import check_parameters, refuse_own_forward
from fastpar.tensor.parameter import MakeParameter, ParallelModule, ParameterLayout, RowMap, install_state_dict_hooks
from fastpar.tensor.sequence import SequenceRegion, splitting
from fastpar.tensor.split_logits import SplitLogits


class VocabParallelEmbedding(ParallelModule):
    """An embedding table whose rows are split over a group.

        ids     [...]         int, the same on every rank, each in [0, V)
        weight  [V_r, H]      stored as a DTensor of shape [V, H], Shard(0)
        out     [..., H]      or this rank's part of the sequence with `sequence`

        forward  out = all_reduce(rows of ids that this rank owns, else 0)     sequence: reduce_scatter instead
        wgrad    dweight_r[id] += dout   for the ids it owns; local

    One collective of the output's size in forward, none in backward. Since all but one rank contribute zeros, the sum
    is exact. An id outside [0, V) is an IndexError with its position on every rank (on CUDA, an asynchronous device
    assertion).
    """

    weight: nn.Parameter

    @checked(computed=False)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: GroupLike = None,
        sequence: SequenceRegion | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_counts(least=0, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be in {-num_embeddings}..{num_embeddings - 1}, got {padding_idx}")
        full = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._configure(full, group, sequence=sequence)

    @classmethod
    @checked(computed=False)
    def from_embedding(
        cls, embedding: nn.Embedding, *, group: GroupLike = None, sequence: SequenceRegion | None = None
    ) -> VocabParallelEmbedding:
        """A parallel embedding with the weights of `embedding`."""
        refuse_own_forward(embedding)
        layer: VocabParallelEmbedding = blank(cls)
        layer._configure(embedding, group, sequence=sequence)
        layer.train(embedding.training)
        return layer

    def _configure(
        self,
        source: nn.Module,
        group: GroupLike,
        *,
        sequence: SequenceRegion | None = None,
        parameters: MakeParameter | None = None,
    ) -> None:
        if not isinstance(source, nn.Embedding):
            raise TypeError(f"expected an nn.Embedding, got {type(source).__name__}")
        check_parameters(source)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(source, option):
                raise ValueError(
                    f"nn.Embedding({option}={getattr(source, option)}) cannot be split over the vocabulary"
                )
        weight = source._parameters["weight"]
        assert weight is not None
        if weight.device.type == "meta":
            raise ValueError("the embedding is on the meta device; materialise and initialise it before it is sharded")
        self.comm, mesh = bind(group, weight.device.type)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx, self.sequence = source.padding_idx, sequence
        rows = RowMap.chunk(self.num_embeddings, self.comm.size)
        self._add_parameter("weight", weight, ParameterLayout(self.comm, mesh, weight.shape, 0, rows), parameters)
        self._state_handles = install_state_dict_hooks(self)

    @property
    def vocab_range(self) -> tuple[int, int, int]:
        """(first row, one past the last row, vocabulary size) of this rank."""
        return (*shard_range(self.num_embeddings, self.comm.size, self.comm.rank), self.num_embeddings)

    sums_input_gradient = False
    is_deferred = False  # the sum over ranks is that of the grid's region which takes the output, or of who reads it

    def local_input(self, ids: Tensor) -> Tensor:
        """What forward takes of all ids: all of them."""
        return ids

    def local_output(self, out: Tensor) -> Tensor:
        """What forward returns of a whole output: all of it."""
        return out

    def forward(self, ids: Tensor) -> Tensor:
        check_is_tensor(ids, "ids")
        weight = self._local("weight")
        assert weight is not None
        sequence = splitting(self.sequence)
        if sequence is not None:
            sequence.check_whole(ids)
        is_deferred = self.is_deferred and sequence is None and not torch.compiler.is_compiling()
        if is_deferred:
            agree_on_ids(ids, weight, self.comm, self.num_embeddings)
        rows = vocab_parallel_embedding(
            ids,
            weight,
            group=self.comm,
            vocab_range=self.vocab_range,
            padding_idx=self.padding_idx,
            reduce="none" if is_deferred else "all" if sequence is None else "scatter",
            scatter_dim=0 if sequence is None else sequence.dim,
        )
        return DeferredSum.of(rows, self.comm) if is_deferred else rows

    def extra_repr(self) -> str:
        start, stop, total = self.vocab_range
        return f"{total} ({start} to {stop} on rank {self.comm.rank} of {self.comm.size}), {self.embedding_dim}"


class VocabParallelHead(ColumnParallelLinear):
    """The output projection onto a split vocabulary: a ColumnParallelLinear whose output features are token ids.

    out  [..., V_r]  this rank's logits (`gather_output=True`: all V, for sampling; `use_local_output=False`: a DTensor
                     of shape [..., V], `Shard(-1)`, as torch's ColwiseParallel has it)

    To tie it to an embedding, give both the same parameter: `head.weight = embedding.weight`.
    """

    use_local_output = True

    def _project(self, x: Tensor) -> Tensor:
        twin = None if self.input_prepared else twin_of(x)
        if twin is None:
            return super()._project(x.view_as(x) if isinstance(x, DeferredSum) else x)
        weight, bias = self._local("weight"), self._local("bias")  # whoever made the twin sums dx
        assert weight is not None
        return copy_to_linear(twin, weight, bias, group=None, transposed=self.transposed)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        mesh = self._layouts["weight"].mesh
        if self.use_local_output or self.gather_output or mesh is None:
            return out
        if not torch.compiler.is_compiling():
            return SplitLogits.of(out, mesh, self.out_features, self.comm)
        shape = torch.Size([*out.shape[:-1], self.out_features])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(out, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)

    @property
    def vocab_range(self) -> tuple[int, int, int]:
        """(first id, one past the last id, vocabulary size) of this rank, as the cross-entropy takes it."""
        return (*shard_range(self.out_features, self.comm.size, self.comm.rank), self.out_features)

    def loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Any:
        """Cross-entropy of this head's logits without making them: fastpar.ops.linear_cross_entropy.

            hidden  [..., K]  what forward takes; with `sequence` this rank's part
            labels  [...]     ids of all tokens
            out     the loss, or (loss, lse) with return_lse=True

        `options` are those of the op, but for bias, group, vocab_range and sequence_parallel, which the layer knows;
        `shift=1` scores next tokens. Wherever a model's forward ends in `head(hidden)` and a loss, this replaces both.
        Where the layer's module is wrapped by hooks (FSDP's gathers among them), those run for `forward` only.
        """
        if self.input_prepared:
            raise ValueError("the head's input is prepared by its caller, whose backward sums dhidden a second time")
        weight, bias = self._local("weight"), self._local("bias")
        assert weight is not None
        where: dict[str, Any] = {"group": self.comm, "vocab_range": self.vocab_range}
        if self.sequence is not None:
            dim = self.sequence.dim
            if labels.shape[dim] != self.sequence.total:
                raise ValueError(
                    f"labels have {labels.shape[dim]} tokens along dim {dim}, but {self.sequence.total} entered the "
                    "sequence-parallel region"
                )
            where |= {"sequence_parallel": True, "sequence_dim": dim}
        projection = weight.t() if self.transposed else weight
        return linear_cross_entropy(hidden, projection, labels, bias=bias, **where, **options)


@checked(computed=False)
def gather_vocab(logits: Tensor, vocab_size: int, group: GroupLike) -> Tensor:
    """Full logits [..., V] from each rank's [..., V_r], or from a DTensor of them; one all-gather. Backward keeps this
    rank's part."""
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    check_is_tensor(logits, "logits")
    check_counts(vocab_size=vocab_size)
    comm = group.comm if isinstance(group, BoundGroup) else Communicator.of(group)
    return gather_from(logits, comm, dim=-1, sizes=shard_sizes(vocab_size, comm.size))
