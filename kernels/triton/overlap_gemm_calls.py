"""One overlapped GEMM in phases, and what it launches; overlap_gemm.py has the functions and the protocol."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import overlap_gemm_kernels as kernels
from fastpar.kernels import overlap_gemm_schedule as schedule
from fastpar.kernels.launch import launch_named as launch
from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer, PeerTable, aligned

SLICES = 4  # parts of an owner's tiles: see schedule.scatter_tiles
REDUCE_PROGRAMS = 16  # multiprocessors that sum beside a GEMM
PUSH_PROGRAMS = 16
COPY_PROGRAMS = 2  # multiprocessors left to copies
PUSH_BLOCK = 8192
SUB_TILE = 4096  # elements of a tile that are summed at a time
MAX_STRIDE = 1 << 22  # offsets within a tile are int32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# ---- launches --------------------------------------------------------------------------------------------------------


class GemmConfiguration(NamedTuple):
    """The configuration of a GEMM: rows, columns and terms of a block, warps of a program, stages of the loads'
    pipeline."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def configuration(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> GemmConfiguration:
    """The configuration for shards of at most `rows` rows and `cols` columns. Ranks that call it alike agree on
    rows."""
    if device.type == "cpu":
        return GemmConfiguration(16 if rows <= 16 else 32, 16 if cols <= 16 else 32, 32, 4, 1)
    if dtype == torch.float32:
        return GemmConfiguration(64, 64, 32, 4, 2 if torch.version.hip else 3)
    if torch.version.hip:
        return GemmConfiguration(64 if rows <= 64 else 128, 64 if cols <= 64 else 128, 64, 8, 2)
    block_n = 64 if cols <= 64 else 128 if cols <= 128 or rows <= 64 else 256  # 64 x 256 spills
    return GemmConfiguration(64 if rows <= 64 else 128, block_n, 64, 8 if block_n == 256 else 4, 4)


def multiprocessors(device: torch.device) -> int:
    """2 for the interpreter, which runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def gather_programs(buffer: OverlapBuffer, transport: Any) -> int:
    """Programs of an all_gather_gemm, each of which fills a multiprocessor and stays until chunks of others come.

    Whoever sends those needs multiprocessors too: on a full device it would begin when the GEMM ends, which waits for
    it. So the pusher has its own; and copies, which copy engines do, have some where the driver takes kernels for the
    flags, or for all of them, as between virtual ranks on one device.
    """
    programs = multiprocessors(buffer.device)
    if not buffer.on_gpu:
        return programs
    return max(programs - (PUSH_PROGRAMS if transport == "kernel" else COPY_PROGRAMS), 1)


def gemm_options(weight: Tensor, config: GemmConfiguration) -> dict[str, Any]:
    """What all GEMM kernels are told of the weight [N, K] and the configuration."""
    cols, terms = weight.shape
    return {
        "weight": weight, "N": cols, "K": terms, "stride_n": weight.stride(0), "stride_k": weight.stride(1),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "EVEN_N": cols % config.block_n == 0, "EVEN_K": terms % config.block_k == 0, "PRECISION": "ieee",
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
    """ValueError or TypeError for what no GEMM here takes."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [M, K] and weight [N, K], not {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise TypeError(f"x and weight must both be bfloat16, float16 or float32, not {x.dtype} and {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], one for each row of the weight, not {tuple(bias.shape)}")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but the buffer is on {device}")
        if tensor is not None and max(*tensor.shape, *tensor.stride(), 1) > MAX_STRIDE and tensor.numel():
            raise ValueError(
                f"{name} {tuple(tensor.shape)} has a size or stride above {MAX_STRIDE}: tiles count in int32"
            )


def check_sizes(sizes: Any, rows: int, rank: int, size: int) -> list[int]:
    """Rows of every rank's shard; None: all have `rows`."""
    if sizes is None:
        return [rows] * size
    found = [int(n) for n in sizes]
    if len(found) != size or min(found, default=0) < 0:
        raise ValueError(f"sizes ({found}) must be a number of rows >= 0 for each of the {size} ranks")
    if found[rank] != rows:
        raise ValueError(f"sizes ({found}) say that rank {rank} has {found[rank]} rows, but its shard has {rows}")
    return found


def loadable(t: Tensor, *, transposed: bool = False, unit: int = 0) -> Tensor:
    """t [n, K] as [n, K'] with contiguous rows (or columns, with `transposed`), so that the kernels' loads are fast.

    unit  K' and the distance of rows (columns) are multiples of it; 0: of 16, which is the one divisor that Triton
          looks for in integers, and the first element at a multiple of 16 bytes. Zeros fill K up, in x and weight
          alike; they add nothing to a product.

    What is in order already is not copied. The interpreter loads elements one by one: rows are enough.
    """
    aligned_start = unit == 0 and t.device.type == "cuda"
    unit = unit or (16 if t.device.type == "cuda" else 1)
    missing = -t.shape[1] % unit
    if missing:
        return F.pad(t, (0, missing))
    for dim in (1, 0) if transposed else (1,):
        if t.stride(dim) == 1 and t.stride(1 - dim) % unit == 0 and not (aligned_start and t.data_ptr() % 16):
            return t
    return t.clone(memory_format=torch.contiguous_format)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


# ---- the calls, in phases --------------------------------------------------------------------------------------------


def _gather_table(
    buffer: OverlapBuffer, sizes: tuple[int, ...], num_cols: int, block_m: int, chunk_rows: int
) -> PeerTable:
    return buffer.table(
        schedule.gather_tiles(list(sizes), buffer.rank, num_cols, block_m, chunk_rows, buffer.flag_capacity)
    )


class AllGatherGemm:
    """One `all_gather_gemm`, in phases; arguments as there."""

    def __init__(
        self,
        x_shard: Tensor,
        weight: Any,
        bias: Any = None,
        *,
        buffer: OverlapBuffer,
        sizes: Any = None,
        transport: Any = "copy",
        chunks: int = 1,
        num_programs: int | None = None,
        config: GemmConfiguration | None = None,
    ) -> None:
        self.single = isinstance(weight, Tensor)
        self.weights = _as_list(weight)
        self.biases = _as_list(bias) if bias is not None else [None] * len(self.weights)
        if len(self.biases) != len(self.weights):
            raise ValueError(f"{len(self.weights)} weights came with {len(self.biases)} biases")
        for w, b in zip(self.weights, self.biases, strict=True):
            check_operands(x_shard, w, b, buffer.device)
        if transport not in ("copy", "kernel") and not callable(transport):
            raise ValueError(f"transport must be 'copy', 'kernel' or a function, not {transport!r}")
        if not 1 <= chunks <= buffer.flag_capacity:
            raise ValueError(f"chunks ({chunks}) must be in [1, flag_capacity ({buffer.flag_capacity})]")
        self.buffer, self.transport = buffer, transport
        self.x = loadable(x_shard).contiguous()
        self.weights = [loadable(w, transposed=True) for w in self.weights]
        self.sizes = check_sizes(sizes, x_shard.shape[0], buffer.rank, buffer.size)
        self.rows, terms = sum(self.sizes), self.x.shape[1]
        buffer.require(self.rows * terms * x_shard.element_size(), f"all_gather_gemm of {[self.rows, terms]}")
        longest = max(self.sizes)
        self.configs = [
            config or configuration(longest, w.shape[0], x_shard.dtype, buffer.device) for w in self.weights
        ]
        # All ranks must cut shards alike, and every weight's tiles must fit: all depends on `sizes` alone.
        block_m = max(c.block_m for c in self.configs)
        self.chunk_rows = max(-(-longest // chunks // block_m) * block_m, block_m)
        self.num_programs = num_programs or gather_programs(buffer, transport)

    def start(self) -> None:
        """Wait for room, and send this rank's shard to the others, on the buffer's stream."""
        buffer = self.buffer
        buffer.check()
        self.channel = buffer.next_channel()
        self.gathered = buffer.view(self.channel, (self.rows, self.x.shape[1]), self.x.dtype)
        self.launches = [self._gemm(w, b, c) for w, b, c in zip(self.weights, self.biases, self.configs, strict=True)]
        for arguments in self.launches:
            buffer.load(kernels.gather_gemm_kernel, arguments)
        if self.transport == "kernel":
            buffer.load(kernels.push_kernel, self._push_arguments())
        buffer.begin(self.channel)
        send = self._send_by_kernel if self.transport == "kernel" else self._send_by_copies
        if buffer.stream is None:
            send()
            return
        buffer.stream.wait_stream(torch.cuda.current_stream(buffer.device))  # begin has ended
        with torch.cuda.stream(buffer.stream):
            send()

    def compute(self) -> None:
        for arguments in self.launches:
            launch(kernels.gather_gemm_kernel, self.num_programs, self.buffer.device, arguments)

    def reduce(self) -> None:
        """A phase of the other calls."""

    def finish(self) -> Tensor | tuple[Tensor, ...]:
        if self.buffer.stream is not None:  # the shard has left: it may change, and the channel's epoch too
            torch.cuda.current_stream(self.buffer.device).wait_stream(self.buffer.stream)
        self.buffer.finish(self.channel)
        outs = tuple(arguments["out"] for arguments in self.launches)
        return outs[0] if self.single else outs

    def _gemm(self, weight: Tensor, bias: Tensor | None, config: GemmConfiguration) -> dict[str, Any]:
        buffer, rank = self.buffer, self.buffer.rank
        columns = schedule.num_blocks(weight.shape[0], config.block_n)
        table = buffer.keep(_gather_table, tuple(self.sizes), columns, config.block_m, self.chunk_rows)
        return {
            "x": self.x, "gathered": self.gathered, "bias": bias, "out": self.x.new_empty(self.rows, weight.shape[0]),
            **table._asdict(), "own_row": sum(self.sizes[:rank]),
            "flags": buffer.flag_views(self.channel)[0], "flag_capacity": buffer.flag_capacity,
            "state": self.channel.state, "record": buffer.record, "max_polls": buffer.max_polls,
            **gemm_options(weight, config),
        }  # fmt: skip

    def _send_by_copies(self) -> None:
        """Chunk after chunk and its flag, to rank - 1 first: rank r needs the shard of r + 1 right after its own."""
        buffer, rank = self.buffer, self.buffer.rank
        copy = self.transport if callable(self.transport) else _copy
        first = sum(self.sizes[:rank])
        chunks = range(0, self.sizes[rank], self.chunk_rows)
        for step in range(1, buffer.size):
            peer = (rank - step) % buffer.size
            shape = (self.rows, self.x.shape[1])
            target = buffer.view(self.channel, shape, self.x.dtype, rank=peer)[first : first + self.sizes[rank]]
            flags = buffer.symmetric.tensor(
                (buffer.size, buffer.flag_capacity), torch.int32, offset=self.channel.flags, rank=peer
            )
            for chunk, start in enumerate(chunks):
                rows = slice(start, start + self.chunk_rows)
                copy(target[rows], self.x[rows])
                flags[rank, chunk : chunk + 1].copy_(self.channel.state, non_blocking=True)

    def _push_arguments(self) -> dict[str, Any]:
        buffer, rank, terms = self.buffer, self.buffer.rank, self.x.shape[1]
        return {
            "x": self.x, "peers": buffer.symmetric.pointers, "state": self.channel.state, "rank": rank,
            "data_offset": self.channel.data + sum(self.sizes[:rank]) * terms * self.x.element_size(),
            "flags_offset": self.channel.flags + 4 * rank * buffer.flag_capacity,
            "num_elements": self.x.numel(), "chunk_elements": self.chunk_rows * terms,
            "num_tiles": schedule.num_blocks(self.sizes[rank], self.chunk_rows), "W": buffer.size,
            "BLOCK": PUSH_BLOCK if buffer.on_gpu else 256, "num_warps": 8,
        }  # fmt: skip

    def _send_by_kernel(self) -> None:
        programs = PUSH_PROGRAMS if self.buffer.on_gpu else 2
        launch(kernels.push_kernel, programs, self.buffer.device, self._push_arguments())


class ReducePlan(NamedTuple):
    """The tables of a `GemmReduce`."""

    num_slots: int  # the most tiles that a rank owns
    computed: PeerTable
    owned: PeerTable
    collected: PeerTable


def _reduce_plan(
    buffer: OverlapBuffer, replicate: bool, sizes: tuple[int, ...], num_cols: int, block_m: int, slices: int
) -> ReducePlan:
    """Who owns what: tiles with `replicate` (sizes: all rows), else rows (sizes: of every rank)."""
    rank, capacity = buffer.rank, buffer.flag_capacity
    if replicate:
        owned = schedule.owners_by_tiles(sizes[0], num_cols, block_m, buffer.size)
    else:
        owned = schedule.owners_by_rows(list(sizes), num_cols, block_m)
    return ReducePlan(
        max(map(len, owned)),
        buffer.table(schedule.scatter_tiles(owned, rank, slices, capacity)),
        buffer.table(schedule.owner_tiles(owned, rank, capacity)),
        buffer.table(schedule.collected_tiles(owned, rank, capacity) if replicate else []),
    )


class GemmReduce:
    """One `gemm_reduce_scatter`, or with `replicate` one `gemm_all_reduce`, in phases; arguments as there."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        buffer: OverlapBuffer,
        replicate: bool,
        sizes: Any = None,
        slices: int = SLICES,
        num_programs: int | None = None,
        reduce_programs: int | None = None,
        config: GemmConfiguration | None = None,
    ) -> None:
        check_operands(x, weight, bias, buffer.device)
        self.buffer, self.bias, self.replicate = buffer, bias, replicate
        self.x, self.weight = loadable(x), loadable(weight, transposed=True)
        rank, size, (rows, cols) = buffer.rank, buffer.size, (x.shape[0], weight.shape[0])
        if slices < 1:
            raise ValueError(f"slices ({slices}) must be at least 1")
        self.sizes = [rows] if replicate else self._shards(sizes, rows)
        self.config = config or configuration(max(self.sizes), cols, x.dtype, buffer.device)
        block_m, columns = self.config.block_m, schedule.num_blocks(cols, self.config.block_n)
        self.plan = buffer.keep(_reduce_plan, replicate, tuple(self.sizes), columns, block_m, slices)
        self.num_slots = self.plan.num_slots
        if self.num_slots > buffer.flag_capacity:
            raise ValueError(
                f"a rank would own {self.num_slots} tiles, but flag_capacity is {buffer.flag_capacity}; open the "
                "buffer with a larger one"
            )
        tile_bytes = block_m * self.config.block_n * x.element_size()
        self.part_bytes = self.num_slots * tile_bytes  # of one rank's partials, on an owner
        self.result = aligned(size * self.part_bytes)
        name = "gemm_all_reduce" if replicate else "gemm_reduce_scatter"
        needed = self.result + (rows * cols * x.element_size() if replicate else 0)
        buffer.require(needed, f"{name} of {[rows, cols]}")
        self.out = x.new_empty(rows if replicate else self.sizes[rank], cols)
        programs = multiprocessors(buffer.device)
        self.reduce_programs = reduce_programs or (min(REDUCE_PROGRAMS, programs // 2) if buffer.on_gpu else 2)
        self.num_programs = num_programs or (programs - self.reduce_programs if buffer.on_gpu else programs)

    def _shards(self, sizes: Any, rows: int) -> list[int]:
        size = self.buffer.size
        if sizes is None:
            if rows % size:
                raise ValueError(
                    f"{rows} rows do not divide by {size} ranks; say with sizes= how many rows each rank gets"
                )
            return [rows // size] * size
        found = [int(n) for n in sizes]
        if len(found) != size or min(found) < 0 or sum(found) != rows:
            raise ValueError(f"sizes ({found}) must be the rows of each of the {size} ranks, {rows} together")
        return found

    def start(self) -> None:
        """Wait for room in the owners' memory."""
        buffer = self.buffer
        buffer.check()
        self.channel = buffer.next_channel()
        flags, result_flags = buffer.flag_views(self.channel)
        self._plan(flags, result_flags)
        buffer.load(kernels.scatter_gemm_kernel, self.scatter_arguments)
        buffer.load(kernels.reduce_kernel, self.reduce_arguments)
        if self.replicate:
            buffer.load(kernels.collect_kernel, self.collect_arguments)
        buffer.begin(self.channel)
        if buffer.stream is not None:
            buffer.stream.wait_stream(torch.cuda.current_stream(buffer.device))  # begin has ended; the GEMM not begun

    def compute(self) -> None:
        """Partial tiles to their owners. Waits for nobody."""
        launch(kernels.scatter_gemm_kernel, self.num_programs, self.buffer.device, self.scatter_arguments)

    def reduce(self) -> None:
        """Sum the tiles that this rank owns, on the buffer's stream, while the GEMM computes the next ones."""
        if self.buffer.stream is None:
            launch(kernels.reduce_kernel, self.reduce_programs, self.buffer.device, self.reduce_arguments)
            return
        with torch.cuda.stream(self.buffer.stream):
            launch(kernels.reduce_kernel, self.reduce_programs, self.buffer.device, self.reduce_arguments)

    def finish(self) -> Tensor:
        buffer = self.buffer
        if self.replicate:
            launch(kernels.collect_kernel, self.num_programs, buffer.device, self.collect_arguments)
        if buffer.stream is not None:  # the sums are in place
            torch.cuda.current_stream(buffer.device).wait_stream(buffer.stream)
        buffer.finish(self.channel)
        return self.out

    def _plan(self, flags: Tensor, result_flags: Tensor) -> None:
        """The arguments of all launches."""
        buffer, channel, config, rank = self.buffer, self.channel, self.config, self.buffer.rank
        cols, itemsize = self.weight.shape[0], self.x.element_size()
        sub_m = max(min(SUB_TILE // config.block_n, config.block_m), 1)
        wait = {
            "flag_capacity": buffer.flag_capacity, "state": channel.state, "record": buffer.record,
            "max_polls": buffer.max_polls, "N": cols, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
            "SUB_M": sub_m, "num_warps": 8,
        }  # fmt: skip
        self.scatter_arguments = {
            "x": self.x, "stride_x": self.x.stride(0), **self.plan.computed._asdict(),
            "peers": buffer.symmetric.pointers, "staging_offset": channel.data + rank * self.part_bytes,
            "flags_offset": channel.flags + 4 * rank * buffer.flag_capacity, "flag_capacity": buffer.flag_capacity,
            "state": channel.state, **gemm_options(self.weight, config),
        }  # fmt: skip
        shape = (buffer.size * self.part_bytes // itemsize,)
        self.reduce_arguments = {
            "staging": buffer.view(channel, shape, self.x.dtype), "num_slots": self.num_slots, "bias": self.bias,
            "out": self.out, "first_row": 0 if self.replicate else sum(self.sizes[:rank]),
            **self.plan.owned._asdict(), "flags": flags,
            "peers": buffer.symmetric.pointers, "result_offset": channel.data + self.result,
            "result_flags_offset": channel.result_flags + 4 * rank * buffer.flag_capacity,
            "W": buffer.size, "PUSH": self.replicate, **wait,
        }  # fmt: skip
        if self.replicate:
            self.collect_arguments = {
                "result": buffer.view(channel, tuple(self.out.shape), self.x.dtype, offset=self.result),
                "out": self.out, **self.plan.collected._asdict(), "flags": result_flags,
                **wait,
            }  # fmt: skip
