"""Random bad calls of public functions, in a process apart: `python -m tests.project.fuzz_calls NAME SEED COUNT`.

Every call is a good one of `GOOD` in which one or two arguments are something else. It returns, or raises a typed error
of the package that names an argument; everything else is printed, one line of JSON each. A signal ends the process, and
the last line before it is the call that did it.
"""

from __future__ import annotations

import datetime
import inspect
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastpar import ops
from fastpar.comm import Communicator

ALLOWED = (ValueError, TypeError, IndexError, KeyError, RuntimeError, OSError, NotImplementedError)
# What a machine has too little of is not the caller's mistake, and torch says how much was asked for.
NO_MEMORY = re.compile("can't allocate memory|Storage size calculation overflowed")
MEMORY_BYTES = 8 << 30  # a size that nobody has must be an error at once
# Texts of torch's and Python's own errors, which say nothing of the argument that was wrong.
INSIDE = re.compile(
    r"object has no attribute|aten::|c10::|\.cpp:|at::|internal assert|not implemented for|dtype\(s\)|"
    r"positional argument|unsupported operand|not supported between|object is not (iterable|callable|subscriptable)|"
    r"Expected .* but got|truth value|Boolean value of",
    re.IGNORECASE,
)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (
        torch.linspace(-2.0, 3.0, max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].view(shape).to(dtype)
    )


def ids(*shape: int, below: int = 6) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) % below


def routing() -> tuple[Any, ...]:
    return floats(4, 3), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]]), torch.full((4, 2), 0.5)


def dispatched() -> tuple[Any, ...]:
    rows, _, plan = ops.moe_dispatch(*routing(), num_experts=3)
    return rows, plan


def states() -> dict[str, Any]:
    return {"params": [floats(3)], "grads": [floats(3)]}


LOGITS: Callable[[], dict[str, Any]] = lambda: {"logits": floats(3, 6)}  # noqa: E731
LINEAR: Callable[[], dict[str, Any]] = lambda: {"x": floats(4, 3), "weight": floats(2, 3), "group": None}  # noqa: E731

GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "adamw_step": lambda: {**states(), "exp_avgs": [floats(3)], "exp_avg_sqs": [floats(3) ** 2], "step": 1, "lr": 0.1},
    "all_gather_linear": LINEAR,
    "add_rms_norm": lambda: {"x": floats(2, 3), "residual": floats(2, 3), "weight": floats(3)},
    "all_reduce_rms_norm": lambda: {"x": floats(2, 3), "weight": floats(3), "group": None},
    "attention": lambda: {"q": floats(2, 4, 3, 2), "k": floats(2, 2, 3, 2), "v": floats(2, 2, 3, 5), "sink": floats(4)},
    "context_attention": lambda: {
        "q": floats(2, 4, 3, 2),
        "k": floats(2, 2, 3, 2),
        "v": floats(2, 2, 3, 5),
        "group": None,
        "layout": ((ops.TokenRange(0, 3),),),
        "mask": ops.AttentionMask(causal=True),
        "sink": floats(4),
    },
    "copy_to_linear": LINEAR,
    "dequantize_blocks": lambda: dict(
        zip(("codes", "scales"), ops.quantize_blocks(floats(3, 70), format="int8", block=64), strict=True), block=64
    ),
    "exact_square_sum": lambda: {"tensors": [floats(3), floats(2, 2)]},
    "expert_capacity": lambda: {"tokens": 8, "top_k": 2, "num_experts": 4, "factor": 1.25},
    "expert_choice_route": lambda: {"logits": floats(4, 3), "capacity": 2},
    "grouped_linear": lambda: {"x": floats(4, 3), "weight": floats(2, 2, 3), "splits": [0, 1, 4]},
    "grouped_linear_dgrad": lambda: {"dout": floats(4, 2), "weight": floats(2, 2, 3), "splits": [0, 1, 4]},
    "grouped_linear_wgrad": lambda: {
        "dout": floats(4, 2),
        "x": floats(4, 3),
        "weight": floats(2, 2, 3),
        "splits": [0, 1, 4],
    },
    "linear_all_reduce": LINEAR,
    "linear_cross_entropy": lambda: {"hidden": floats(3, 4), "weight": floats(6, 4), "target": ids(3)},
    "linear_cross_entropy_dgrad": lambda: {
        "hidden": floats(3, 4),
        "weight": floats(6, 4),
        "target": ids(3),
        "lse": floats(3),
        "grad_loss": floats(3),
    },
    "linear_cross_entropy_wgrad": lambda: {
        "hidden": floats(3, 4),
        "weight": floats(6, 4),
        "target": ids(3),
        "lse": floats(3),
        "grad_loss": floats(3),
    },
    "linear_reduce_scatter": LINEAR,
    "lion_step": lambda: {**states(), "exp_avgs": [floats(3)], "lr": 0.1},
    "moe_capacity": lambda: {"indices": routing()[1], "weights": routing()[2], "num_experts": 3, "factor": 1.0},
    "moe_combine": lambda: dict(zip(("rows", "handle"), dispatched(), strict=True)),
    "moe_dispatch": lambda: {**dict(zip(("x", "indices", "weights"), routing(), strict=True)), "num_experts": 3},
    "moe_mlp": lambda: {
        **dict(zip(("x", "indices", "weights"), routing(), strict=True)),
        "experts": ops.ExpertWeights(floats(3, 4, 3), floats(3, 3, 2)),
    },
    "moe_plan": lambda: {"indices": routing()[1], "weights": routing()[2], "num_experts": 3},
    "moe_route": lambda: {"logits": floats(4, 3), "rule": ops.RouteRule(top_k=2)},
    "moe_send": lambda: {"x": routing()[0], "handle": ops.moe_plan(*routing()[1:], num_experts=3)},
    "newton_schulz": lambda: {"x": floats(3, 4)},
    "quantize_blocks": lambda: {"x": floats(3, 70), "block": 64},
    "reduce_scatter_rms_norm": lambda: {"x": floats(2, 3), "weight": floats(3), "group": None},
    "rms_norm": lambda: {"x": floats(2, 3), "weight": floats(3)},
    "rotary_embedding": lambda: {"x": floats(2, 3, 2, 4), "positions": ids(3)},
    "rotary_tables": lambda: {"positions": ids(3), "rotary_dim": 4},
    "router_logits": lambda: {"x": floats(4, 3), "weight": floats(2, 3)},
    "sgd_step": lambda: {**states(), "lr": 0.1},
    "sharded_dropout": lambda: {"x": floats(4, 3), "p": 0.5, "seed": 3},
    "square_sum_norm": lambda: {"sums": ops.exact_square_sum([floats(3)])},
    "swiglu": lambda: {"gate_up": floats(3, 4)},
    "vocab_parallel_argmax": LOGITS,
    "vocab_parallel_cross_entropy": lambda: {**LOGITS(), "target": ids(3)},
    "vocab_parallel_embedding": lambda: {"ids": ids(2, 3), "weight": floats(6, 4)},
    "vocab_parallel_entropy": LOGITS,
    "vocab_parallel_log_prob": lambda: {**LOGITS(), "ids": ids(3)},
    "vocab_parallel_log_prob_and_entropy": lambda: {**LOGITS(), "ids": ids(3)},
    "vocab_parallel_log_softmax": LOGITS,
    "vocab_parallel_sample": lambda: {**LOGITS(), "seed": 1},
    "vocab_parallel_softmax": LOGITS,
    "vocab_parallel_top_k_top_p": lambda: {**LOGITS(), "top_k": 2, "top_p": 0.7},
    "vocab_parallel_topk": lambda: {**LOGITS(), "k": 2},
}

JUNK: list[Callable[[], Any]] = [
    lambda: None, lambda: "tp", lambda: "", lambda: 0, lambda: -1, lambda: 1, lambda: 2**31, lambda: 2**62,
    lambda: 2**63 - 1, lambda: -(2**63), lambda: 2**64, lambda: 10**400, lambda: 0.0, lambda: -0.5, lambda: 1.5,
    lambda: float("nan"), lambda: float("inf"), lambda: -float("inf"), lambda: 1e300, lambda: 1e-320, lambda: True,
    lambda: [], lambda: (), lambda: [1, 2], lambda: (0, 6, 6), lambda: (0, 3), lambda: (0, -1, 6), lambda: ("a",) * 3,
    lambda: [None], lambda: {"a": 1}, lambda: object(), lambda: torch.float16, lambda: torch.int64, lambda: 1j,
    lambda: torch, lambda: lambda *_: None, lambda: b"bytes", lambda: range(3), lambda: torch.Size([2]),
    lambda: [floats(3)],
    lambda: floats(), lambda: floats(0), lambda: floats(3), lambda: floats(3, 6), lambda: floats(1, 3, 6),
    lambda: floats(0, 6), lambda: floats(3, 0), lambda: floats(6, 3).t(), lambda: floats(1).expand(3, 6),
    lambda: floats(3, 12)[:, ::2], lambda: floats(3, 6, dtype=torch.float64),
    lambda: floats(3, 6, dtype=torch.bfloat16),
    lambda: floats(3, 6, dtype=torch.float16), lambda: floats(3, 6).to(torch.complex64), lambda: floats(3, 6) > 0,
    lambda: ids(3), lambda: ids(3).int(), lambda: ids(3).to(torch.uint8), lambda: ids(3, 2), lambda: ids(0),
    lambda: ids(3) + 2**40, lambda: ids(3) - 2**62, lambda: ids(3) - 7, lambda: floats(3, 6).to("meta"),
    lambda: ids(3).to("meta"), lambda: floats(3, 6).to_sparse(), lambda: floats(3, 6) * float("nan"),
    lambda: floats(3, 6) * 1e38, lambda: torch.full((3, 6), -float("inf")), lambda: floats(3, 6).requires_grad_(),
    lambda: torch.nn.Parameter(floats(6, 4)), lambda: torch.empty(2, 3, dtype=torch.float8_e4m3fn),
    lambda: floats(2, 2, 2, 2),
    lambda: torch.zeros(1, 1, 1, 1, 1, 1, 1, 1, 1, 6),
]  # fmt: skip


OTHER_JUNK: list[Callable[[], Any]] = [
    lambda: torch.nn.Linear(3, 3), lambda: torch.nn.Linear, lambda: [torch.nn.Linear(3, 3)], lambda: torch.nn.ReLU(),
    lambda: Communicator(None), lambda: torch.optim.SGD([floats(3)]), lambda: torch.device("cpu"), lambda: "cpu",
    lambda: "cuda:7", lambda: "int8", lambda: "sum", lambda: {"": None}, lambda: {1: 2}, lambda: [[1], [2]],
    lambda: [(0, 1)], lambda: ["a", "b"], lambda: [1.5], lambda: [-1], lambda: [True], lambda: [2**62, 2**62],
    lambda: iter([1]), lambda: (x for x in ()), lambda: set(), lambda: Wrapped(floats(3, 6)), lambda: [floats(3), None],
    lambda: floats(3).numpy(), lambda: datetime.timedelta(1), lambda: Path("/"), lambda: Fraction(1, 3),
]  # fmt: skip


class Wrapped(Tensor):
    """A subclass that is an ordinary tensor."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Wrapped:
        return x.as_subclass(cls)


def case_of(name: str) -> Callable[[], tuple[Callable[..., Any], dict[str, Any]]]:
    """`name` of fastpar.ops, or "part.name" of tests/project/fuzz_api.py."""
    if name in GOOD:
        return lambda: (getattr(ops, name), GOOD[name]())
    from tests.project.fuzz_api import PARTS

    part, _, rest = name.partition(".")
    return PARTS[part][rest]


def users_own(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Arguments that are not made bad: functions that the user wrote, what these get, and how long to go on; and other
    names of the rest."""
    from tests.project.fuzz_api import ALSO, USERS_OWN

    case = name.partition(".")[2]
    return USERS_OWN.get(case, ()), ALSO.get(case, ())


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """The names of its arguments, options that it hands on included."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return names + (
        list(inspect.signature(ops.linear_cross_entropy).parameters)
        if any(p.name == "options" and "Unpack" in str(p.annotation) for p in parameters)
        else []
    )


def shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__} {value.dtype}{list(value.shape)}@{value.device}"
    return repr(value)[:60].replace("\n", " ")


def says(text: str, argument: str) -> bool:
    """Whether a text has an argument's name, or its words: "2 ranks" says num_ranks."""
    words = [argument, *(word for word in argument.split("_") if len(word) > 3)]
    return any(re.search(rf"\b{word}\b", text) for word in words)


class Hangs(BaseException):
    pass


def verdict(function: Callable[..., Any], arguments: dict[str, Any], names: list[str], seconds: int = 20) -> str | None:
    """What is wrong with what a call of these arguments does."""

    def give_up(*_: Any) -> None:
        raise Hangs(f"not done within {seconds} seconds")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        function(**arguments)
    except ALLOWED as error:
        text = str(error)
        is_typed = type(error) in (ValueError, TypeError, IndexError, KeyError, RuntimeError) or isinstance(
            error, OSError
        )
        if not is_typed and not type(error).__module__.startswith("fastpar"):
            return f"{type(error).__name__}: {text[:200]}"
        if NO_MEMORY.search(text) or isinstance(error, OSError):  # the machine's
            return None
        given = [f"'{value}'" for value in arguments.values() if isinstance(value, (str, Path))]
        named = any(says(text, argument) for argument in names) or any(map(text.__contains__, given))
        if INSIDE.search(text) or not named:
            return f"{type(error).__name__}: {text[:200]}"
    except (Exception, Hangs) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return None


def run(name: str, seed: int, count: int) -> None:
    source = random.Random(f"{name} {seed}")
    case = case_of(name)
    junk = JUNK if name in GOOD else JUNK + OTHER_JUNK
    skipped, also = users_own(name)
    function, arguments = case()
    function(**arguments)  # a good call, or the process ends with its error
    for number in range(count):
        function, arguments = case()
        names = arguments_of(function)
        mutable = [argument for argument in names if argument not in skipped]
        for argument in source.sample(mutable, k=min(len(mutable), source.choice((1, 1, 2)))):
            arguments[argument] = source.choice(junk)()
        text = f"{name}({', '.join(f'{k}={shown(v)}' for k, v in arguments.items())})"
        print(json.dumps({"number": number, "call": text}), file=sys.stderr, flush=True)
        wrong = verdict(function, arguments, [*names, *also])
        if wrong is not None:
            print(json.dumps({"number": number, "call": text, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with tempfile.TemporaryDirectory(prefix="fastpar-fuzz-") as folder:
        os.chdir(folder)  # for what a name is taken for a path
        for function_name in sys.argv[1].split(","):
            run(function_name, int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"done": True}), flush=True)
