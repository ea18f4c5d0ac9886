"""What is launched beside a kernel that waits, in a capture, and on several streams."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import ops
from fastpar.comm.symmetric.buffer import virtual_ranks
from fastpar.kernels import attention_steps, kept_tables, optimizer, square_sum
from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer
from fastpar.kernels.overlap_gemm_calls import COPY_PROGRAMS, PUSH_PROGRAMS, AllGatherGemm, GemmReduce
from fastpar.ops import _backends
from fastpar.ops.optimizer import Step, adamw_step, run_adamw
from fastpar.optim import AdamW
from fastpar.tensor.dropout import LayoutDropout
from tests.rehearsal import device


@pytest.fixture(scope="module")
def buffer() -> OverlapBuffer:
    return OverlapBuffer(virtual_ranks(2, 1 << 20, "cuda")[0], flag_capacity=64)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(32, 32, device="cuda"), torch.ones(16, 32, device="cuda")


@pytest.mark.parametrize(("transport", "free"), [("kernel", PUSH_PROGRAMS), ("copy", COPY_PROGRAMS)])
def test_a_gemm_that_waits_leaves_multiprocessors_to_who_sends(buffer: Any, transport: str, free: int) -> None:
    call = AllGatherGemm(*operands(), buffer=buffer, transport=transport)
    assert call.num_programs == device.MULTIPROCESSORS - free
    assert buffer.stream.priority < 0  # what is sent goes before the GEMM


def test_a_gemm_and_the_sums_beside_it_fit_the_device_together(buffer: Any) -> None:
    call = GemmReduce(*operands(), buffer=buffer, replicate=True)
    assert call.num_programs + call.reduce_programs <= device.MULTIPROCESSORS


# ---- the optimizer's tables


def columns() -> optimizer.Columns:
    x = torch.ones(8, device="cuda")
    addresses = ((x.data_ptr(),), (x.data_ptr(),), *[()] * 6)
    return optimizer.Columns(torch.device("cuda", 0), ((x.dtype,), (x.dtype,), ()), (), addresses, (8,), ())


def capture(monkeypatch: pytest.MonkeyPatch, is_capturing: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)


def test_a_table_made_in_a_capture_is_the_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy runs when the graph is replayed; an eager step before that would read what is not there."""
    tables, wanted = optimizer.Tables(), columns()
    capture(monkeypatch, True)
    captured = tables.find(wanted)
    capture(monkeypatch, False)
    eager = tables.find(wanted)
    assert eager is not captured
    assert tables.find(wanted) is eager
    capture(monkeypatch, True)
    assert tables.find(wanted) is eager  # it was there before: the graph may read it


# Kept tables, as something that reads the same one whenever it is called.
READERS = {
    "optimizer": lambda: partial(optimizer.Tables().find, columns()),
    "square_sum": lambda: partial(square_sum._table, [torch.ones(8, device="cuda")]),
    "attention_steps": lambda: partial(
        attention_steps.HostTables().steps,
        torch.tensor([[0, 4, 0, 4, -3, 0]]),
        None,
        attention_steps.StepShape(4, 2, 2),
        torch.device("cuda", 0),
    ),
    "attention": lambda: partial(attention_steps.HostTables().on, torch.device("cuda", 0), torch.arange(8)),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_stream_that_did_not_copy_a_table_waits_for_it_and_the_allocator_knows(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Else a table that is dropped from the kept ones is another tensor's memory while a kernel reads it."""
    uploads: list[kept_tables.TableUpload] = []
    waits: list[Any] = []
    told: list[Any] = []
    make = kept_tables.upload
    monkeypatch.setattr(kept_tables, "upload", lambda *arguments: uploads.append(make(*arguments)) or uploads[-1])
    monkeypatch.setattr(device.Event, "wait", lambda self, stream=None: waits.append((self, stream)))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: told.append((x.data_ptr(), stream)))
    monkeypatch.delattr(device.Event, "query")  # asking could break a capture that another thread has begun
    read = READERS[kind]()
    one = read()
    read()
    assert waits == told == []
    assert len(uploads) == (2 if kind == "optimizer" else 1)  # rows, and which program is whose
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert read() is one
    assert sorted(map(id, (event for event, _ in waits))) == sorted(id(table.event) for table in uploads)
    assert sorted(address for address, _ in told) == sorted(table.there.data_ptr() for table in uploads)
    assert {stream for _, stream in (*waits, *told)} == {other}


def test_a_capture_is_asked_of_the_device_that_is_launched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is made while another device is the current one is the graph's alone all the same."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: torch.cuda.current_device() == 1)
    tables, there = attention_steps.HostTables(), torch.device("cuda", 1)
    assert tables.on(there, torch.arange(8)) is not tables.on(there, torch.arange(8))
    here = torch.device("cuda", 0)
    with torch.cuda.device(1):
        assert tables.on(here, torch.arange(8)) is tables.on(here, torch.arange(8))


def test_one_thread_at_a_time_changes_the_kept_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward has a thread for every device, and all of them have the same ones."""
    inside: list[int] = []
    most: list[int] = []
    make = kept_tables.upload

    def slow(*arguments: Any) -> kept_tables.TableUpload:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return make(*arguments)

    monkeypatch.setattr(kept_tables, "upload", slow)
    tables = attention_steps.HostTables()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda n: tables.on(torch.device("cuda", n % 2), torch.arange(8)), range(4)))
    assert most == [1, 1]
    assert [x.device.index for x in found] == [0, 1, 0, 1]


def test_hyperparameters_reach_kernels_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles another kernel for the int 1, with that 1 folded in, and another for ints."""
    found: list[Any] = []
    monkeypatch.setattr(optimizer, "launch", lambda *arguments, **options: found.append(arguments))
    tensors = [[torch.ones(8, device="cuda")] for _ in range(3)]
    numbers: tuple[Any, ...] = ([], [], [], None, None, [], [], 1, 1, 0, 0, 1, False, True)
    optimizer.sgd_step(tensors[0], tensors[1], [tensors[2][0]], *numbers)
    assert all(isinstance(number, float) for number in found[0][10])
    assert isinstance(found[0][5], float)


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ({"params", "grads", "states"}, "outputs[0] must be on the device of params[0], cpu, got cuda:0"),
        ({"states"}, "exp_avgs[1] must be on the device of params[0], cuda:0, got cpu"),
        ({"outputs"}, "outputs[0] must be on the device of params[0], cuda:0, got cpu"),
        ({"grad_factor"}, "grad_factor must be on the device of params[0], cuda:0, got cpu"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "+".join(sorted(value)),
)
def test_a_step_on_tensors_of_two_devices_is_refused_by_name(host: set[str], text: str) -> None:
    """As `fastpar.optim` calls it, without checks of shapes: kernels would take the address for one of the device."""
    where = {
        name: "cpu" if name in host else "cuda" for name in ("params", "grads", "states", "outputs", "grad_factor")
    }
    params, grads = ([torch.ones(8, device=where[name]) for _ in range(2)] for name in ("params", "grads"))
    moments = [[torch.zeros(8, device=device) for device in ("cuda" if len(host) == 1 else "cpu", where["states"])]] * 2
    outputs = [torch.zeros(8, device=where["outputs"], dtype=torch.bfloat16), None]
    factor = torch.ones((), device=where["grad_factor"])
    step = Step(params, grads, moments, ((), ()), factor, None, outputs, None, None, ("exp_avgs", "exp_avg_sqs"))
    with pytest.raises(ValueError, match=re.escape(f"adamw_step: {text}")):
        run_adamw(step, 1, 0.1, (0.9, 0.999), 1e-8, 0.0)
    assert params[0].tolist() == [1.0] * 8


@pytest.mark.parametrize("where", ["cpu", "cuda:1"])
def test_a_tensor_elsewhere_in_a_known_set_is_refused(where: str) -> None:
    lists = [[torch.ones(8, device="cuda") for _ in range(3)] for _ in range(4)]
    adamw_step(*lists, step=1, lr=0.1)
    lists[2][1] = lists[2][1].to(where)
    with pytest.raises(
        ValueError, match=re.escape(f"exp_avgs[1] must be on the device of params[0], cuda:0, got {where}")
    ):
        adamw_step(*lists, step=1, lr=0.1)
    lists[2][1] = lists[2][1].to("cuda:0")
    with pytest.raises(ValueError, match=f"step_tensor must be on the device of params.0., cuda:0, got {where}"):
        adamw_step(*lists, step=torch.ones((), device=where), lr=0.1)


# ---- numbers of the host, and other devices


def test_what_counts_or_draws_on_the_host_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would have the number of the step, or the mask, of the capture."""
    param = torch.nn.Parameter(torch.ones(8, device="cuda"))
    param.grad = torch.ones_like(param)
    step, dropout = AdamW([param], lr=0.1), LayoutDropout(0.5)
    capture(monkeypatch, True)
    with pytest.raises(RuntimeError, match=r"AdamW.step\(\) counts steps on the host, .*adamw_step with step="):
        step.step()
    assert param.tolist() == [1.0] * 8
    with pytest.raises(RuntimeError, match="the seed of dropout is drawn on the host, which cannot be in a CUDA graph"):
        dropout(torch.ones(8, device="cuda"))
    capture(monkeypatch, False)
    step.step()
    assert dropout.eval()(param) is param


def test_a_flag_is_waited_for_on_the_device_that_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would read it before it has come where that is not the current device."""
    recorded: list[int | None] = []
    monkeypatch.setattr(device.Stream, "record_event", lambda self: recorded.append(self.device.index))
    monkeypatch.setattr(device.Event, "record", lambda self: recorded.append(torch.cuda.current_device()))
    param = torch.nn.Parameter(torch.ones(8, device="cuda:1"))
    param.grad, step = torch.ones_like(param), AdamW([param], lr=0.1)
    step.found_inf = torch.zeros((), device="cuda:1")
    recorded.clear()
    step.step()
    assert recorded[-1] == 1


# ---- fastpar doctor


def test_the_doctor_uses_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpar.doctor import installation

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert [finding.status for finding in installation.check_cuda()] == ["ok"]
    used: list[torch.device] = []
    monkeypatch.setattr(
        installation, "_use_device", lambda where: used.append(where) or ("wrong" if where.index else "")
    )
    (finding,) = installation.check_cuda()
    assert [where.index for where in used] == [0, 1]
    assert finding.status == "problem"
    assert "cuda:1 does not compute: wrong" in finding.text


# ---- ops called as functions


class Ops(TorchDispatchMode):
    """The ops of fastpar that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastpar":
            self.names.add(func.name().removeprefix("fastpar::"))
        return func(*args, **(kwargs or {}))


def norm_gate_and_turn(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Results and gradients."""
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    out, h = ops.add_rms_norm(x, x, weight)
    out = ops.swiglu(ops.rms_norm(out + h, weight)).view(1, 3, 2, 16)
    out = ops.rotary_embedding(out, positions=torch.arange(3, device="cuda"))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))]


def test_ops_are_called_as_functions_unless_something_looks_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(3, 64).to("cuda"), torch.randn(64).to("cuda")
    with Ops() as seen:
        watched = norm_gate_and_turn(*inputs)
    names = {"rms_norm", "add_rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rotary_embedding"}
    assert names <= seen.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        direct = norm_gate_and_turn(*inputs)
    assert not names & {event.name.removeprefix("fastpar::") for event in profile.events() or ()}
    for mine, wanted in zip(direct, watched, strict=True):
        assert torch.equal(mine.cpu(), wanted.cpu())
    x = inputs[0].view(1, 3, 4, 16).clone()
    ops.rotary_embedding(x, positions=torch.arange(3, device="cuda"), inplace=True)
    assert x._version == 1


def test_a_device_is_asked_once_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels serve a call is looked up in every call, and by the device: they may be of two kinds."""
    asked: list[torch.device] = []
    monkeypatch.setattr(_backends, "CUDA_ARCHS", ("90a",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda x: asked.append(x) or (9 - x.index, 0))
    _backends.capability.cache_clear()
    implementation = _backends.kernels_of("cross_entropy")
    for _ in range(2):
        first, second = (implementation(torch.empty(1, device=f"cuda:{index}")) for index in (0, 1))
        assert hasattr(first, "stats_exp_")
        assert second is _backends.triton("cross_entropy")
    assert asked == [torch.device("cuda", 0), torch.device("cuda", 1)]
    _backends.capability.cache_clear()


def test_a_norms_gradient_of_a_16_bit_weight_is_rounded_where_it_is_summed() -> None:
    x, weight = (torch.randn(*s).to("cuda", torch.float16).requires_grad_() for s in ((5, 64), (64,)))
    upstream = torch.randn(5, 64).to("cuda", torch.float16)

    def gradients() -> list[torch.Tensor]:  # not of bfloat16, to which the interpreter truncates
        return [grad.cpu() for grad in torch.autograd.grad(ops.rms_norm(x, weight), (x, weight), upstream)]

    with Ops():
        watched = gradients()
    ops.rms_norm(x, weight)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = torch.autograd.grad(ops.rms_norm(x, weight), (x, weight), upstream)
    assert not {"aten::fill_", "aten::zero_", "aten::_to_copy"} & {event.name for event in profile.events() or ()}
    for mine, wanted in zip(found, watched, strict=True):
        assert mine.dtype == wanted.dtype == torch.float16
        assert torch.equal(mine.cpu(), wanted)
