"""Methods of a parallelised model that need whole tensors: its loss, `generate`, resizing.

The head of a parallelised model returns logits as a DTensor, `Shard(-1)` over the tensor-parallel ranks: what reads
them gets the right numbers (`fastpar.tensor.split_logits`), and never a part for the whole. A loss that is
known takes them as they are; one that is not, and `generate`, get them gathered.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastpar.comm import Communicator
from fastpar.parallel.guards.agreement import generator_state
from fastpar.tensor import SequenceRegion, VocabParallelHead, causal_lm_loss, gather_vocab, masked_lm_loss
from fastpar.tensor.sequence import whole_stream

Loss = Callable[..., Tensor]
_KNOWN = {"ForCausalLMLoss": causal_lm_loss, "ForMaskedLMLoss": masked_lm_loss}
_OPTIONS = ("num_items_in_batch", "ignore_index", "shift_labels")


def calls_loss_function(model: nn.Module) -> bool:
    """True if the model's forward computes its loss by `self.loss_function`, and not by code of its own."""
    for cls in type(model).__mro__:
        forward = vars(cls).get("forward")
        if forward is None:
            continue
        code = inspect.unwrap(forward).__code__
        if "loss_function" in code.co_names:
            return True
        if "__class__" not in code.co_freevars:  # no super().forward(): whatever comes behind is not called
            return False
    return False


def takes_labels(model: nn.Module) -> bool:
    """True if the model computes a loss by itself, as Hugging Face's do."""
    return "labels" in inspect.signature(type(model).forward).parameters


def loss_on_split_logits(model: Any, head: VocabParallelHead) -> tuple[Loss, str]:
    """A loss for the place of `model.loss_function`, and a word about it.

    transformers' next-token and masked-token losses, known by identity, are computed from this rank's logits. Any other
    loss is the model's own, on gathered logits.
    """
    own: Loss = model.loss_function
    theirs = sys.modules.get("transformers.loss.loss_utils")
    for name, split in _KNOWN.items():
        if theirs is not None and getattr(theirs, name, None) is own:
            return _SplitLoss(split, head), "vocab_parallel_cross_entropy on split logits"
    return _GatheredLoss(own, head), f"{getattr(own, '__name__', type(own).__name__)} of the model, on gathered logits"


class _SplitLoss:
    """A known loss with the signature of transformers' losses."""

    def __init__(self, split: Loss, head: VocabParallelHead):
        self.split, self.head = split, head

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
        known = {k: kwargs[k] for k in _OPTIONS if kwargs.get(k) is not None}
        return _outside_of_graphs(self.split)(logits, labels, head=self.head, **known)


class _GatheredLoss:
    """A loss of the model's own, which gets all logits."""

    def __init__(self, own: Loss, head: VocabParallelHead):
        self.own, self.head = own, head

    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.head.gather_output:
            gather = _outside_of_graphs(gather_vocab)
            logits = gather(logits, self.head.out_features, self.head.comm)
        return self.own(logits, *args, **kwargs)


def _outside_of_graphs(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`fn` of split logits; in training a break of torch.compile's graph.

    The model returns the logits as well. As an output of one graph with the loss they have no gradient where nobody
    reads them, for which torch puts plain zeros, and the graph's backward wants a DTensor (RuntimeError). Before the
    break their gradient is that of the loss.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return torch.compiler.disable(fn)
    return fn


def label_shift(model: Any) -> int | None:
    """How far the labels of a model's own loss lie behind its outputs: 1 of transformers' next-token loss, 0 of its
    masked-token loss; None where the loss is another, or not known. Of a model that is not parallelised yet."""
    if not hasattr(type(model), "loss_function") or not takes_labels(model) or not calls_loss_function(model):
        return None
    theirs = sys.modules.get("transformers.loss.loss_utils")
    shifts = {"ForCausalLMLoss": 1, "ForMaskedLMLoss": 0}
    own = model.loss_function
    return next((shift for name, shift in shifts.items() if own is getattr(theirs, name, None)), None)


def labels_problem(model: Any) -> str:
    """Why labels shifted by one are not what the model's loss takes; "" where they are, or it takes none."""
    if not hasattr(type(model), "loss_function") or not takes_labels(model):
        return ""  # no model of Hugging Face, or none with a loss
    theirs = sys.modules.get("transformers.loss.loss_utils")
    known = getattr(theirs, "ForCausalLMLoss", None)
    if calls_loss_function(model) and known is not None and model.loss_function is known:
        return ""
    return (
        f"the loss of {type(model).__name__} is not transformers' next-token loss, for which labels are shifted by one "
        "and which divides by the count of all ranks' tokens: leave labels out, and compute the loss from the logits"
    )


class PartLoss:
    """The loss of a part of the tokens, which has to get what `fastpar.context.shard` says of all of them."""

    def __init__(self, own: Loss):
        self.own = own
        self.last: Tensor | None = None  # until the model's forward is over

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
        missing = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
        if missing:
            raise ValueError(
                f"the loss of a split sequence got labels without {' and '.join(missing)}, and would shift them where "
                "the sequence is cut, or divide by this rank's tokens: call model(**batch) with all that "
                "fastpar.context.shard gives, of a model that hands them on to its loss_function"
            )
        self.last = self.own(logits, labels, vocab_size, **kwargs)
        return self.last

    @staticmethod
    def check(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook: ValueError for a loss that is not what the loss function gave, as the ranks' sum of another
        is not known to be the loss."""
        own = getattr(module, "loss_function", None)
        if not isinstance(own, PartLoss):
            return
        made, own.last = own.last, None
        loss = getattr(output, "loss", None)
        if isinstance(output, tuple) and output:  # (loss, ...) where there are labels, and no name says so
            has_labels = made is not None or inputs_by_name(module, args, kwargs).get("labels") is not None
            loss = output[0] if has_labels else None
        numbers = [x for x in (loss, *_numbers_in(output)) if isinstance(x, Tensor) and x is not made]
        if numbers:
            raise ValueError(
                f"{type(module).__name__} returns a loss that is not its loss_function's: of split sequences nobody "
                "knows how parts of another add up. Compute it outside of the model, and divide its sum over tokens by "
                "num_items_in_batch of fastpar.context.shard"
            )


def _numbers_in(output: Any) -> list[Tensor]:
    """The numbers that a model returns and that can be trained on, whatever they are called and were computed from,
    and what is one in the place of a loss without gradients."""
    values = list(output.values()) if isinstance(output, Mapping) else output
    first = values[0] if isinstance(values, list | tuple) and values else values
    leaves = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]
    return [x for x in leaves if x.numel() == 1 and x.dim() < 2 and (x is first or x.grad_fn is not None)]


def inputs_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a module was called with, by the names of its forward."""
    names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    return dict(zip(names, args, strict=False)) | kwargs


class NoGeneration:
    """`model.generate` where sequences are split: refused, as its prompts and its cache are not."""

    def __init__(self, function: Any):
        self.__doc__ = function.__doc__

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "generate needs whole sequences, and this model attends over split ones: fastpar.unparallelize(model) "
            "first, or generate with a model that is parallelised without context"
        )


class GatheringCall:
    """A method of the model, such as `generate`, that runs with logits gathered and the same draws on every rank; the
    stream of `regions` is whole meanwhile, on all ranks of a grid."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        heads: Sequence[VocabParallelHead],
        comm: Communicator,
        regions: Sequence[SequenceRegion] = (),
    ):
        self.model, self.name, self.heads, self.comm, self.regions = model, name, list(heads), comm, list(regions)
        self.__doc__ = getattr(type(model), name).__doc__

    def __deepcopy__(self, memo: Any) -> GatheringCall:
        model, *heads = (memo.get(id(m), m) for m in (self.model, *self.heads))
        return GatheringCall(model, self.name, heads, self.comm, self.regions)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.model.parameters()).device
        with gathered(self.heads), same_draws(self.comm, device), whole_stream(self.regions):
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class ResizeEmbeddings:
    """`model.resize_token_embeddings` of a parallelised model: refused, unless the size stays."""

    def __init__(self, model: Any):
        self.model = model
        self.__doc__ = type(model).resize_token_embeddings.__doc__

    def __deepcopy__(self, memo: Any) -> ResizeEmbeddings:
        return ResizeEmbeddings(memo.get(id(self.model), self.model))

    def __call__(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any
    ) -> Any:
        embedding = self.model.get_input_embeddings()
        now = embedding.num_embeddings
        wanted = now if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted != now:
            raise ValueError(
                f"resize_token_embeddings({wanted}) of a model that fastpar.parallelize has split: its ranks hold "
                f"rows of a vocabulary of {now}. Resize before parallelize, or fastpar.unparallelize(model), resize, "
                "and parallelize again"
            )
        return embedding


@contextlib.contextmanager
def gathered(heads: Sequence[VocabParallelHead]) -> Iterator[None]:
    """Let heads return all logits."""
    before = [head.gather_output for head in heads]
    for head in heads:
        head.gather_output = True
    try:
        yield
    finally:
        for head, was in zip(heads, before, strict=True):
            head.gather_output = was


@contextlib.contextmanager
def same_draws(comm: Communicator, device: torch.device) -> Iterator[None]:
    """Let all ranks draw the same numbers. Generators that agree are used as they are, so that samples are those of one
    process; else all are seeded by rank 0's next number, and go on from there afterwards, each its own."""
    if comm.size == 1:
        yield
        return
    state = generator_state(device)
    places = torch.arange(1, len(state) + 1, device="cpu")
    sums = comm.all_gather((state.view(torch.uint8).long() * places).sum().view(1))
    if (sums == sums[0]).all():
        yield
        return
    seed = comm.broadcast(torch.empty(1, dtype=torch.int64, device="cpu").random_(0, 1 << 62), src=0)
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield
