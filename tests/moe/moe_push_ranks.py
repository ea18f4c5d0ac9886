"""What the ranks of the tests of transport="symmetric" run: the public moe_mlp over memory that processes share.

In Triton's interpreter the device is the CPU, and on a machine with one GPU all ranks have that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.recompute_cache import Tape, recording, replaying
from fastpar.contracts.moe import ExpertRule
from fastpar.ops.moe.transports import symmetric as _moe_push
from tests.moe.moe_calls import moe_dispatch, moe_mlp
from tests.moe.moe_mlp_ranks import EXPERTS, gradients, part, problem


@contextmanager
def taking(device: str) -> Iterator[dict[str, Any]]:
    """The arguments that say so, while tensors of that device are taken."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    before = _moe_push._DEVICES
    _moe_push._DEVICES = (device,)
    try:
        yield {"group": dist.group.WORLD, "transport": "symmetric"}
    finally:
        _moe_push._DEVICES = before


def calls_of() -> int:
    """How often the exchange that was used last has been called."""
    exchange = _moe_push._MEMORIES[dist.group.WORLD].last
    assert exchange is not None
    return int(exchange.buffer._calls)


def run_symmetric(
    sizes: tuple[int, ...], rule: ExpertRule, device: str, steps: int
) -> tuple[dict[str, Tensor], list[int]]:
    """Results and gradients of the last step, and the calls of a step, and of a forward that is replayed."""
    given = {n: t.to(device) for n, t in part(problem(torch.float32, rule), sizes, dist.get_rank()).items()}
    with taking(device) as options:
        found: dict[str, Tensor] = {}
        calls = []
        for step in range(steps):
            before = calls_of() if step else 0
            again = gradients(moe_mlp, given, rule=rule, grad_scale=0.25, **options)
            assert not found or all(torch.equal(found[name], again[name]) for name in found)
            found = again
            calls = [calls_of() - before]
        tape = Tape()
        arguments = [given[name] for name in ("x", "indices", "weights", "first", "second")]
        options |= {name: given[name] for name in ("first_bias", "second_bias", "add")}
        with torch.no_grad():
            with recording(tape):
                out = moe_mlp(*arguments, rule=rule, **options)
            before = calls_of()
            with replaying(tape):
                assert torch.equal(moe_mlp(*arguments, rule=rule, **options), out)
        return {name: t.cpu() for name, t in found.items()}, [*calls, calls_of() - before]


def raise_symmetric(device: str) -> list[str]:
    """What each of some calls has raised, or "nan", or "": a dispatch alone; wrong arguments on rank 1 before there is
    an exchange; rows that do not fit, twice; a right call with more memory; wrong arguments again, then right ones."""
    rule = ExpertRule()
    right = {n: t.to(device) for n, t in part(problem(torch.float32, rule, 5, False), (3, 2), dist.get_rank()).items()}
    right["indices"] = right["indices"].clamp_min(0)
    wrong = right | ({"weights": right["weights"][:1]} if dist.get_rank() == 1 else {})
    names = ("x", "indices", "weights", "first", "second")
    found = []
    with taking(device) as options:
        try:
            moe_dispatch(right["x"], right["indices"], num_experts=EXPERTS, **options)
        except ValueError as error:
            found.append(str(error))
        for given, max_rows in ((wrong, 20), (right, 2), (right, 2), (right, 20), (wrong, 20), (right, 20)):
            try:
                out = moe_mlp(*(given[name] for name in names), rule=rule, max_rows=max_rows, **options)
                found.append("nan" if bool(out.isnan().any()) else "")
                if device != "cpu":
                    torch.cuda.synchronize()
            except (ValueError, RuntimeError, TimeoutError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found
