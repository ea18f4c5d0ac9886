"""Parameters gathered as 8-bit codes: equal bits on all ranks and in all stages, exact masters, and what travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fastpar as fp
from fastpar.comm import BlockWire, CastWire, Communicator, DelayedScalingWire, record, shard_range
from tests.dist import run_ranks
from tests.models import VOCAB, build_model
from tests.zero.zero_ranks import assert_same, batch, optimizer_values, whole_of

LR = 0.05
SMALL = {"num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 34, "num_attention_heads": 4}
WIRES = {
    "int8": BlockWire("int8", 64),
    "fp8": BlockWire("float8_e4m3fn", 64),
    "delayed": DelayedScalingWire(),
    "recent": DelayedScalingWire("float8_e5m2", amax_history_len=2, amax_compute_algo="most_recent", margin=1),
}


class Net(nn.Module):
    """Rows that do not divide, fewer rows than ranks, matrices of very different sizes, a norm and biases."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.twice = nn.Linear(13, 13, bias=False)
        self.last = nn.Linear(13, 2)
        with torch.no_grad():
            self.twice.weight.mul_(30.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        x = torch.tanh(self.twice(x))
        return self.last(torch.tanh(self.twice(x)))


def quantised(name: str, value: Tensor, size: int, dtype: torch.dtype, scale: float) -> Tensor:
    """What every rank computes with, in float64 but for the codes: rank by rank, the rows in blocks or as one."""
    wire, x = WIRES[name], value.to(dtype)
    found = torch.empty_like(x)
    for rank in range(size):
        lo, hi = shard_range(x.shape[0], size, rank)
        rows = x[lo:hi].reshape(-1)
        if rows.numel() == 0:
            continue
        if isinstance(wire, BlockWire):
            codes = wire.codes
            of_rows = codes.dequantize_in_torch(
                codes.quantize_in_torch(rows, [rows.numel()], seed=None, residual=None), [rows.numel()]
            )
        else:
            limit = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[wire.format]
            step = torch.tensor(scale, dtype=torch.float32)
            if not scale > 0:
                step = rows.float().abs().amax() / limit
            codes8 = (rows.float() * step.reciprocal()).clamp(-limit, limit).to(getattr(torch, wire.format))
            of_rows = codes8.float() * step
        found[lo:hi] = of_rows.to(dtype).view(hi - lo, *x.shape[1:])
    return found


def train_plain(name: str, size: int, dtype: torch.dtype, steps: int, max_norm: float | None) -> dict[str, Tensor]:
    """One process: forward and backward with the quantised weights, SGD on float64 masters, scales by hand."""
    model, wire = Net(), WIRES[name]
    masters = {key: p.detach().clone() for key, p in model.named_parameters()}
    model.to(dtype)
    amaxes: dict[str, list[float]] = {}
    for step in range(steps):
        for key, p in model.named_parameters():
            if p.ndim < 2:
                p.data = masters[key].to(dtype)
                continue
            scale = 0.0
            if isinstance(wire, DelayedScalingWire):
                seen = amaxes.setdefault(key, [])
                used = seen[-wire.amax_history_len :]
                amax = (used[-1] if wire.amax_compute_algo == "most_recent" else max(used)) if used else 0.0
                limit = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[wire.format]
                scale = (torch.tensor(amax, dtype=torch.float32) * (2.0**wire.margin / limit)).item()
                seen.append(masters[key].to(dtype).float().abs().amax().item())
            p.data = quantised(name, masters[key], size, dtype, scale)
        total = {key: torch.zeros_like(p, dtype=torch.float32) for key, p in model.named_parameters()}
        for rank in range(size):
            model.zero_grad()
            x, y = batch(step, 0, rank)
            nn.functional.mse_loss(model(x.to(dtype)).float(), y).backward()
            for key, p in model.named_parameters():
                assert p.grad is not None
                total[key] += p.grad.float()
        mean = {key: x / size for key, x in total.items()}
        factor = 1.0
        if max_norm is not None:
            norm = torch.cat([x.double().flatten() for x in mean.values()]).norm()
            factor = min(1.0, max_norm / norm.item())
        for key, x in mean.items():
            masters[key] -= LR * factor * x
    return masters


def start(stage: int, name: str | None, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    model = Net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    comm = Communicator(dist.group.WORLD, transport=options.pop("transport", "auto"))
    if stage == 3:
        options.setdefault("persistent_share", 0.0)
    if name is not None:
        options.setdefault("param_wire", WIRES[name])
    precision = None if dtype == torch.float32 else fp.Precision.bf16()
    zero = fp.zero.shard(model, optimizer, group=comm, stage=stage, precision=precision, **options)
    return model, optimizer, zero, comm


def train(run: Any, steps: range) -> list[float]:
    model, optimizer, _, comm = run
    losses = []
    for step in steps:
        x, y = batch(step, 0, comm.rank)
        loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def computed_with(run: Any) -> dict[str, Tensor]:
    """The parameters that a forward reads."""
    model, _, zero, _ = run
    if zero.stage == 3:
        model.unshard()
    found = {key: p.detach().clone() for key, p in model.named_parameters()}
    if zero.stage == 3:
        model.reshard()
    return found


def check_training(name: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    found = []
    for stage in (1, 2, 3):
        run = start(stage, name, dtype, **options)
        found.append((train(run, range(4)), optimizer_values(run[2]), computed_with(run)))
        run[2].detach()
    return found


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("size", [2, 3])
def test_all_stages_train_as_one_process_with_quantised_weights_does(name: str, size: int) -> None:
    for dtype, options in ((torch.float32, {}), (torch.bfloat16, {"max_norm": 0.5, "transport": "torch"})):
        if dtype == torch.bfloat16 and size == 3:
            continue
        expected = train_plain(name, size, dtype, 4, options.get("max_norm"))
        ranks = run_ranks(size, check_training, name, dtype, options)
        _, masters, weights = ranks[0][0]
        tolerance = 3e-5  # the order of sums, and a code that falls on the other side of a tie for it
        if dtype == torch.bfloat16 or name == "recent":
            tolerance = 5e-3  # 16-bit gradients; steps of 2 bits
        for key, value in expected.items():
            torch.testing.assert_close(masters[key], value, rtol=tolerance, atol=tolerance, msg=key)
        for stages in ranks:
            for losses, of_stage, weights_of_stage in stages:
                assert_same(of_stage, masters, dtype)
                assert_same(weights_of_stage, weights, dtype)
                assert losses == stages[0][0]


def check_bytes(stage: int, name: str | None, dtype: torch.dtype) -> int:
    run = start(stage, name, dtype, max_norm=1.0)
    train(run, range(2))
    with record() as sent:
        train(run, range(2, 3))
    run[2].detach()
    return sum(entry.nbytes for entry in sent if entry.op == "all_gather")


def words(count: int, per: int) -> int:
    """Bytes of a part of so many elements, with a scale for each `per` of them."""
    return -(-(4 * -(-count // per) + count) // 8) * 8 if count else 0


@pytest.mark.parametrize("name", ["int8", "delayed"])
def test_a_gather_sends_a_byte_an_element_and_its_scales(name: str) -> None:
    rows, per = {"first": (13, 7), "twice": (13, 13), "last": (2, 13)}, 64 if name == "int8" else 1 << 30
    for stage, times in ((1, 1), (3, 2)):
        found = run_ranks(2, check_bytes, stage, name, torch.bfloat16)
        exact = run_ranks(2, check_bytes, stage, None, torch.bfloat16)
        coded = sum(
            words((shard_range(count, 2, rank)[1] - shard_range(count, 2, rank)[0]) * width, per)
            for count, width in rows.values()
            for rank in range(2)
        )
        matrices = 2 * sum(count * width for count, width in rows.values())
        for mine, plain in zip(found, exact, strict=True):
            # Ring algorithms: a rank sends half of what is gathered by two.
            assert plain - mine == times * (matrices - coded) / 2


def save(folder: str, stage: int, name: str, dtype: torch.dtype) -> Any:
    run = start(stage, name, dtype)
    train(run, range(5))
    dcp.save({"training": run[2]}, checkpoint_id=folder)
    saved = optimizer_values(run[2])
    train(run, range(5, 8))
    return saved, optimizer_values(run[2])


def load(folder: str, stage: int, name: str | None, dtype: torch.dtype) -> Any:
    run = start(stage, name, dtype, seed=1)
    train(run, range(3))  # other values, another history
    dcp.load({"training": run[2]}, checkpoint_id=folder)
    loaded = optimizer_values(run[2])
    train(run, range(5, 8))
    return loaded, optimizer_values(run[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_has_the_exact_masters_and_goes_on_with_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    for saving in (1, 3):
        folder = str(tmp_path / f"of stage {saving}")
        before, after = run_ranks(2, save, folder, saving, "delayed", dtype)[0]
        for loading in (1, 2, 3):
            for loaded, end in run_ranks(2, load, folder, loading, "delayed", dtype):
                assert_same(loaded, before, (saving, loading))
                assert_same(end, after, (saving, loading))
        for size, name in ((3, "delayed"), (2, None)):
            for loaded, _ in run_ranks(size, load, folder, 2, name, dtype):
                assert_same(loaded, before, (size, name))


def check_written(stage: int) -> Any:
    """Somebody writes to parameters between steps: to one element, and to all."""
    run = start(stage, "int8", seed=1)
    train(run, range(2))
    model, _, zero, comm = run
    exact = optimizer_values(zero)
    if stage < 3:  # in stage 3 modules show the exact rows
        with torch.no_grad():
            model.twice.weight[0, 0] = exact["twice.weight"][0, 0] = 5.0
    zero._look_around()
    after_one = optimizer_values(zero)
    other = {key: p.detach().clone() for key, p in Net(2).named_parameters()}
    shown = model.state_dict()
    for key, x in shown.items():
        lo, hi = shard_range(len(x), comm.size, comm.rank)
        local = getattr(x, "_local_tensor", x)
        local.copy_(other[key] if local is x else other[key][lo:hi])
    model.load_state_dict(shown)
    zero._look_around()
    after_all = optimizer_values(zero)
    comm.barrier()
    train(run, range(2))
    found = exact, after_one, other, after_all, optimizer_values(zero)
    zero.detach()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_follow_what_is_written_to_parameters_and_keep_the_rest_exact(stage: int) -> None:
    ranks = run_ranks(2, check_written, stage)
    for exact, after_one, other, after_all, end in ranks:
        assert_same(after_one, exact)
        assert_same(after_all, other)
        assert_same(end, ranks[0][4])


def check_saturation() -> Any:
    run = start(3, "delayed")
    model, _, zero, comm = run
    train(run, range(2))
    none = zero.saturated
    with torch.no_grad():
        model.first.weight._local_tensor.mul_(4.0)
    exact = whole_of(model.first.weight.detach())
    comm.barrier()
    held = computed_with(run)["first.weight"]
    saturated = zero.saturated
    train(run, range(2, 4))  # rolls
    recovered = (computed_with(run)["first.weight"] - whole_of(model.first.weight.detach())).abs().max().item()
    assert zero.saturated["first.weight"] >= saturated["first.weight"]
    zero.detach()
    return none, saturated, exact, held, recovered


def test_what_outgrows_its_scale_is_counted_and_the_next_scale_reaches_it() -> None:
    first, second = run_ranks(2, check_saturation)
    none, saturated, exact, held, recovered = first
    assert none == {}
    assert set(saturated) == {"first.weight"}
    limit = held.abs().max()
    beyond = int((exact.abs() > limit * 464 / 448).sum())
    assert beyond == saturated["first.weight"] + second[1]["first.weight"] > 0
    assert recovered <= exact.abs().max().item() / 16  # nothing is cut off any more


def check_loaded(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    """Weights that are fifty times as large as those that were gathered before, loaded into the model."""
    run = start(stage, "delayed")
    model, _, zero, comm = run
    train(run, range(1))
    loaded = {name: value * 50 for name, value in Net(7).state_dict().items()}
    sharded = model.state_dict()
    model.load_state_dict({name: like_at_rest(value, sharded[name]) for name, value in loaded.items()})
    comm.barrier()
    with torch.no_grad():
        model(batch(1, 0, comm.rank)[0])
    found, saturated = computed_with(run), zero.saturated
    model, optimizer, zero, comm = run
    model(batch(1, 0, comm.rank)[0]).sum().mul(0.0).backward()  # a step that changes nothing
    optimizer.step()
    again = computed_with(run)
    zero.detach()
    exact = {name: loaded[name] for name in found}
    return exact, found if stage == 3 else again, saturated


def like_at_rest(value: Tensor, like: Tensor) -> Tensor:
    """`value` laid out as `like` is: a DTensor in stage 3."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements)


@pytest.mark.parametrize("stage", [1, 3])
def test_loaded_weights_are_scaled_by_what_they_are(stage: int) -> None:
    for exact, found, saturated in run_ranks(2, check_loaded, stage):
        assert saturated == {}
        for name, value in found.items():
            assert (value - exact[name]).abs().max() <= exact[name].abs().max() / 16  # a step of e4m3 at its largest


class Grown(nn.Module):
    """A matrix of zeros, as adapters begin with, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(7, 6, bias=False).requires_grad_(False)
        self.zeros = nn.Linear(6, 5, bias=False)
        nn.init.zeros_(self.zeros.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.zeros(self.frozen(x))


def check_grown(stage: int) -> Any:
    comm = Communicator(dist.group.WORLD)
    model = Grown()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"persistent_share": 0.0} if stage == 3 else {}
    wire = DelayedScalingWire(margin=2)
    zero = fp.zero.shard(model, optimizer, group=comm, stage=stage, param_wire=wire, **options)
    for step in range(4):
        if step == 2:
            model.frozen.requires_grad_()
        (model(batch(step, 0, comm.rank)[0]) - 1.0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = computed_with((model, optimizer, zero, comm))
    saturated, exact = zero.saturated, optimizer_values(zero)
    zero.detach()
    if stage == 3:  # the model has what it has been trained to
        assert_same({key: p.detach() for key, p in model.named_parameters()}, exact)
    return found, exact, saturated


@pytest.mark.parametrize("stage", [1, 3])
def test_a_matrix_that_begins_with_zeros_and_one_that_is_trained_later_are_scaled_by_what_they_are(stage: int) -> None:
    ranks = run_ranks(2, check_grown, stage)
    for found, exact, saturated in ranks:
        assert_same(found, ranks[0][0])
        assert set(exact) == {"frozen.weight", "zeros.weight"}
        assert saturated == {}  # a margin of 2 is room to grow to four times of what was
        for key, value in exact.items():
            torch.testing.assert_close(found[key], value, rtol=1 / 16, atol=1e-5, msg=key)


def check_offload(offload: str | None) -> Any:
    found = []
    for stage in (1, 3):
        run = start(stage, "delayed", offload=offload)
        train(run, range(4))
        found.append((computed_with(run), run[2].expected_memory()["parameters"]))
        run[2].detach()
    return found


def test_masters_may_be_in_the_host_s_memory_or_in_a_file(tmp_path: Path) -> None:
    expected = run_ranks(2, check_offload, None)
    for offload in ("cpu", f"nvme:{tmp_path}"):
        for ranks, theirs in zip(run_ranks(2, check_offload, offload), expected, strict=True):
            for (found, _), (wanted, _) in zip(ranks, theirs, strict=True):
                assert_same(found, wanted, offload)


def check_choice() -> Any:
    seen = []

    def choose(name: str, parameter: nn.Parameter) -> Any:
        seen.append(name)
        return WIRES["int8"] if name in ("twice.weight", "norm.bias") else None

    found = []
    for stage in (2, 3):
        run = start(stage, None, param_wire=choose)
        exact = {key: p.detach().clone() for key, p in Net().named_parameters()}
        weights = computed_with(run)
        found.append({key for key, x in weights.items() if not torch.equal(x, exact[key])})
        run[2].detach()
    return found, seen


def test_a_function_chooses_what_travels_how() -> None:
    for found, seen in run_ranks(2, check_choice):
        assert found == [{"twice.weight"}] * 2  # the bias is zero, which codes have exactly
        assert seen == [key for key, _ in Net().named_parameters()] * 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stage": 0, "param_wire": BlockWire()}, ValueError, "stages 1 to 3"),
        ({"param_wire": BlockWire(rounding="stochastic")}, ValueError, "rounding='nearest'"),
        ({"param_wire": BlockWire(error_feedback=True)}, ValueError, "error_feedback=False"),
        ({"param_wire": CastWire(torch.bfloat16)}, TypeError, "param_wire must be"),
        ({"param_wire": "int8"}, TypeError, "param_wire must be"),
        ({"param_wire": DelayedScalingWire}, TypeError, "DelayedScalingWire"),
        ({"param_wire": lambda name, parameter: 8}, TypeError, "first.weight"),
        ({"param_wire": BlockWire(), "offload": "cpu+parameters"}, ValueError, "offload"),
        ({"wire": DelayedScalingWire()}, TypeError, "param_wire="),
    ],
)
def test_shard_refuses_wires_that_do_not_fit(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(error, match=text):
        fp.zero.shard(model, optimizer, **{"group": Communicator(None), "stage": 3} | options)
    assert list(optimizer.param_groups[0]["params"]) == list(model.parameters())


def test_shard_refuses_to_quantise_float64() -> None:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match=r"first.weight.*float64"):
        fp.zero.shard(model, optimizer, group=Communicator(None), stage=3, param_wire=lambda *_: BlockWire())


def check_tensor_parallel() -> Any:
    mesh = fp.init_mesh(dp_shard=2, tp=2, device="cpu")
    model = fp.parallelize(build_model("example", torch.float32, 0, **SMALL), mesh, gather_logits=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=3, param_wire=DelayedScalingWire(), max_norm=1.0)
    for step in range(3):
        ids = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = zero.state_dict()
    amax = {key: whole_of(x).abs().max().item() for key, x in state["model"].items()}
    found = {key: x.clone() for key, x in state["amax_history"].items()}, amax
    zero.detach()
    mesh.close()
    return found


def test_tensor_parallel_ranks_have_one_history() -> None:
    ranks = run_ranks(4, check_tensor_parallel)
    for history, amax in ranks:
        assert len(history) > 8
        assert_same(history, ranks[0][0])
        for key, values in history.items():
            assert values[:2].tolist() == pytest.approx([amax[key]] * 2, rel=0.2)  # of two steps before: whole tensors
