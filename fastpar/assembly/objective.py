"""What is minimised: the mean over the valid tokens of the global batch, in every layout.

    loss = sum over all ranks, passes and microbatches of loss(output, target) / N        N valid targets in all

Means of means are another number as soon as ranks or microbatches have unequal numbers of valid tokens (padding, labels
of -100). So every forward gives a sum, and N is known before the first backward. Data parallelism averages gradients
over dp ranks, and so each sum is divided by N / dp; gradients are summed over cp.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpar import ops
from fastpar.context.batch import check_batch, document_rows, shift_labels
from fastpar.parallel import label_shift

IGNORED = -100
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Objective:
    """The loss of an output and a target.

    loss   loss(output, target) -> its sum, or the loss of each token; None: cross-entropy of logits
    key    what a batch calls the target: "labels" where the model has a loss of its own that is known, else "target"
    shift  the output at t is for the label at t + shift
    first  the model's first input, by name
    vocab  of a model of Hugging Face: ids and labels are below
    """

    loss: Loss | None
    key: str
    shift: int
    first: str
    withheld: tuple[str, ...] = ()
    vocab: int | None = None

    @staticmethod
    def of(model: nn.Module, loss: Loss | None) -> Objective:
        """The objective of a model that is not changed yet. ValueError for a loss of its own that is not known."""
        parameters = inspect.signature(type(model).forward).parameters
        names = [name for name in parameters if name != "self"]
        withheld = ("use_cache",) if "use_cache" in names else ()  # a cache of keys that nobody reads
        first = names[0] if names else ""
        if loss is not None or "labels" not in names:
            return Objective(loss, "target", 0, first, withheld)
        shift = label_shift(model)
        if shift is None:
            raise ValueError(
                f"the own loss of {type(model).__name__} is neither transformers' next-token nor its masked-token "
                "loss, and it is not known what it is the mean of: pass loss=, a function of output and target that "
                "returns the sum over tokens"
            )
        if getattr(getattr(model, "config", None), "output_router_logits", False):
            raise ValueError(
                "config.output_router_logits adds balance losses of each forward to the model's loss, which are not "
                "those of the global batch: switch it off, and use fastpar.expert.Router for balance losses"
            )
        return Objective(None, "labels", shift, first, withheld, _vocab_of(model))

    def read(self, batch: Any) -> FedBatch:
        """The inputs and the target of a batch: (inputs, target), or a mapping of keyword inputs with the target."""
        if isinstance(batch, Mapping):
            inputs = dict(batch)
            if self.key not in inputs:
                raise ValueError(f"batch has no {self.key!r}, which the loss compares with; it has {sorted(inputs)}")
            target = inputs.pop(self.key)
        elif isinstance(batch, Sequence) and len(batch) == 2 and self.key == "target":
            inputs, target = {self.first: batch[0]}, batch[1]
        else:
            wanted = "a pair (inputs, target) or a mapping" if self.key == "target" else "a mapping"
            raise ValueError(f"batch must be {wanted} with {self.key!r}, got {type(batch).__name__}")
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.dim()}
        if not isinstance(target, Tensor) or not target.dim() or not tensors:
            raise ValueError(f"batch must have tensors, and {self.key!r} be one, got {type(target).__name__}")
        rows = {name: len(x) for name, x in {**tensors, self.key: target}.items()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"the tensors of a batch must have as many rows as each other, got {rows}")
        if self.shift and inputs.get("documents") is not None:
            target = shift_labels(target, document_rows(inputs["documents"], *target.shape))
        elif self.shift:
            shifted = torch.full_like(target, IGNORED)
            shifted[..., : -self.shift] = target[..., self.shift :]
            target = shifted
        return FedBatch(inputs, target)

    def check_ids(self, fed: FedBatch) -> None:
        """ValueError for ids and labels outside of the vocabulary, while other ranks can be told: an error in forward
        would leave them waiting."""
        for name, x in ((self.first, fed.inputs.get(self.first)), (self.key, fed.target)):
            if self.vocab is None or not isinstance(x, Tensor) or x.is_floating_point() or x.numel() == 0:
                continue
            ids = x if name == self.first else torch.where(x == IGNORED, 0, x)
            low, high = (int(limit) for limit in ids.aminmax())
            if low < 0 or high >= self.vocab:
                raise ValueError(
                    f"{name} must be ids from 0 to {self.vocab - 1}, got {low if low < 0 else high}"
                    + ("" if name == self.first else " (-100: does not count)")
                )

    def check_sequences(self, fed: FedBatch, cp: int) -> None:
        """ValueError for a batch whose sequences cannot be split over cp ranks, or that has documents without cp."""
        given = dict(fed.inputs)
        documents = given.pop("documents", None)
        if cp == 1:
            if documents is not None and self.key == "labels":
                raise ValueError("documents are for layouts with cp above 1, whose attention knows them")
            return
        check_batch({"input_ids": given.pop(self.first, None), **given}, documents)
        shape = fed.inputs[self.first].shape
        if shape[1] < cp:
            raise ValueError(f"{self.first} has {shape[1]} tokens, fewer than the {cp} ranks of cp")
        if fed.target.shape[:2] != shape:
            raise ValueError(
                f"cp is {cp}, and targets are cut with their tokens: {self.key!r} must have one for each of "
                f"{list(shape)}, got {list(fed.target.shape)}"
            )

    def sum_of(self, output: Any, target: Tensor) -> Tensor:
        """The loss of all tokens together."""
        if self.loss is None:
            if not isinstance(output, Tensor):
                raise TypeError(f"the model must return logits, or have loss=, got {type(output).__name__}")
            summed: Tensor = ops.vocab_parallel_cross_entropy(output, target, reduction="sum")
            return summed
        loss = self.loss(output, target)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss must return a tensor, got {type(loss).__name__}")
        return loss.sum() if loss.dim() else loss

    def check_sum(self, output: Any, target: Tensor) -> bool:
        """ValueError for a loss of the user's own that is a mean: of a row twice it would be what it is of that row.

        Returns whether that is settled: not before there is a row that counts.
        """
        if self.loss is None or not isinstance(output, Tensor) or not output.dim():
            return True
        row = next((i for i in range(len(target)) if count(target[i : i + 1])), None)
        if row is None:
            return False
        outputs, targets = output[row : row + 1].detach(), target[row : row + 1]
        with torch.no_grad():
            one = self.loss(outputs, targets)
            if not isinstance(one, Tensor) or one.dim():
                return True
            twice = self.loss(torch.cat([outputs] * 2), torch.cat([targets] * 2))
        if abs(float(twice) - 2 * float(one)) > 0.05 * abs(float(one)):
            raise ValueError(
                f"loss must return the sum over tokens, or the loss of each: of one row it is {float(one):.6g}, and of "
                f'the same row twice {float(twice):.6g}; take reduction="sum" (fastpar divides by the valid tokens of '
                "the global batch)"
            )
        return float(one) != 0.0


def _vocab_of(model: Any) -> int | None:
    """How many tokens a model of Hugging Face has embeddings of, where it says so."""
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (AttributeError, NotImplementedError):
        return None


@dataclass(frozen=True)
class FedBatch:
    """A rank's batch: keyword inputs of the model by name, and the target of each output."""

    inputs: dict[str, Any]
    target: Tensor

    @property
    def rows(self) -> int:
        return len(self.target)

    def split(self, parts: int) -> list[FedBatch]:
        """The batch cut into as many of equal numbers of rows; what is no tensor with rows goes to each."""
        targets = self.target.tensor_split(parts)
        pieces = {name: self._pieces(x, parts) for name, x in self.inputs.items()}
        return [FedBatch({name: each[i] for name, each in pieces.items()}, targets[i]) for i in range(parts)]

    def _pieces(self, x: Any, parts: int) -> Sequence[Any]:
        if isinstance(x, Tensor) and x.dim() and len(x) == self.rows:
            return x.tensor_split(parts)
        if isinstance(x, Sequence) and len(x) == self.rows and all(isinstance(each, Sequence) for each in x):
            return [[x[i] for i in rows] for rows in torch.arange(self.rows).tensor_split(parts)]  # documents
        return [x] * parts


def count(target: Tensor) -> int:
    """Valid targets: class ids other than -100; of numbers that are no class ids the rows."""
    if target.is_floating_point() or target.is_complex():
        return len(target)
    return int((target != IGNORED).sum())
