"""Overlapped GEMMs in Triton where there is no GPU: in the interpreter, compiled ahead of time, and their schedules.

Compiled is what the public functions would launch with the configurations that they choose on a GPU.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.overlap_gemm_cases import MappedBuffer, create_files
from tests.triton_aot import (
    HOPPER,
    LDS_LIMIT,
    MI300,
    SHARED_LIMIT,
    Target,
    compile_launch,
    each_target,
    loops,
)
from tests.triton_interpreter import run_interpreted

triton = pytest.importorskip("triton")

from fastpar.kernels import overlap_gemm as og  # noqa: E402  (triton is optional)
from fastpar.kernels import overlap_gemm_buffer, overlap_gemm_calls, overlap_gemm_schedule  # noqa: E402
from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer  # noqa: E402
from fastpar.kernels.overlap_gemm_calls import configuration, loadable  # noqa: E402
from fastpar.kernels.overlap_gemm_schedule import (  # noqa: E402
    Tile,
    collected_tiles,
    gather_tiles,
    grouped,
    owner_tiles,
    owners_by_rows,
    owners_by_tiles,
    scatter_tiles,
)

GEMMS = {"gather_gemm_kernel", "scatter_gemm_kernel"}
WAITING = {"begin_kernel", "gather_gemm_kernel", "reduce_kernel", "collect_kernel"}
SIGNALLING = {"finish_kernel", "push_kernel", "scatter_gemm_kernel", "reduce_kernel"}


@pytest.mark.timeout(900)
def test_kernels_and_protocol_in_the_interpreter() -> None:
    run_interpreted("check_overlap_gemm.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_ranks_and_delays_in_the_interpreter() -> None:
    run_interpreted("check_overlap_gemm.py", markers="slow")


# ---- ahead of time ---------------------------------------------------------------------------------------------------


target = each_target()


def compile_calls(
    monkeypatch: pytest.MonkeyPatch, folder: Path, target: Target, shape: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Registers, spills, ... of every kernel of an all-gather and an all-reduce of shards [rows, terms]."""
    found: dict[str, dict[str, Any]] = {}

    def launch(kernel: Any, programs: int, device: torch.device, arguments: dict[str, Any]) -> None:
        found[kernel.__name__] = compile_launch(kernel, target, programs, (), arguments)

    for module in (og, overlap_gemm_buffer, overlap_gemm_calls):
        monkeypatch.setattr(module, "launch", launch)
    rows, cols, terms = shape
    nbytes = 1 << 24
    buffer = OverlapBuffer(MappedBuffer(create_files(folder, 2, nbytes), 0, nbytes), flag_capacity=64)
    x, weight, bias = (torch.zeros(s, dtype=dtype) for s in ((rows, terms), (cols, terms), (cols,)))
    config = configuration(rows, cols, dtype, torch.device("cuda"))
    og.all_gather_gemm(x, weight, bias, buffer=buffer, transport="kernel", config=config)
    og.gemm_all_reduce(x, weight, bias, buffer=buffer, config=config)
    return found


def documented_registers() -> dict[str, int]:
    """From the table in the module's docstring."""
    rows = re.findall(r"^    (\w+_kernel) +(\d+) +0 spills$", og.__doc__ or "", re.MULTILINE)
    return {kernel: int(registers) for kernel, registers in rows}


def check_hopper(name: str, usage: dict[str, Any], dtype: torch.dtype) -> None:
    ptx = usage["ptx"]
    assert usage["spills"] == 0, (name, usage["spills"])
    assert usage["shared"] <= SHARED_LIMIT
    assert usage["registers"] * usage["threads"] <= 65536
    if name in GEMMS:
        assert re.search(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x10\b", ptx), (
            "loads are not 16 bytes wide"
        )
        (inner,) = [loop for loop in loops(ptx) if ("wgmma" in loop or "fma.rn.f32" in loop) and "$L" not in loop]
        assert "sys" not in inner, "the loop over K waits or signals"
        assert ("wgmma.mma_async" in inner) == (dtype != torch.float32)
    if name in WAITING:
        # An atomic addition of 0, which newer compilers turn into a load.
        assert re.search(r"(?:ld|atom)\.global\.(?:acquire\.sys|sys\.acquire)", ptx)
    if name in SIGNALLING:
        signals = list(re.finditer(r"atom\.global\.(?:release\.sys|sys\.release)\.exch", ptx))
        assert signals
        for signal in signals:
            before = ptx[: signal.start()]
            assert before.rfind("bar.sync") > before.rfind("st.global.v"), "a signal may overtake the data"


def check_mi300(name: str, usage: dict[str, Any]) -> None:
    assembly = usage["ptx"]
    assert usage["spills"] == 0, (name, usage["spills"])
    assert usage["shared"] <= LDS_LIMIT
    assert usage["registers"] <= 512 * 256 // usage["threads"]
    if name in GEMMS:
        assert "v_mfma" in assembly
        assert re.search(r"(?:global|buffer)_load_dwordx4", assembly)
    if name in WAITING:
        assert "buffer_inv sc0 sc1" in assembly, "reads after a wait may find stale lines"
    if name in SIGNALLING:
        assert "buffer_wbl2 sc0 sc1" in assembly, "a signal may overtake the data"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((256, 512, 512), torch.bfloat16),
        ((32, 4096, 528), torch.bfloat16),  # few rows; the last block over K is not full
        pytest.param((256, 96, 512), torch.float16, marks=pytest.mark.slow),
        pytest.param((256, 64, 512), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((256, 511, 512), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((256, 512, 512), torch.float32, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spills_to_tensor_core_loops_that_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    target: Target,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    found = compile_calls(monkeypatch, tmp_path, target, shape, dtype)
    assert set(found) == WAITING | SIGNALLING
    for name, usage in found.items():
        if target == MI300:
            check_mi300(name, usage)
            continue
        check_hopper(name, usage, dtype)
        if shape == (256, 512, 512) and dtype == torch.bfloat16:
            table = documented_registers()
            assert set(table) == {"gather_gemm_kernel", "scatter_gemm_kernel", "reduce_kernel"}
            assert usage["registers"] <= table.get(name, 255), (name, usage["registers"])


@pytest.mark.timeout(600)
def test_transposed_weights_are_loaded_as_wide_as_others(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """As in a gradient of the input, dout @ weight; with columns that no block divides."""
    found: list[dict[str, Any]] = []

    def launch(kernel: Any, programs: int, device: torch.device, arguments: dict[str, Any]) -> None:
        found.append(compile_launch(kernel, target, programs, (), arguments))

    monkeypatch.setattr(og, "launch", launch)
    dout, weight = torch.zeros(256, 512, dtype=torch.bfloat16), torch.zeros(512, 4000, dtype=torch.bfloat16)
    og.gemm(dout, weight.T, config=configuration(256, 4000, torch.bfloat16, torch.device("cuda")))
    if target == HOPPER:
        check_hopper("gather_gemm_kernel", found[0], torch.bfloat16)
    else:
        check_mi300("gather_gemm_kernel", found[0])


# ---- schedules -------------------------------------------------------------------------------------------------------


def test_tiles_go_down_a_group_of_rows_then_to_the_next_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_gemm_schedule, "GROUP_M", 2)
    tiles = [(t.row, t.rows, t.col) for t in grouped(10, 5, 2, 2)]
    assert tiles == [(10, 2, 0), (12, 2, 0), (10, 2, 1), (12, 2, 1), (14, 1, 0), (14, 1, 1)]


@pytest.mark.parametrize("sizes", [[5, 5], [1, 257, 0], [0, 0, 0, 0], [64, 63, 65, 1]])
@pytest.mark.parametrize("slices", [1, 3])
def test_every_element_is_computed_once_and_by_agreement_of_all_ranks(sizes: list[int], slices: int) -> None:
    block_m, num_cols, capacity, size = 16, 3, 1000, len(sizes)
    rows = sum(sizes)
    everything = sorted((row, col) for row in range(rows) for col in range(num_cols))

    def covered(tiles: list[Tile]) -> list[tuple[int, int]]:
        return sorted((t.row + i, t.col) for t in tiles for i in range(t.rows))

    for rank in range(size):
        assert covered(gather_tiles(sizes, rank, num_cols, block_m, 32, capacity)) == everything
    by_rows = owners_by_rows(sizes, num_cols, block_m)
    by_tiles = owners_by_tiles(rows, num_cols, block_m, size)
    for owned in (by_rows, by_tiles):
        tables = [scatter_tiles(owned, rank, slices, capacity) for rank in range(size)]
        for rank, table in enumerate(tables):
            assert covered(table) == everything
            assert set(table) == set(tables[0]), "ranks disagree on which slot of which owner a tile is"
            assert set(owner_tiles(owned, rank, capacity)) == {t for t in table if t.tag // capacity == rank}
            assert sorted(collected_tiles(owned, rank, capacity)) == sorted(table)
            assert len({t.tag for t in table}) == len(table)
    counts = [len(tiles) for tiles in by_tiles]
    assert max(counts) - min(counts) <= 1


def test_own_rows_come_first_in_a_gather_and_own_tiles_last_in_a_scatter() -> None:
    sizes, capacity = [32, 32, 32], 100
    tags = [t.tag for t in gather_tiles(sizes, 1, 1, 16, 16, capacity)]
    assert tags == [-1, -1, 200, 201, 0, 1]
    owned = owners_by_rows(sizes, 1, 16)
    assert [t.tag for t in scatter_tiles(owned, 1, 1, capacity)] == [200, 201, 0, 1, 100, 101]
    assert [t.tag for t in scatter_tiles(owned, 1, 2, capacity)] == [200, 0, 100, 201, 1, 101]


def test_one_row_of_tiles_is_shared_by_all_owners() -> None:
    assert [len(tiles) for tiles in owners_by_tiles(1, 8, 64, 4)] == [2, 2, 2, 2]


# ---- operands --------------------------------------------------------------------------------------------------------


def test_operands_in_order_are_not_copied_and_others_keep_their_product() -> None:
    x = torch.randint(-2, 3, (8, 24)).float()
    for t, transposed in ((x, False), (x[:, :8], False), (x[:, 8:], True), (x.T, True), (x[:8].T, True)):
        found = loadable(t, transposed=transposed, unit=8)
        assert found.data_ptr() == t.data_ptr()
        assert found.shape == t.shape
        assert found.stride() == t.stride()
    for t in (x[:, :23], x[:, ::2], x.T, torch.ones(6, 1), torch.ones(6, 20)[:, :16]):
        found = loadable(t, unit=8)
        assert found.shape[1] == -(-t.shape[1] // 8) * 8
        assert found.stride(1) == 1
        assert torch.equal(found[:, : t.shape[1]], t)
        assert found[:, t.shape[1] :].count_nonzero() == 0


def test_blocks_do_not_depend_on_what_ranks_may_disagree_on() -> None:
    """The blocks of rows depend on the longest shard, and not on the columns, which all-gather splits unevenly."""
    cuda = torch.device("cuda")
    for rows in (1, 64, 65, 4096):
        for dtype in (torch.bfloat16, torch.float32):
            assert len({configuration(rows, cols, dtype, cuda).block_m for cols in (1, 64, 128, 129, 8192)}) == 1
            assert len({configuration(rows, cols, dtype, cuda).block_k for cols in (1, 64, 128, 129, 8192)}) == 1


# ---- the bench -------------------------------------------------------------------------------------------------------


def test_bench_figures_say_what_the_communication_costs() -> None:
    from bench.bench_overlap_gpu import figures

    def row(provider: str, kind: str, ms: float) -> dict[str, Any]:
        return {"provider": provider, "kind": kind, "ms": {"median": ms}}

    bounds = [row("communication alone", "bound", 4.0), row("GEMM alone", "bound", 10.0)]
    text = figures([row("fastpar", "fastpar", 10.4), row("plain", "torch", 14.0), *bounds, row("roof", "roof", 1.0)])
    assert re.search(r"fastpar +over max +1\.040 +hidden +90\.0 %", text)
    assert re.search(r"plain +over max +1\.400 +hidden +0\.0 %", text)
    assert "roof" not in text
    assert figures([row("fastpar", "fastpar", 1.0)]) == ""


def test_bench_refuses_what_it_cannot_measure() -> None:
    from bench.bench_overlap_gpu import cases, main

    flags = argparse.Namespace(
        dtype=["bf16"],
        link=["device", "pcie"],
        op=["gather", "reduce"],
        shapes=[(64, 8, 8)],
        virtual_ranks=[2, 4],
        graphs=True,
    )
    made = [case.describe() for case in cases(flags, 1)]
    assert len(made) == 6
    assert all(case["op"] == "gather" for case in made if case["link"] == "pcie")
    flags.virtual_ranks = [3]
    with pytest.raises(SystemExit, match="64 rows do not divide by 3 ranks"):
        cases(flags, 1)
    for arguments in (["--op", "scatter,all"], ["--shapes", "8192x2048"], ["--link", "wire"]):
        with pytest.raises(SystemExit):
            main(arguments)
