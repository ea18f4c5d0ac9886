"""Checks of optimizer steps that are left out for tensors like those of an earlier call: never of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastpar import ops
from fastpar.contracts import optimizer as contract
from fastpar.contracts.optimizer_facts import MAX_KNOWN, KnownFacts, facts_of
from fastpar.ops import StochasticRounding
from fastpar.ops import optimizer as implementation

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_known", KnownFacts())


def example(count: int = 3) -> Arguments:
    """Arguments of adamw_step: float32 masters with outputs, 8-bit states; one tensor is empty."""
    shapes = [(4, 6), (0,), (600,), *[(5,)] * (count - 3)]
    codes = [[torch.zeros(shape, dtype=U8) for shape in shapes] for _ in range(2)]
    scales = [[torch.full((-(-x.numel() // 256),), 1e-30) for x in codes[0]] for _ in range(2)]
    return {
        "params": [torch.nn.Parameter(torch.ones(shape)) for shape in shapes],
        "grads": [torch.ones(shape, dtype=BF16) for shape in shapes],
        "exp_avgs": codes[0],
        "exp_avg_sqs": codes[1],
        "outputs": [torch.zeros(shapes[0], dtype=BF16), None, *[torch.zeros(x, dtype=BF16) for x in shapes[2:]]],
        "exp_avg_scales": scales[0],
        "exp_avg_sq_scales": scales[1],
        "step": 1,
        "lr": 0.1,
        "stochastic": StochasticRounding(1, list(range(count)), [0] * count),
    }


def checks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Gets an entry for every check of lists from now on."""
    found: list[None] = []
    check = contract._check_lists
    monkeypatch.setattr(contract, "_check_lists", lambda step: (found.append(None), check(step)))
    return found


def test_the_same_tensors_and_others_in_their_places_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, arguments = checks(monkeypatch), example()
    for _ in range(3):
        ops.adamw_step(**arguments)
        arguments["grads"] = [x.clone() for x in arguments["grads"]]
        arguments["step"] += 1
    assert len(found) == 1
    ops.adamw_step(**example())  # other parameters
    assert len(found) == 2


def test_sgd_and_lion_are_checked_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks(monkeypatch)
    params, grads, states = ([torch.ones(5), torch.ones(3, 2)] for _ in range(3))
    for _ in range(2):
        ops.sgd_step(params, grads, lr=0.1)
        ops.sgd_step(tuple(params), grads, states, lr=0.1, momentum=0.5)
        ops.lion_step(params, grads, states, lr=0.1)
    assert len(found) == 2, "SGD without buffers; and one state, whose checks are the same for both"


def test_what_is_known_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [example() for _ in range(MAX_KNOWN + 2)]  # at addresses of their own
    for arguments in kept:
        ops.adamw_step(**arguments)
    assert len(implementation._known._known) <= MAX_KNOWN


def put(name: str, index: int, make: Callable[[torch.Tensor], Any]) -> Callable[[Arguments], None]:
    def change(arguments: Arguments) -> None:
        arguments[name][index] = make(arguments[name][index])

    return change


def in_place(name: str, index: int, act: Callable[[torch.Tensor], Any]) -> Callable[[Arguments], None]:
    def change(arguments: Arguments) -> None:
        act(arguments[name][index])

    return change


def assign(name: str, value: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update({name: value(arguments[name]) if callable(value) else value})


def wrapped(transform: Any) -> Callable[[torch.Tensor], Any]:
    """The tensor that a function sees inside a transform."""

    def make(x: torch.Tensor) -> Any:
        found: list[torch.Tensor] = []
        transform(lambda y: (found.append(y), y.float().sum())[1])(x)
        return found[0]

    return make


def replace_data(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    return lambda x: setattr(x, "data", make(x.data))


class Subclass(torch.Tensor):
    pass


WRONG: dict[str, Callable[[Arguments], None]] = {
    "data of another shape": in_place("params", 0, replace_data(lambda x: x.reshape(6, 4))),
    "data of another dtype": in_place("grads", 0, replace_data(lambda x: x.double())),
    "data of fewer elements": in_place("grads", 2, replace_data(lambda x: x[:599])),
    "set_ to other memory": in_place("exp_avgs", 2, lambda x: x.set_(torch.zeros(7, dtype=U8))),
    "resized": in_place("exp_avg_sq_scales", 2, lambda x: x.resize_(2)),
    "transposed": in_place("exp_avgs", 0, lambda x: x.t_()),
    "elements that share memory": put("outputs", 0, lambda x: torch.zeros(6, dtype=BF16).expand(4, 6)),
    "expanded in place": in_place("exp_avgs", 0, lambda x: x.as_strided_((4, 6), (1, 1))),
    "on meta": put("grads", 0, lambda x: x.to("meta")),
    "empty on meta": put("grads", 1, lambda x: x.to("meta")),
    "sparse": put("grads", 0, lambda x: x.to_sparse()),
    "of CSR": put("grads", 0, lambda x: x.float().to_sparse_csr()),
    "inside vmap": put("grads", 0, wrapped(torch.vmap)),
    "inside grad": put("params", 0, wrapped(torch.func.grad)),
    "inside functionalize": put("grads", 0, wrapped(torch.func.functionalize)),
    "empty inside functionalize": put("grads", 1, wrapped(torch.func.functionalize)),
    "None for a gradient": put("grads", 0, lambda x: None),
    "a number for a gradient": put("grads", 0, lambda x: 1.0),
    "float8": put("exp_avgs", 0, lambda x: x.view(torch.float8_e4m3fn)),
    "one gradient less": assign("grads", lambda grads: grads[:2]),
    "a tensor for a list": assign("params", torch.ones(3, 5)),
    "a string for a list": assign("grads", "abc"),
    "None for gradients": assign("grads", None),
    "None for states": assign("exp_avgs", None),
    "None for scales": assign("exp_avg_scales", None),
    "an output more": put("outputs", 1, lambda x: torch.zeros(1, dtype=BF16)),
    "no outputs, but an empty list": assign("outputs", []),
    "remainders": assign("remainders", []),
    "one key less": assign("stochastic", StochasticRounding(1, [0, 1], [0, 0])),
    "found_inf of two": assign("found_inf", torch.zeros(2)),
    "lr": assign("lr", -1.0),
    "eps of a wrong kind": assign("eps", "small"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_is_wrong_is_refused_as_if_nothing_had_been_known(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Arguments], None]
) -> None:
    arguments = {"remainders": None, "found_inf": None, "eps": 1e-8} | example()
    ops.adamw_step(**arguments)
    change(arguments)
    with pytest.raises((TypeError, ValueError)) as found:
        ops.adamw_step(**arguments)
    monkeypatch.setattr(implementation, "_known", KnownFacts())
    with pytest.raises((TypeError, ValueError)) as wanted:
        ops.adamw_step(**arguments)
    assert (type(found.value), str(found.value)) == (type(wanted.value), str(wanted.value))
    assert any(re.search(rf"\b{name}\b", str(found.value)) for name in arguments), "it names the argument"


def test_an_output_of_another_parameter_is_checked_again() -> None:
    params, grads = [torch.ones(5), torch.ones(5, dtype=BF16)], [torch.ones(5), torch.ones(5)]
    output = torch.zeros(5, dtype=BF16)
    ops.sgd_step(params, grads, lr=0.1, outputs=[output, None])
    with pytest.raises(TypeError, match=r"outputs\[1\] needs params\[1\] to be the float32 master"):
        ops.sgd_step(params, grads, lr=0.1, outputs=[None, output])


def test_a_list_is_not_taken_for_the_tensor_that_it_was_made_of() -> None:
    whole, grads = torch.ones(3, 5), torch.ones(3, 5)
    ops.sgd_step(list(whole.unbind()), list(grads.unbind()), lr=0.1)
    with pytest.raises(TypeError, match="params must be a sequence"):
        ops.sgd_step(whole, list(grads.unbind()), lr=0.1)


@pytest.mark.parametrize(
    "change",
    [put("grads", 0, lambda x: x.as_subclass(Subclass)), put("params", 0, lambda x: x.data.t().contiguous().t())],
    ids=["a subclass", "not contiguous"],
)
def test_unusual_tensors_have_no_facts_and_are_updated(change: Callable[[Arguments], None]) -> None:
    arguments = example()
    ops.adamw_step(**arguments)
    change(arguments)
    names = ("params", "grads", "outputs")
    states = [[arguments["exp_avgs"], arguments["exp_avg_sqs"]]]
    step = contract.Step(
        *(arguments[name] for name in names[:2]), *states, [], 1.0, None, arguments["outputs"], None, None, ()
    )
    assert facts_of(step) is None
    before = arguments["params"][0].detach().clone()
    ops.adamw_step(**arguments)
    assert (arguments["params"][0] < before).all()
