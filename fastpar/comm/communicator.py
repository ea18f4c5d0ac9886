"""The collectives of one process group. See `Communicator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastpar.arguments import check_seconds, checked
from fastpar.comm.groups import resolve_group
from fastpar.comm.launcher import Launcher
from fastpar.comm.multi_host.host_ranks import HostRanks
from fastpar.comm.pending import Pending
from fastpar.comm.shards import check_dim, check_tensor
from fastpar.comm.shared_memory.world import LocalWorld
from fastpar.comm.transport_selector import Route
from fastpar.mesh.lifetime import GroupUse, timeout_of
from fastpar.mesh.rendezvous import launched_world

_OMITTED: Any = object()  # for a group: what None says must have been said
GroupLike = Union[ProcessGroup, DeviceMesh, "Communicator", None]


class Communicator:
    """The collectives of one process group.

    group      a ProcessGroup, a 1-D DeviceMesh, a Communicator (its group), or None: one rank
    timeout    seconds from the launch of a collective to its deadline; by default those of the mesh that the group
               belongs to (`init_mesh(timeout=)`), 600 for other groups. Whoever waits for a minute warns of it, through
               the logger "fastpar.comm", and names the ranks that are late
    transport  "auto": shared memory for CPU tensors where all ranks share a host; shared memory within hosts and gloo
               between them where some do; else torch.distributed (gloo, NCCL);
               "torch": always gloo or NCCL; "shared_memory": an error where "auto" would fall back for CPU tensors
    check      whether ranks compare what they call before data moves. None: between CPU tensors always, on devices
               never; True: there too, which makes every launch wait for all ranks; False: only over shared memory, and
               gloo is the group's own

    Every method has a twin `<name>_async` with the same arguments that returns a `Pending`; `name(...)` is
    `name_async(...).wait()`. All ranks of the group must launch the same collectives in the same order, with matching
    shapes and dtypes.

    Tensors may have any strides and any dtype (reductions: real floating point of at least 16 bits and integers; bool
    with max and min). Results are contiguous, never alias an input (except `out=x`), and carry no autograd history:
    `fastpar.comm` has the differentiable pairs. Over shared memory reductions add in the order of ranks, 16-bit
    floats in float32 with one rounding; `fastpar.comm.multi_host.transport` says what holds for several hosts, and
    `fastpar.comm.torch.transport` what holds for torch.distributed. A group of one rank (or None) makes no call to
    torch.distributed and gives the same results: new tensors.

    `sizes` are rows along `dim`, one per rank, any of them 0. Ranks are ranks within the group.

    Raises CommError when a collective fails (CommTimeoutError: missed its deadline; between CPU ranks also
    PeerLostError: a process has ended, CommMismatchError: the ranks called different things); ValueError, TypeError and
    IndexError for arguments, before anything is sent.

    None is one rank here, as `mesh.group` gives for a dim of one, and the whole world in torch: `fastpar.comm.world()`
    is that. No group at all is refused where there is a world of several ranks.
    """

    @checked(computed=False)
    def __init__(
        self,
        group: GroupLike = _OMITTED,
        *,
        timeout: float | None = None,
        transport: str = "auto",
        check: bool | None = None,
    ) -> None:
        if group is _OMITTED:
            _check_one_rank()
            group = None
        self.group: ProcessGroup | None = group.group if isinstance(group, Communicator) else resolve_group(group)
        if timeout is None:
            timeout = group.timeout if isinstance(group, Communicator) else timeout_of(self.group)
        self.timeout: float = check_seconds(timeout)
        self.transport = transport
        self.rank: int = 0 if self.group is None else self.group.rank()
        self.size: int = 1 if self.group is None else self.group.size()
        self._route = Route(self.group, self.timeout, transport, check)
        self._blocking = Launcher(self._route, "blocking")
        self._background = Launcher(self._route, "background")
        self._halves = Launcher(self._route, "halves")
        self._use = GroupUse()  # the last attribute

    @staticmethod
    def of(group: GroupLike) -> Communicator:
        """A communicator for `group`, which is returned unchanged where it already is one."""
        return group if isinstance(group, Communicator) else Communicator(group)

    def __deepcopy__(self, memo: Any) -> Communicator:
        """Itself: a copied model still runs on the same group."""
        return self

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, timeout={self.timeout:g})"

    def local_world(self) -> LocalWorld | None:
        """The ranks that share memory, all of the group's; None where they cannot, or are on several hosts.

        The first call, and the first collective, wait until all ranks have come.
        """
        return self._route.world()

    def host_ranks(self) -> HostRanks | None:
        """The ranks on this host, of a group on several of which one at least has more than one rank; None for other
        groups, and where ranks of a host cannot share memory. Waits as `local_world` does.
        """
        hierarchy = self._route.hierarchy()
        return None if hierarchy is None else HostRanks(hierarchy, self.timeout)

    @property
    def in_halves(self) -> Launcher:
        """The collectives for one who computes between launch and wait, and waits for nothing else there.

            pending = comm.in_halves.reduce_scatter(partial)
            dweight = dout.T @ x
            dx = pending.wait()

        Over shared memory the launch shows the data to the other ranks and `wait` does the rest, on the caller's
        thread: no dearer than a blocking call, and hiding the wait for the others. Another collective of the group
        finishes the one before first. Between launch and wait a rank must not wait for other ranks by other means.
        Over torch.distributed these are the `_async` twins.
        """
        return self._halves

    def all_reduce_async(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None) -> Pending[Tensor]:
        return self._background.all_reduce(x, op, out=out)

    def all_reduce(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None) -> Tensor:
        """x of every rank, reduced by op ("sum", "avg", "max", "min"): same shape and dtype. `out=x` works in place."""
        express = self._route.express
        result = None if express is None else express.all_reduce(x, op, out)
        return self._blocking.all_reduce(x, op, out=out).wait() if result is None else result

    def reduce_scatter_async(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Pending[Tensor]:
        return self._background.reduce_scatter(x, op, dim=dim, sizes=sizes, dtype=dtype)

    def reduce_scatter(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """This rank's rows along `dim` of x reduced over the ranks. `sizes`: rows of each rank, by default
        `shard_sizes`. `dtype`: of the result; torch.float32 gives the sum or average of 16-bit floats as it was
        accumulated, not rounded, for the same bytes sent.
        """
        express = self._route.express
        is_plain = sizes is None and dtype is None and _is_first(dim)
        result = express.reduce_scatter(x, op) if is_plain and express is not None else None
        if result is not None:
            return result
        return self._blocking.reduce_scatter(x, op, dim=dim, sizes=sizes, dtype=dtype).wait()

    def all_gather_async(self, x: Tensor, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Pending[Tensor]:
        return self._background.all_gather(x, dim=dim, sizes=sizes)

    def all_gather(self, x: Tensor, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """The x of all ranks, concatenated along `dim` in rank order. `sizes`: rows of each rank, by default
        x.size(dim) on every rank.
        """
        express = self._route.express
        result = None if express is None or sizes is not None or not _is_first(dim) else express.all_gather(x)
        return self._blocking.all_gather(x, dim=dim, sizes=sizes).wait() if result is None else result

    def all_to_all_async(
        self,
        x: Tensor,
        *,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        split_dim: int = 0,
        concat_dim: int | None = None,
    ) -> Pending[Tensor]:
        return self._background.all_to_all(
            x, input_sizes=input_sizes, output_sizes=output_sizes, split_dim=split_dim, concat_dim=concat_dim
        )

    def all_to_all(
        self,
        x: Tensor,
        *,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        split_dim: int = 0,
        concat_dim: int | None = None,
    ) -> Tensor:
        """Send rows of x along split_dim: the first input_sizes[0] to rank 0, the next input_sizes[1] to rank 1, ...;
        what comes is put side by side along concat_dim in rank order, output_sizes[r] rows from rank r.

        concat_dim is split_dim by default. `input_sizes` then defaults to equal parts, `output_sizes` to `input_sizes`
        where those are equal; else it must be given: `exchange_sizes` asks the other ranks.

        With another concat_dim one dim is gathered and another split, as when attention goes from tokens to heads:

            x [B, S/R, H, D]  ->  comm.all_to_all(x, split_dim=2, concat_dim=1)  [B, S, H/R, D]

        `input_sizes` are then the rows of each rank along split_dim, the same on all ranks, by default `shard_sizes`;
        `output_sizes` the rows of each rank's x along concat_dim, by default those of this one.
        """
        express = self._route.express
        is_plain = input_sizes is None and output_sizes is None and _is_first(split_dim)
        is_plain = is_plain and (concat_dim is None or _is_first(concat_dim))
        result = express.all_to_all(x) if is_plain and express is not None else None
        if result is not None:
            return result
        return self._blocking.all_to_all(
            x, input_sizes=input_sizes, output_sizes=output_sizes, split_dim=split_dim, concat_dim=concat_dim
        ).wait()

    @checked(computed=False)
    def all_to_all_sizes(
        self,
        x: Tensor,
        split_dim: int,
        concat_dim: int,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
    ) -> tuple[list[int], list[int]]:
        """`input_sizes` and `output_sizes` as `all_to_all` takes them, checked, with what is left out filled in."""
        check_tensor(x)
        split_dim, concat_dim = check_dim(split_dim, x, "split_dim"), check_dim(concat_dim, x, "concat_dim")
        return self._blocking.sizes_of_parts(x, split_dim, concat_dim, input_sizes, output_sizes)

    @checked(computed=False)
    def share_sizes(self, rows: int) -> list[int]:
        """The `rows` of every rank, for `sizes=` of all_gather and gather where no rank knows those of the others. One
        all_gather of a number."""
        _check_rows([rows], "rows")
        return [int(size) for size in self.all_gather(torch.tensor([rows], device="cpu")).tolist()]

    @checked(computed=False)
    def exchange_sizes(self, input_sizes: Sequence[int]) -> list[int]:
        """The `output_sizes` of an all_to_all, where every rank knows only what it sends. One all_to_all of numbers."""
        _check_rows(input_sizes, "input_sizes")
        if len(input_sizes) != self.size:
            raise ValueError(f"input_sizes must have one entry per rank ({self.size}), got {list(input_sizes)}")
        return [int(size) for size in self.all_to_all(torch.tensor(list(input_sizes), device="cpu")).tolist()]

    def broadcast_async(self, x: Tensor, src: int = 0) -> Pending[Tensor]:
        return self._background.broadcast(x, src)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """The x of rank src. On the other ranks x gives shape and dtype only."""
        express = self._route.express
        result = None if express is None else express.broadcast(x, src)
        return self._blocking.broadcast(x, src).wait() if result is None else result

    def reduce_async(self, x: Tensor, dst: int = 0, op: str = "sum") -> Pending[Tensor | None]:
        return self._background.reduce(x, dst, op)

    def reduce(self, x: Tensor, dst: int = 0, op: str = "sum") -> Tensor | None:
        """x of every rank reduced by op, on rank dst; None elsewhere."""
        return self._blocking.reduce(x, dst, op).wait()

    def scatter_async(
        self,
        x: Tensor | None,
        src: int = 0,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        like: Tensor | None = None,
    ) -> Pending[Tensor]:
        return self._background.scatter(x, src, dim=dim, sizes=sizes, like=like)

    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        like: Tensor | None = None,
    ) -> Tensor:
        """This rank's rows along `dim` of rank src's x. `sizes`: rows of each rank, by default `shard_sizes`.

        Ranks other than src may pass x=None and like=: a tensor with the shape, dtype and device of the whole x; a
        meta tensor will do.
        """
        return self._blocking.scatter(x, src, dim=dim, sizes=sizes, like=like).wait()

    def gather_async(
        self, x: Tensor, dst: int = 0, *, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Pending[Tensor | None]:
        return self._background.gather(x, dst, dim=dim, sizes=sizes)

    def gather(self, x: Tensor, dst: int = 0, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor | None:
        """The x of all ranks concatenated along `dim`, on rank dst; None elsewhere. `sizes` as in `all_gather`."""
        return self._blocking.gather(x, dst, dim=dim, sizes=sizes).wait()

    def barrier_async(self) -> Pending[None]:
        return self._background.barrier()

    def barrier(self) -> None:
        """Return when every rank has entered."""
        express = self._route.express
        if express is None or not express.barrier():
            self._blocking.barrier().wait()


def _is_first(dim: object) -> bool:
    return type(dim) is int and dim == 0


@checked(computed=False)
def world(*, timeout: float | None = None, transport: str = "auto", check: bool | None = None) -> Communicator:
    """The communicator of all ranks of the job: what `group=None` says in torch. One rank where there is no job.

    Raises RuntimeError under a launcher of several ranks where torch.distributed is not initialised yet.
    """
    if dist.is_available() and dist.is_initialized():
        return Communicator(dist.group.WORLD, timeout=timeout, transport=transport, check=check)
    launched = launched_world()
    if launched is not None and launched[1] > 1:
        raise RuntimeError(
            f"{launched[1]} ranks were launched, but torch.distributed is not initialised: call fastpar.init_mesh first"
        )
    return Communicator(None, timeout=timeout, transport=transport, check=check)


def _check_one_rank() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"no group was given, and there are {dist.get_world_size()} ranks: pass one, as mesh.group('tp'); "
            "fastpar.comm.world() is the communicator of all ranks, and group=None one rank"
        )


def _check_rows(rows: Sequence[int], name: str) -> None:
    for count in rows:
        if count < 0:
            raise ValueError(f"{name} must not be negative, got {count}")
