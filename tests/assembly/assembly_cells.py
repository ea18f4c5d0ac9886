"""Cells of the matrix that `fp.assemble` is tested on, and the one process that each is compared with.

A cell is a layout, in words, and what decides the losses: the model, what of it is frozen, the optimizer. The reference
is plain PyTorch in float64 on the same global batches; it knows of the layout only which rows are in a microbatch
together, as balance losses are means of those.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from examples.model import Llama, LlamaConfig
from tests.models import norms_in_their_own_dtype

STEPS, ROWS, LENGTH, VOCAB = 3, 16, 6, 51
MAX_NORM = 0.5


@dataclass(frozen=True)
class Cell:
    """model: "dense", "experts", or "huggingface" (whose loss is its own, of labels)."""

    words: str
    model: str = "dense"
    tied: bool = False
    frozen: bool = False
    optimizer: str = "adamw"
    precision: str = "fp64"
    layers: int = 4

    @property
    def layout(self) -> fp.Layout:
        return fp.Layout.parse(self.words)

    def __str__(self) -> str:
        extra = [word for word, is_so in (("tied", self.tied), ("frozen", self.frozen)) if is_so]
        return " ".join([self.words, self.model, *extra, self.optimizer, self.precision])


def build(cell: Cell) -> nn.Module:
    """The same on every rank. Norms are random too, so that errors show."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": cell.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": cell.tied,
    }
    model: nn.Module
    if cell.model == "huggingface":
        import transformers

        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="sdpa"))
    else:
        experts = {"num_experts": 4, "router_aux_loss_coef": 0.1} if cell.model == "experts" else {}
        model = Llama(LlamaConfig(**sizes, **experts))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    if cell.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" not in name and "norm" not in name and "gate.weight" not in name)
    return model.double() if cell.precision == "fp64" else model.float()


def batch(step: int, huggingface: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all rows; valid targets are few in some rows and none in one."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    keep = torch.rand(ROWS, LENGTH + 1, generator=generator) < torch.linspace(0.2, 1.0, ROWS)[:, None]
    keep[step] = False
    targets = torch.where(keep, ids, -100)
    return (ids[:, :-1], targets[:, :-1]) if huggingface else (ids[:, :-1], targets[:, 1:])


def make_optimizer(cell: Cell, params: list[nn.Parameter]) -> Any:
    # With eps 1e-8, rounding noise of gradients near zero would become full-size steps.
    adam: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
    is_double = any(p.dtype == torch.float64 for p in params)  # which fused ones do not take: torch's is the same
    if cell.optimizer == "adamw" or (cell.optimizer == "fused" and is_double):
        return torch.optim.AdamW(params, **adam)
    if cell.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if cell.optimizer == "fused":
        return fp.optim.AdamW(params, **adam)
    if cell.optimizer == "two":
        halves = [[p for p in params if p.dim() < 2], [p for p in params if p.dim() >= 2]]
        made: list[Any] = [torch.optim.SGD(halves[0], lr=0.1)] if halves[0] else []
        return [*made, torch.optim.AdamW(halves[1], lr=1e-2, eps=1e-4)]
    raise ValueError(cell.optimizer)


@dataclass(frozen=True)
class Reference:
    """Of some steps in one process: losses and norms, the first gradients, the last parameters."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    values: dict[str, Tensor]


def microbatches(layout: fp.Layout) -> list[Tensor]:
    """Rows that are in a microbatch together, on all data-parallel ranks."""
    parts = layout.accumulate * (layout.pipeline.microbatches if layout.pp > 1 else 1)
    mine = [rows.tensor_split(parts) for rows in torch.arange(ROWS).tensor_split(layout.dp)]
    return [torch.cat(rows) for rows in zip(*mine, strict=True)]


def reference(cell: Cell, steps: int = STEPS) -> Reference:
    parts = microbatches(cell.layout) if cell.model == "experts" else [torch.arange(ROWS)]
    alike = Cell("one rank", cell.model, cell.tied, cell.frozen, cell.optimizer, layers=cell.layers)
    return _reference(alike, tuple(tuple(rows.tolist()) for rows in parts), steps)


@functools.cache
def _reference(cell: Cell, parts: tuple[tuple[int, ...], ...], steps: int) -> Reference:
    model = build(cell)
    with norms_in_their_own_dtype(model):
        return _trained(cell, model, parts, steps)


def _trained(cell: Cell, model: nn.Module, parts: tuple[tuple[int, ...], ...], steps: int) -> Reference:
    losses: list[float] = []
    norms: list[float] = []
    optimizers = make_optimizer(cell, [p for p in model.parameters() if p.requires_grad])
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    is_hf = cell.model == "huggingface"
    grads: dict[str, Tensor] = {}
    for step in range(steps):
        ids, targets = batch(step, is_hf)
        fp.expert.set_loss_scale(model, 1 / len(parts))
        tokens = (targets[:, 1:] if is_hf else targets).ne(-100).sum()
        total = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            own = torch.tensor(rows)
            output = model(ids[own])
            logits, wanted = (output.logits[:, :-1], targets[own, 1:]) if is_hf else (output, targets[own])
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / tokens
            loss.backward()
            total += loss.detach()
        named = {name: p for name, p in model.named_parameters() if p.grad is not None}
        grads = grads or {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), MAX_NORM)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(total))
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    for found in (grads, values):  # tied weights have both names
        for name in ("model.embed_tokens.weight", "embed_tokens.weight"):
            if cell.tied and name in found:
                found["lm_head.weight"] = found[name]
    return Reference(losses, norms, grads, values)
