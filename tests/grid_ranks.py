"""What ranks do with models on tensor-parallel grids: train beside one process, and compare."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.tensor import full_parameter
from tests.models import VOCAB, build_model, norms_in_their_own_dtype

BATCH, TOKENS, STEPS = 3, 7, 3


def apart(mine: Tensor, other: Tensor) -> float:
    """The largest difference, of the largest entry."""
    scale = float(other.detach().abs().max())
    return float((mine.detach() - other.detach()).abs().max()) / (scale or 1.0)


def padded_batch(step: int) -> dict[str, Tensor]:
    """Ids with padding on the right of one sequence, and labels without it."""
    ids = torch.randint(1, VOCAB, (BATCH + step % 2, TOKENS + step), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Next-token loss in the logits' dtype: that of transformers is in float32."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    target = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def trained(model: nn.Module, steps: int = STEPS) -> list[Tensor]:
    """The losses of a few steps of AdamW on padded batches, and in the end the model's own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, padded_batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, model(**padded_batch(0)).loss.detach()]


def trains_as_one_process(architecture: str, spec: fp.GridSpec, overrides: dict[str, Any]) -> dict[str, float]:
    """By what is compared: the largest relative difference to one process."""
    whole = build_model(architecture, torch.float64, **overrides)
    split = copy.deepcopy(whole)
    fresh = copy.deepcopy(whole).requires_grad_(False)
    mesh = fp.init_mesh(tp=spec.ranks, tp_grid=spec, device="cpu")
    with norms_in_their_own_dtype(whole), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fp.parallelize(split, mesh)
        pairs = zip(trained(split), trained(whole), strict=True)
        found = {f"loss {step}": apart(mine, other) for step, (mine, other) in enumerate(pairs)}
    found[f"loss {STEPS}"] *= 1e-4  # transformers' own, in float32
    names = dict(whole.named_parameters())
    for name, mine in split.named_parameters():
        found[name] = apart(full_parameter(mine), names[name])
    fp.parallelize(fresh, mesh)
    fresh.load_state_dict(split.state_dict())
    here = dict(split.named_parameters())
    found["state"] = max(float(not torch.equal(p.to_local(), here[n].to_local())) for n, p in fresh.named_parameters())
    fp.unparallelize(split)
    found["unparallelize"] = max(apart(p, names[name]) for name, p in split.named_parameters())
    mesh.close()
    return found


def train_all(cases: list[tuple[str, fp.GridSpec, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    return {f"{name} {spec}": trains_as_one_process(name, spec, overrides) for name, spec, overrides in cases}
