"""What ranks of a pipeline hold together: tied weights, frozen and written to, and stand-ins of layers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.pipeline.stages.absent import Absent
from tests.assembly.assembly_cells import Cell, batch, build, reference
from tests.assembly.assembly_ranks import assembled, fed
from tests.dist import run_ranks

TIED = Cell("pp2 mb2", tied=True)


def _token_losses(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / 100


def _scaled(_layer: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output * 1.1


def _patch(layer: Any) -> None:
    """Scale the output, as libraries do that put their own forward around a module's."""
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.1


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs) * 1.1


def hooked_losses() -> list[float]:
    """Of models all of whose layers have a hook, or another forward, as far as the rank has them."""
    found = []
    for words in ("pp2 mb2", "pp2 zbv mb2", "pp2 mb2 zero3", "pp2 zbv mb2 patched"):
        cell = Cell(words.removesuffix(" patched"))
        trained = assembled(cell)
        for part in trained.parts:
            for layer in part.layers:
                if cell.words == words:
                    layer.register_forward_hook(_scaled)
                else:
                    _patch(layer)
        found.append(trained.step(fed(trained, cell, 0)).loss)
        trained.close()
    return found


def wrapped_layers() -> str:
    """What a step says after each of the layers was put into another module, on rank 0 alone."""
    trained = assembled(Cell("pp2 mb2"))
    if trained.mesh.rank("pp") == 0:
        (part,) = trained.parts
        for index, layer in enumerate(part.layers):
            part.layers[index] = Scaled(layer)
    with pytest.raises(ValueError, match="stand-in") as error:
        trained.step(fed(trained, Cell("pp2 mb2"), 0))
    return str(error.value)


def test_a_module_around_a_stand_in_is_an_error_on_all() -> None:
    for said in run_ranks(2, wrapped_layers):
        assert "has Scaled in the place of its stand-in: the module itself is on part 1" in said


def test_a_hook_on_every_layer_runs_where_the_layer_is() -> None:
    model: Any = build(Cell("one rank"))
    for layer in model.layers:
        layer.register_forward_hook(_scaled)
    ids, targets = batch(0)
    wanted = float(F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).detach())
    for found in run_ranks(2, hooked_losses):
        assert found == pytest.approx([wanted] * 4, rel=1e-9)


def _scaled_input(module: Any, args: Any) -> Any:
    return None if hasattr(module, "layers") else tuple(x * 1.1 if x.is_floating_point() else x for x in args)


def _scaled_grads(module: Any, grads: Any) -> Any:
    return None if hasattr(module, "layers") else tuple(grad * 1.1 for grad in grads)


@contextlib.contextmanager
def hooks_on_all_modules() -> Iterator[list[nn.Module]]:
    """Of the process; what the hooks were called with."""
    modules, seen = nn.modules.module, list[nn.Module]()
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # torch, of an embedding
        for handle in (
            modules.register_module_forward_pre_hook(_scaled_input),
            modules.register_module_full_backward_pre_hook(_scaled_grads),
            modules.register_module_forward_hook(lambda module, args, output: seen.append(module)),
        ):
            stack.callback(handle.remove)
        yield seen


def globally_hooked() -> list[tuple[float, float]]:
    """Loss and norm of a step with hooks on all modules, from before the model was cut."""
    found = []
    for words in ("pp2 mb2", "pp2 zbv mb2"):
        cell = Cell(words)
        with hooks_on_all_modules() as seen:
            trained = assembled(cell)
            assert not seen, "trials are not the user's forwards"
            result = trained.step(fed(trained, cell, 0))
        inside = {module for part in trained.parts for module in part.modules()}
        assert len(seen) > 10
        assert set(seen) <= inside
        assert not any(isinstance(module, Absent) for module in seen)
        found.append((result.loss, result.norm))
        trained.close()
    return found


def test_hooks_on_all_modules_of_the_process_run_where_the_modules_are() -> None:
    model: Any = build(Cell("one rank"))
    ids, targets = batch(0)
    with hooks_on_all_modules():
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in run_ranks(2, globally_hooked):
        for result in found:
            assert result == pytest.approx((float(loss.detach()), float(norm)), rel=1e-9)


def refusals() -> list[str]:
    """What a step says when rank 0 alone has frozen a tied weight, or written to it."""
    said = []
    for change in ("freeze", "write"):
        trained = assembled(TIED)
        for step in range(3):
            if step == 2 and trained.mesh.rank("pp") == 0:
                weight = trained.parts[0].embed_tokens.weight
                if change == "freeze":
                    weight.requires_grad_(False)
                else:
                    with torch.no_grad():
                        weight.mul_(0.9)
            with contextlib.ExitStack() as stack:
                if step == 2:
                    error = stack.enter_context(pytest.raises(RuntimeError))
                trained.step(fed(trained, TIED, step))
        said.append(str(error.value))
        trained.close()
    return said


def test_what_one_rank_does_to_a_tied_weight_alone_is_an_error_on_all() -> None:
    for frozen, written in run_ranks(2, refusals):
        assert "frozen in some of the places that hold it" in frozen
        assert "its weights differ between ranks" in written
        assert "has to be written to all of them" in written


def thawed(pipelined: bool) -> tuple[list[float], Tensor]:
    """Losses of a tied model whose embedding is frozen for the first step, and the embedding."""
    model: Any = build(TIED)
    model.embed_tokens.weight.requires_grad_(False)
    pipe = None
    if pipelined:
        mesh = fp.init_mesh(pp=2, device="cpu")
        pipe = fp.parallelize_pipeline(model, mesh, "1f1b", num_microbatches=2, loss=_token_losses, reduction="sum")
    owner: Any = model if pipe is None else pipe
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        if step == 1:
            for parameter in owner.parameters():
                parameter.requires_grad_(True)
        ids, targets = batch(step)
        if pipe is None:
            loss = _token_losses(model(ids), targets)
            loss.backward()
        else:
            loss = pipe.step(ids, target=targets)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    names = ("embed_tokens.weight", "lm_head.weight")
    weight = next(p for name, p in owner.named_parameters() if name.endswith(names))
    return losses, weight.detach().clone()


def test_tied_weights_that_are_frozen_at_first_stay_equal_when_they_are_trained() -> None:
    losses, weight = thawed(False)
    for found, held in run_ranks(2, thawed, True):
        assert found == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(held, weight)


def both_ends_on_each_rank() -> list[float]:
    cell = Cell("pp2 dualpipe mb4", tied=True)
    trained = assembled(cell)
    losses = [trained.step(fed(trained, cell, step)).loss for step in range(3)]
    trained.close()
    return losses


def test_ranks_that_hold_both_ends_of_a_tied_model_in_either_order_train_it() -> None:
    wanted = reference(TIED).losses
    for losses in run_ranks(2, both_ends_on_each_rank):
        assert losses == pytest.approx(wanted, rel=1e-9)
