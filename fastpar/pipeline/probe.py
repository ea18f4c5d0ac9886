"""Check that the code of a layered model between its modules does nothing to the hidden states.

That code runs on every part. Where it scales the embedding, divides the logits or caps them (Granite, Cohere, Gemma 2
do, outside of any module), it would do so once per part, and nothing would fail. So before a model is cut, it runs once
with stand-ins for all of its units: what comes out must be what went in, bit for bit. That costs rotary tables and a
mask for a few tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.pipeline.calling import Convention
from fastpar.pipeline.carve import carve_around

# What may happen to hidden states on the way: views and copies, and adding nothing (`AbsentAddend`).
_HARMLESS = ("Accumulate", "Add", "Alias", "AsStrided", "Clone", "Slice", "ToCopy", "Transpose", "UnsafeView", "View")


def check_transparent(
    model: nn.Module,
    units: Mapping[str, Callable[[nn.Module, str, int], nn.Module]],
    convention: Convention,
    width: int,
) -> None:
    """ValueError unless the model with stand-ins for all units returns [2, 3, width] as it came.

    On the meta device, where there are no numbers, the operations between input and output are looked at instead.
    A model that cannot run on made-up hidden states is let through with a warning.
    """
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.empty(0))
    hollow = carve_around(model, dict.fromkeys(units, 0), units)
    originals = set(model.modules())
    for module in hollow.modules():
        if module not in originals:  # the caller's hooks are for calls of the caller's
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
    convention.install(hollow, has_embedding=False, has_head=False)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, width, generator=generator).to(device=like.device, dtype=like.dtype).requires_grad_()
    name = type(model).__name__
    keywords = {}
    if hidden.device.type == "meta" and convention.by_embeddings:
        keywords = {"attention_mask": hidden.new_zeros(2, 1, 3, 3)}  # Hugging Face reads numbers to make one
    try:
        with torch.random.fork_rng(devices=[]):
            out: Any = hollow(hidden, **keywords)
    except Exception as error:
        warnings.warn(
            f"could not check that {name} leaves hidden states alone outside of its modules: {error}", stacklevel=4
        )
        return
    problem = _difference(hidden, out[0] if isinstance(out, tuple) else out)
    if problem:
        raise ValueError(
            f"outside of its modules, the forward of {name} changes the hidden states ({problem}), which would happen "
            "on every part. Move that computation into the embedding, a layer or the head, name all modules that run "
            "before the layers in the Architecture, annotate the forward of layers that return tuples, or list the "
            "model's parts as modules (Partition.of_modules)"
        )


def _difference(hidden: Tensor, out: Any) -> str:
    if not isinstance(out, Tensor):
        return f"it returns a {type(out).__name__}"
    if out.shape != hidden.shape:
        return f"shape {tuple(hidden.shape)} becomes {tuple(out.shape)}"
    if out.device.type != "meta":
        return "" if torch.equal(out, hidden) else "other values come out than went in"
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in names:
            names.add(node)
            nodes += [following for following, _ in node.next_functions]
    bad = sorted({n.name() for n in names if not n.name().removeprefix("torch::autograd::").startswith(_HARMLESS)})
    return "operations " + ", ".join(bad) if bad else ""
