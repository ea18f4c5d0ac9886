"""What ranks do for the tests of what people do around `Assembled.step`."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import fastpar as fp
from fastpar.verification.pieces import index_of, take, zero_pieces
from tests.assembly.assembly_cells import MAX_NORM, VOCAB, Cell, batch, build
from tests.assembly.assembly_ranks import assembled, far, fed

WORDS = "q_proj"  # of what is frozen between the first step and the second


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def by_hand(cell: Cell) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """One process: losses, norms, the last values and their average."""
    model = build(cell)
    optimizer, average = _adamw(list(model.parameters())), AveragedModel(model)
    losses, norms = [], []
    for step in range(4):
        _between(step, [model], optimizer)
        ids, targets = batch(step)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(float(loss.detach()))
    values, averages = ({n: x.detach() for n, x in m.named_parameters()} for m in (model, average.module))
    return losses, norms, values, averages


def _between(step: int, parts: Sequence[nn.Module], optimizer: Any) -> None:
    if step in (1, 2):
        for part in parts:
            for name, parameter in part.named_parameters():
                if WORDS in name:
                    parameter.requires_grad_(step == 2)
    if step == 3:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] = 0.2


def around(cells: Sequence[Cell]) -> dict[str, Any]:
    """The same in layouts, with evaluation in between: losses, norms and what differs in the end."""
    found: dict[str, Any] = {}
    for cell in cells:
        wanted = by_hand(cell)
        trained = fp.assemble(build(cell), cell.layout, _adamw, max_norm=MAX_NORM)
        averages = [AveragedModel(part) for part in trained.parts]
        results = []
        for step in range(4):
            _between(step, trained.parts, trained.optimizer)
            trained.evaluate(fed(trained, cell, step + 1))
            results.append(trained.step(fed(trained, cell, step)))
            for average, part in zip(averages, trained.parts, strict=True):
                average.update_parameters(part)
        problems = far(zero_pieces(trained.zero, "value"), wanted[2], 1e-8)
        for average in averages:
            for name, x in average.module.named_parameters():
                whole = wanted[3][name]
                mine: Any = x.detach()
                part = mine.full_tensor() if cell.layout.zero.stage == 3 else getattr(mine, "_local_tensor", mine)
                theirs = whole if cell.layout.zero.stage == 3 else take(whole, index_of(x))
                if float((part - theirs).abs().max()) > 1e-9:
                    problems.append(f"average of {name}")
        trained.close()
        found[str(cell)] = [r.loss for r in results], [r.norm for r in results], problems, wanted[:2]
    return found


# ---- dropout


def dropping() -> nn.Module:
    import transformers

    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": VOCAB, "attn_pdrop": 0.0}
    sizes |= {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double()


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def resumed(folder: str, pairs: Sequence[tuple[str, str, bool]]) -> list[tuple[list[float], list[float], list[str]]]:
    """Losses of two steps after a state was saved in one layout, and of another run that goes on from it; warnings."""
    heard, found = _Heard(), []
    logging.getLogger("fastpar.assemble").addHandler(heard)
    feed = Cell("one rank", "huggingface")
    for number, (first, second, alike) in enumerate(pairs):
        trained = fp.assemble(dropping(), first, _adamw)
        torch.manual_seed(5 + (0 if alike else dist.get_rank()))
        trained.step(fed(trained, feed, 0))
        dcp.save(trained.state(), checkpoint_id=f"{folder}/{number}")
        wanted = [trained.step(fed(trained, feed, step)).loss for step in (1, 2)]
        trained.close()
        trained = fp.assemble(dropping(), second, _adamw)
        torch.manual_seed(99 + dist.get_rank())
        state = trained.state()
        dcp.load(state, checkpoint_id=f"{folder}/{number}")
        heard.texts.clear()
        trained.load_state(state)
        drawn = torch.rand(1, dtype=torch.float64) if heard.texts else None
        again = [trained.step(fed(trained, feed, step)).loss for step in (1, 2)] if drawn is None else drawn.tolist()
        trained.close()
        found.append((wanted, again, list(heard.texts)))
    logging.getLogger("fastpar.assemble").removeHandler(heard)
    return found


# ---- copies


def states_in_memory() -> list[tuple[list[float], list[float]]]:
    """Losses of steps, and of the same ones after a copy of the state from before them was loaded."""
    found = []
    for cell in (Cell("dp2 zero1"), Cell("dp2 zero2"), Cell("tp2 zero1")):
        trained = assembled(cell)
        trained.step(fed(trained, cell, 0))
        kept = copy.deepcopy(trained.state())
        once = [trained.step(fed(trained, cell, step)).loss for step in (1, 2)]
        trained.load_state(kept)
        found.append((once, [trained.step(fed(trained, cell, step)).loss for step in (1, 2)]))
        trained.close()
    return found


def copied_models() -> tuple[bool, list[str]]:
    """Whether a copy that was made when a forward had just failed computes what the model does; what a copy of a model
    says whose `generate` was replaced by context parallelism and by stage 3."""
    cell, ids = Cell("tp2 sp"), batch(0)[0]
    trained = assembled(cell)
    (model,) = trained.parts
    with contextlib.suppress(IndexError):
        model(torch.full((2, 4), VOCAB))
    other = copy.deepcopy(model)
    with torch.no_grad():
        is_same = bool((model(ids) == other(ids)).all())
    trained.close()
    trained = assembled(Cell("cp2 zero3", "huggingface"))
    said = []
    try:
        copy.deepcopy(trained.parts[0]).generate(ids)
    except RuntimeError as error:
        said.append(str(error))
    trained.close()
    return is_same, said


# ---- the rest


def closed_parts(cells: Sequence[Cell]) -> list[str]:
    """Modules that still have a forward of their own when what was assembled is closed."""
    left = []
    for cell in cells:
        trained = assembled(cell)
        had = any("forward" in vars(module) for part in trained.parts for module in part.modules())
        trained.close()
        left += [] if had else [f"{cell}: no recomputation"]
        for part in trained.parts:
            left += [f"{cell}: {name}" for name, module in part.named_modules() if "forward" in vars(module)]
    return left


def plateaus(cells: Sequence[Cell]) -> list[list[float]]:
    """Learning rates after each of three steps that do not improve enough."""

    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10)

    found = []
    for cell in cells:
        sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        trained = fp.assemble(build(cell), cell.layout, sgd, scheduler=plateau)
        rates = []
        for step in range(3):
            trained.step(fed(trained, cell, step))
            rates.append(trained.optimizer.param_groups[0]["lr"])
        trained.close()
        found.append(rates)
    return found


def outside_of_vocabulary(cell: Cell) -> tuple[list[str], float]:
    """What is said about ids and labels of one data-parallel rank that no token has; and the loss of a step after."""
    trained, said = assembled(cell), []
    good = fed(trained, cell, 0)
    for key in ("input_ids", "labels"):
        wrong = {name: x.clone() for name, x in good.items()}
        wrong[key][-1, 1] = 1000 if trained.mesh.rank("dp") == 1 else 3
        try:
            trained.step(wrong)
        except ValueError as error:
            said.append(str(error))
    loss = trained.step(good).loss
    trained.close()
    return said, loss
