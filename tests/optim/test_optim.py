"""The fused optimizers as torch optimizers: against torch.optim's, masters and states in every format, checkpoints.

Tolerances against torch.optim: the same float32 operations in another order, a few ulp per step. Everything that is
about the same optimizer in two layouts, or before and after a checkpoint, is compared bit for bit.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastpar as fp
from fastpar.contracts import optimizer_formats as formats
from fastpar.optim import SGD, AdamW, Lion
from fastpar.optim._state_formats import blocks_of, values_of
from fastpar.optim.fused import _Deferred
from tests.dist import run_ranks
from tests.values import gathered

Make = Callable[[list[nn.Parameter]], Any]

SHAPES = [(37, 19), (300,), (0, 4), (1,)]
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 states": {"state_dtype": torch.bfloat16},
    "8-bit states": {"state_dtype": "8bit"},
    "float32 master": {"master": "float32"},
    "split master": {"master": "split", "state_dtype": torch.bfloat16},
}
PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "adamw maximize": (AdamW, torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
    "sgd": (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd momentum": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd nesterov": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradient(param: Tensor, index: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(*param.shape, generator=generator).to(param.dtype)


def take_steps(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for i, param in enumerate(params):
            param.grad = gradient(param, i, step)
        optimizer.step()


def all_state(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    state = [value for p in params for _, value in sorted(optimizer.state[p].items()) if isinstance(value, Tensor)]
    return [p.detach() for p in params] + state


def assert_same_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# ---- against torch.optim ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_steps_match_torch_with_groups_and_a_scheduler(pair: str) -> None:
    ours, theirs, options = PAIRS[pair]
    results = []
    for make in (ours, theirs):
        params = parameters()
        groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0, "lr": 0.02}]
        optimizer = make(groups, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(5):
            take_steps(optimizer, params, range(step, step + 1))
            scheduler.step()
        results.append([p.detach() for p in params])
    torch.testing.assert_close(results[0], results[1], rtol=2e-6, atol=2e-6)


def test_a_closure_is_evaluated_with_gradients() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = SGD([param], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert param.tolist() == [0.0, 0.0, 0.0]


def test_parameters_without_gradient_and_late_ones_count_their_own_steps() -> None:
    results = []
    for make in (AdamW, torch.optim.AdamW):
        params = parameters()
        optimizer = make(params[:2], lr=0.01)
        take_steps(optimizer, params[:1], range(2))
        optimizer.add_param_group({"params": params[2:], "lr": 0.1})
        for param in params:
            param.grad = None
        take_steps(optimizer, params, range(2, 4))
        results.append((params, [int(optimizer.state[p]["step"]) for p in params]))
    assert results[0][1] == results[1][1] == [4, 2, 2, 2]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("pair", ["adamw", "sgd momentum"])
def test_states_and_counts_that_somebody_has_replaced_or_changed_are_taken(pair: str) -> None:
    ours, theirs, options = PAIRS[pair]
    results = []
    for make in (ours, theirs):
        params = parameters()
        optimizer = make(params, **options)
        moment = "exp_avg" if pair == "adamw" else "momentum_buffer"
        take_steps(optimizer, params, range(2))
        optimizer.state[params[0]][moment] = torch.ones_like(params[0])
        optimizer.state[params[1]] = {key: value.clone() for key, value in optimizer.state[params[1]].items()}
        params[3].data = torch.full_like(params[3], 2.0)
        if pair == "adamw":
            optimizer.state[params[1]]["step"].fill_(7.0)
            optimizer.state[params[2]]["step"] += 1.0
        take_steps(optimizer, params, range(2, 4))
        if pair == "adamw":
            assert [int(optimizer.state[p]["step"]) for p in params] == [4, 9, 5, 4]
        results.append([p.detach() for p in params])
    torch.testing.assert_close(results[0], results[1], rtol=2e-6, atol=2e-6)


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _calls(number: int, options: dict[str, Any], use_dtensors: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    whole = [torch.ones(3, dtype=torch.bfloat16) for _ in range(number)]
    params = [nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]) if use_dtensors else x) for x in whole]
    optimizer = AdamW(params, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with Calls() as calls:
        optimizer.step()
    return calls.names


def _calls_of_few_and_many(format_name: str) -> None:
    for use_dtensors in (False, True):
        few, many = (_calls(number, FORMATS[format_name], use_dtensors) for number in (2, 40))
        assert "fastpar.adamw_step.default" in few
        assert many == few


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_step_calls_as_many_operators_for_many_parameters_as_for_few(format_name: str) -> None:
    run_ranks(1, _calls_of_few_and_many, format_name)


# ---- scalars of a step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_skipped_step_changes_no_bit_and_is_not_counted(format_name: str) -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params, lr=0.1, **FORMATS[format_name])
    take_steps(optimizer, params, range(2))
    before = copy.deepcopy(all_state(optimizer, params))
    optimizer.found_inf = torch.ones(())
    take_steps(optimizer, params, range(2, 3))
    assert_same_bits(all_state(optimizer, params), before)
    assert optimizer.found_inf is None


@pytest.mark.parametrize("was_skipped", [True, False])
def test_counts_of_a_step_that_a_device_has_skipped_are_taken_back_when_the_host_knows(was_skipped: bool) -> None:
    params = parameters()
    optimizer = AdamW(params)
    take_steps(optimizer, params, range(2))
    arrived = mock.Mock()  # a CUDA event
    counts = optimizer._counts.of([optimizer.state[p] for p in params])
    optimizer._deferred.append(_Deferred(torch.tensor(float(was_skipped)), arrived, counts))
    saved = optimizer.state_dict()
    arrived.synchronize.assert_called_once_with()
    assert [int(state["step"]) for state in saved["state"].values()] == [1 if was_skipped else 2] * len(params)


def test_the_gradient_factor_is_applied_once_and_then_forgotten() -> None:
    results = []
    for factor in (0.25, torch.tensor(0.25), None):
        params = parameters()
        optimizer = AdamW(params, lr=0.1)
        optimizer.grad_factor = factor
        for i, param in enumerate(params):
            param.grad = gradient(param, i, 0) * (0.25 if factor is None else 1.0)
        optimizer.step()
        assert optimizer.grad_factor is None
        results.append(all_state(optimizer, params))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_a_gradient_scale_is_divided_out_of_the_step() -> None:
    """By SGD: of a factor that all gradients have Adam would show nothing."""
    results = []
    for scale in (None, torch.tensor(1024.0)):
        params = parameters()
        optimizer: Any = SGD(params, lr=0.1)
        if scale is not None:  # as torch.amp.GradScaler sets it
            optimizer.grad_scale = scale
        for i, param in enumerate(params):
            param.grad = gradient(param, i, 0) * (1.0 if scale is None else scale)
        optimizer.step()
        results.append(all_state(optimizer, params))
    assert_same_bits(*results)


def test_torch_grad_scaler_drives_it_as_it_drives_torchs_own() -> None:
    results = []
    for make in (AdamW, torch.optim.AdamW):
        params = parameters()
        optimizer = make(params, lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(5):
            for i, param in enumerate(params):
                param.grad = gradient(param, i, step) * scaler.get_scale()
            if step == 2:
                params[0].grad[3, 3] = float("inf")  # type: ignore[index]
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        results.append((params, scaler.get_scale(), int(optimizer.state[params[0]]["step"])))
    assert results[0][1:] == results[1][1:] == (1024.0 * 2 * 0.5 * 2, 4)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-6, atol=2e-6)


def test_outputs_get_the_parameters_rounded() -> None:
    params = parameters()
    optimizer = AdamW(params, lr=0.1)
    copies = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in params[:2]}
    optimizer.outputs = copies  # type: ignore[assignment]
    take_steps(optimizer, params, range(2))
    assert all(torch.equal(out, p.bfloat16()) for p, out in copies.items())


# ---- masters and states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [AdamW, SGD, Lion])
def test_both_masters_follow_float32_parameters(make: Any) -> None:
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    wide = [nn.Parameter(p.detach().bfloat16().float()) for p in parameters()]
    reference = make(wide, **options)
    kinds = []
    for master in ("float32", "split"):
        params = parameters(torch.bfloat16)
        kinds.append((params, make(params, master=master, **options)))
    for step in range(4):
        for params, optimizer in kinds:
            take_steps(optimizer, params, range(step, step + 1))
        for param, other in zip(wide, kinds[0][0], strict=True):
            assert other.grad is not None
            param.grad = other.grad.float()
        reference.step()
    (rounded, by_master), (split, by_remainder) = kinds
    for param, a, b in zip(wide, rounded, split, strict=True):
        assert torch.equal(by_master.state[a]["master"], param)
        assert torch.equal(a, param.bfloat16())
        assert torch.equal(formats.join_master(b, by_remainder.state[b]["remainder"]), param)


@pytest.mark.parametrize("make", [AdamW, SGD, Lion])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"])
def test_narrow_states_train_as_well_as_float32_ones(make: Any, state_dtype: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(256, 40, generator=generator)
    target = (data @ torch.randn(40, 3, generator=generator)).tanh()
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if make is SGD else {"lr": 3e-3}
    losses = []
    for dtype in (torch.float32, state_dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 3))
        optimizer = make(model.parameters(), state_dtype=dtype, **options)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (model(data) - target).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.1 * target.square().mean().item()  # it learnt something
    assert losses[1] < 1.25 * losses[0]


def test_small_changes_of_bfloat16_parameters_survive_on_average_when_rounded_stochastically() -> None:
    moved = {}
    for stochastic in (True, False):
        param = nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
        optimizer = SGD([param], lr=1.0, stochastic_rounding=stochastic)
        for _ in range(50):
            param.grad = torch.full_like(param, 2.0**-12)  # a sixteenth of the distance to the next bfloat16 below 1
            optimizer.step()
        moved[stochastic] = 1.0 - param.detach().double().mean().item()
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(50 * 2.0**-12, rel=0.02)


@pytest.mark.parametrize("master", [None, "split"])
def test_small_changes_of_bfloat16_states_survive_on_average_where_parameters_are_not_rounded(master: Any) -> None:
    means = {}
    for stochastic in (True, False):
        param = nn.Parameter(torch.ones(10_000, dtype=torch.float32 if master is None else torch.bfloat16))
        optimizer = AdamW([param], master=master, state_dtype=torch.bfloat16, stochastic_rounding=stochastic)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.state[param]["exp_avg_sq"].fill_(1.0)
        for _ in range(50):
            optimizer.step()  # takes a thousandth, half of the distance to the next bfloat16 below 1 at most
        means[stochastic] = optimizer.state[param]["exp_avg_sq"].double().mean().item()
    assert means[False] == 1.0
    assert means[True] == pytest.approx(0.999**50, rel=1e-3)


def test_the_state_takes_the_bytes_that_the_docstring_says() -> None:
    n = 256 * 40
    for state_dtype, wanted in ((torch.float32, 8.0), (torch.bfloat16, 4.0), ("8bit", 2.03125)):
        param = nn.Parameter(torch.zeros(n))
        optimizer = AdamW([param], state_dtype=state_dtype)
        param.grad = torch.zeros(n)
        optimizer.step()
        values = {k: v for k, v in optimizer.state[param].items() if k != "step"}
        assert sum(v.untyped_storage().nbytes() for v in values.values()) == wanted * n


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("make", [AdamW, SGD, Lion])
def test_a_loaded_optimizer_continues_bit_for_bit(make: Any, format_name: str) -> None:
    options = dict(FORMATS[format_name], lr=0.01)
    if make is SGD:
        options["momentum"] = 0.9
    params = parameters(torch.bfloat16)
    optimizer = make(params, **options)
    take_steps(optimizer, params, range(3))

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed_params = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = make(resumed_params, **options)
    resumed.load_state_dict(torch.load(file))
    copied_params, copied = copy.deepcopy((params, optimizer))

    for p, o in ((params, optimizer), (resumed_params, resumed), (copied_params, copied)):
        take_steps(o, p, range(3, 6))
    assert_same_bits(all_state(resumed, resumed_params), all_state(optimizer, params))
    assert_same_bits(all_state(copied, copied_params), all_state(optimizer, params))


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_states_come_back_from_their_values_as_the_same_codes_and_scales(signed: bool) -> None:
    """A block of every code, under scales of every exponent with awkward and random mantissas."""
    mantissas = torch.cat([torch.tensor([1.0, 1.0 + 2.0**-23, 1.5, 2.0 - 2.0**-23]), 1.0 + torch.rand(12)])
    scales = (torch.exp2(torch.arange(-126.0, 128.0)).outer(mantissas)).flatten()
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(scales))
    values = values_of(codes, scales, signed=signed)
    again, scales_again = blocks_of(values, signed=signed)
    assert torch.equal(scales_again, scales)
    exact = scales.repeat_interleave(256) >= 2.0**-112  # below, a code may become another of the same value
    assert torch.equal(again[exact], codes[exact])
    if signed:
        assert torch.equal(again, codes)
    assert torch.equal(values_of(again, scales, signed=signed), values)


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_blocks_of_nothing_of_tiny_values_and_of_nan_come_back(signed: bool) -> None:
    codes = torch.zeros(3 * 256 + 5, dtype=torch.uint8)
    codes[256:306] = torch.arange(50)  # less than the smallest scale, which no value has
    scales = torch.tensor([formats.SMALLEST_SCALE, formats.SMALLEST_SCALE, torch.nan, 1.0])
    codes[-1] = 127 if signed else 255
    values = values_of(codes, scales, signed=signed)
    again, scales_again = blocks_of(values, signed=signed)
    torch.testing.assert_close(scales_again, scales, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values_of(again, scales, signed=signed), values, rtol=0, atol=0, equal_nan=True)
    assert values[512:768].isnan().all()
    assert not values[:512].isnan().any()


@pytest.mark.parametrize("numel", [0, 1, (1 << 20) + 300])
def test_long_states_are_converted_piece_by_piece_to_the_same_values(numel: int) -> None:
    x = torch.randn(numel)
    codes, scales = blocks_of(x, signed=True)
    wanted = formats.quantise(x, signed=True)
    assert torch.equal(codes, wanted[0])
    assert torch.equal(scales, wanted[1])
    assert torch.equal(values_of(codes, scales, signed=True), formats.dequantise(codes, scales, signed=True))


def test_a_state_dict_has_8_bit_states_as_values_that_torch_loads() -> None:
    params = parameters()
    optimizer = AdamW(params, state_dtype="8bit")
    take_steps(optimizer, params, range(3))
    saved = optimizer.state_dict()
    assert {x.dtype for state in saved["state"].values() for x in state.values()} == {torch.float32}
    assert saved["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.uint8  # what is trained stays as it is
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(saved)
    for i, param in enumerate(params):
        held = optimizer.state[param]
        values = formats.dequantise(held["exp_avg_sq"], held["exp_avg_sq_scale"], signed=False)
        assert torch.equal(theirs.state[param]["exp_avg_sq"], values)
        assert torch.equal(saved["state"][i]["exp_avg_sq"], values)


def test_codes_and_scales_of_a_state_dict_load_as_they_are() -> None:
    params = parameters()
    optimizer = AdamW(params, state_dtype="8bit")
    take_steps(optimizer, params, range(3))
    state = {i: dict(optimizer.state[param]) for i, param in enumerate(params)}
    for wanted in ("8bit", torch.float32):
        loaded = AdamW(params, state_dtype=wanted)
        loaded.load_state_dict({**optimizer.state_dict(), "state": state})
        for param in params:
            values = [o.to_checkpoint(o.state[param])["exp_avg"] for o in (optimizer, loaded)]
            assert torch.equal(*values)


@pytest.mark.parametrize("pair", PAIRS)
def test_state_dicts_go_to_torch_and_back(pair: str) -> None:
    ours, theirs, options = PAIRS[pair]
    results = []
    for first, second in ((ours, theirs), (theirs, ours), (theirs, theirs)):
        params = parameters()
        optimizer = first(params, **options)
        take_steps(optimizer, params, range(3))
        loaded = second(params, **options)
        loaded.load_state_dict(optimizer.state_dict())
        take_steps(loaded, params, range(3, 6))
        results.append([p.detach() for p in params])
    torch.testing.assert_close(results[0], results[2], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(results[1], results[2], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, "8bit"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, "8bit"])
def test_states_are_converted_when_a_checkpoint_has_another_format(saved: Any, wanted: Any) -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params, state_dtype=saved)
    take_steps(optimizer, params, range(3))
    loaded = AdamW(params, state_dtype=wanted)
    loaded.load_state_dict(optimizer.state_dict())
    for param in params:
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            values = []
            for o in (optimizer, loaded):
                state = o.state[param]
                x = state[name]
                if x.dtype == torch.uint8:
                    x = formats.dequantise(x, state[f"{name}_scale"], signed=signed)
                values.append(x.float())
            torch.testing.assert_close(values[1], values[0], rtol=1 / 15, atol=1e-5)
    take_steps(loaded, params, range(3, 4))
    assert {loaded.state[params[0]]["exp_avg"].dtype} == {torch.uint8 if wanted == "8bit" else wanted}


def test_a_master_is_made_where_a_checkpoint_has_none() -> None:
    params = parameters(torch.bfloat16)
    theirs = torch.optim.AdamW(params)
    take_steps(theirs, params, range(1))
    ours = AdamW(params, master="float32")
    ours.load_state_dict(theirs.state_dict())
    take_steps(ours, params, range(1, 2))
    assert ours.state[params[0]]["master"].dtype == torch.float32
    assert int(ours.state[params[0]]["step"]) == 2


# ---- DTensors --------------------------------------------------------------------------------------------------------

ROWS = [(7, 33), (2, 5), (1,), (64, 8)]  # over three ranks: uneven, an empty shard, two empty shards, even


def _dtensor_steps(options: dict[str, Any], dtype: torch.dtype, make_name: str) -> list[dict[str, Tensor]]:
    """Every parameter and its states, gathered, after three steps on row shards; the last parameter is replicated."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(*shape, generator=generator).to(dtype) for shape in ROWS]
    params = [nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in whole[:-1]]
    params.append(nn.Parameter(whole[-1]))
    optimizer = getattr(fp.optim, make_name)(params, lr=0.01, **options)
    for step in range(3):
        for i, (param, x) in enumerate(zip(params, whole, strict=True)):
            grad = gradient(x, i, step)
            param.grad = distribute_tensor(grad, mesh, [Shard(0)]) if isinstance(param, DTensor) else grad
        optimizer.step()
    result = []
    for param in params:
        entry = {"param": param.detach(), **optimizer.state[param]}
        for key, value in entry.items():
            if key != "step":
                assert isinstance(value, DTensor) == isinstance(param, DTensor)
        result.append({k: gathered(v) for k, v in entry.items()})
    return result


@pytest.mark.parametrize("make_name", ["AdamW", "SGD", "Lion"])
@pytest.mark.parametrize("format_name", [name for name in FORMATS if name != "8-bit states"])
def test_row_shards_give_the_bits_of_whole_parameters(make_name: str, format_name: str) -> None:
    options = dict(FORMATS[format_name])
    if make_name == "SGD":
        options["momentum"] = 0.9
    dtype = torch.float32 if format_name == "float32" else torch.bfloat16
    whole = run_ranks(1, _dtensor_steps, options, dtype, make_name)[0]
    for rank in run_ranks(3, _dtensor_steps, options, dtype, make_name):
        for found, wanted in zip(rank, whole, strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[k], wanted[k]) for k in wanted)


class Model(nn.Module):
    """Row-sharded parameters under torch.distributed.checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(distribute_tensor(torch.randn(7, 33, generator=generator).bfloat16(), mesh, [Shard(0)]))
        self.b = nn.Parameter(distribute_tensor(torch.randn(2, 5, generator=generator).bfloat16(), mesh, [Shard(0)]))


def _sharded_steps(model: Model, optimizer: AdamW, steps: range) -> None:
    for step in steps:
        for i, param in enumerate(model.parameters()):
            mesh = param.device_mesh  # type: ignore[attr-defined]
            whole = torch.empty(*param.shape, dtype=param.dtype)
            param.grad = distribute_tensor(gradient(whole, i, step), mesh, [Shard(0)])
        optimizer.step()


def _straight(options: dict[str, Any], steps: int) -> dict[str, Any]:
    model = Model()
    optimizer = AdamW(model.parameters(), lr=0.01, **options)
    _sharded_steps(model, optimizer, range(steps))
    found = {"a": model.a.detach(), **optimizer.to_checkpoint(optimizer.state[model.a])}
    return {k: gathered(v) for k, v in found.items()}


def _checkpoint(folder: str, load: bool, options: dict[str, Any]) -> dict[str, Any]:
    model = Model()
    optimizer = AdamW(model.parameters(), lr=0.01, **options)
    if load:
        state = {"optimizer": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    _sharded_steps(model, optimizer, range(3, 5) if load else range(3))
    if not load:
        state = {"optimizer": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}
        dcp.save(state, checkpoint_id=folder)
        return {}
    found = {"a": model.a.detach(), **optimizer.to_checkpoint(optimizer.state[model.a])}
    return {k: gathered(v) for k, v in found.items()}


def _load_8_bit(folder: str) -> dict[str, Tensor]:
    """What the next step reads, whole."""
    model = Model()
    optimizer = AdamW(model.parameters(), state_dtype="8bit")
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    saved = {name: gathered(state["optimizer"]["state"]["a"][name]) for name in ("exp_avg", "exp_avg_sq")}
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    held = optimizer.to_checkpoint(optimizer.state[model.a])
    return {**{f"saved {name}": x for name, x in saved.items()}, **{k: gathered(v) for k, v in held.items()}}


def test_8_bit_states_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    options = FORMATS["8-bit states"]
    run_ranks(2, _checkpoint, str(tmp_path), False, options)
    for world in (1, 2, 3):
        loaded = run_ranks(world, _load_8_bit, str(tmp_path))[0]
        assert int(loaded["step"]) == 3
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            shards = loaded[f"saved {name}"].chunk(world)  # every rank cuts blocks of its rows
            wanted = torch.cat([values_of(*blocks_of(x, signed=signed), signed=signed) for x in shards])
            assert torch.equal(loaded[name], wanted)
            assert torch.equal(loaded[name], loaded[f"saved {name}"]) == (world == 2)
    straight = run_ranks(2, _straight, options, 5)[0]
    resumed = run_ranks(2, _checkpoint, str(tmp_path), True, options)[0]
    assert all(torch.equal(resumed[name], x) for name, x in straight.items())


@pytest.mark.parametrize("format_name", ["bfloat16 states", "float32 master", "split master"])
def test_distributed_checkpoints_load_on_another_number_of_ranks(tmp_path: Path, format_name: str) -> None:
    options = FORMATS[format_name]
    run_ranks(2, _checkpoint, str(tmp_path), False, options)
    same, more = (run_ranks(world, _checkpoint, str(tmp_path), True, options) for world in (2, 3))
    assert int(same[0]["step"]) == 5
    for rank in more:
        assert all(torch.equal(rank[k], same[0][k]) for k in same[0])
    assert more[0]["exp_avg"].dtype == options.get("state_dtype", torch.float32)


def _partial_gradient() -> str:
    mesh = init_device_mesh("cpu", (1,))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = AdamW([param])
    param.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    with pytest.raises(ValueError, match="redistribute the gradient first") as failure:
        optimizer.step()
    return str(failure.value)


def test_a_gradient_of_other_placements_is_refused() -> None:
    assert "Partial" in run_ranks(1, _partial_gradient)[0]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda p: AdamW(p, lr=-1.0), ValueError, "lr must not be negative, got -1.0"),
        (lambda p: AdamW(p, betas=(0.9, 1.5)), ValueError, r"betas must be in \[0, 1\)"),
        (lambda p: AdamW(p, master="bf16"), ValueError, "master must be one of"),
        (lambda p: AdamW(p, state_dtype=torch.float16), ValueError, "state_dtype must be one of"),
        (lambda p: AdamW(p, seed=-1), ValueError, "seed must be in"),
        (lambda p: SGD(p, nesterov=True), ValueError, "nesterov needs momentum > 0"),
        (lambda p: Lion([nn.Parameter(torch.zeros(1, dtype=torch.float64))]), TypeError, "float64"),
        (
            lambda p: AdamW([nn.Parameter(torch.zeros(1, dtype=torch.float16))], master="split"),
            TypeError,
            "use master='float32' for float16",
        ),
    ],
)
def test_wrong_options_are_named_at_construction(make: Make, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(parameters())


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="does not take sparse gradients"):
        optimizer.step()
