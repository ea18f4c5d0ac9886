"""The collectives of one process group. See `Communicator`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, Union

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
from fastpar.comm.transport_selector import MODES, Mode, TransportSelector
from fastpar.mesh.lifetime import GroupUse, timeout_of
from fastpar.mesh.rendezvous import launched_world

_OMITTED: Any = object()  # for a group: what None says must have been said
GroupLike = Union[ProcessGroup, DeviceMesh, "Communicator", None]


P = ParamSpec("P")
T = TypeVar("T")


def _twins(
    launch: Callable[Concatenate[Launcher, P], Pending[T]], *, is_fast: bool = False
) -> tuple[Callable[Concatenate[Communicator, P], T], Callable[Concatenate[Communicator, P], Pending[T]]]:
    """A collective that waits, and its `_async` twin, of one method of the launcher. `is_fast`: it has a fast path."""
    name = launch.__name__

    def blocking(self: Communicator, *args: P.args, **kwargs: P.kwargs) -> T:
        _refuse_traces(self, name)
        # Dynamo would break the graph at what the fast path asks of tensors, and compile again once there is one.
        fast = None if torch.compiler.is_dynamo_compiling() else self._selector.fast_path
        if is_fast and fast is not None:
            result: T | None = getattr(fast, name)(*args, **kwargs)
            if result is not None:
                return result
        pending: Pending[T] = getattr(self._launchers["blocking"], name)(*args, **kwargs)
        return pending.wait()

    def background(self: Communicator, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        _refuse_traces(self, name)
        pending: Pending[T] = getattr(self._launchers["background"], name)(*args, **kwargs)
        return pending

    for twin, suffix in ((blocking, ""), (background, "_async")):
        functools.update_wrapper(twin, launch)
        twin.__name__, twin.__qualname__ = name + suffix, f"Communicator.{name}{suffix}"
    signature = inspect.signature(launch)
    returned = str(signature.return_annotation).removeprefix("Pending[").removesuffix("]")
    blocking.__annotations__ = {**launch.__annotations__, "return": returned}
    blocking.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return blocking, background


def _refuse_traces(comm: Communicator, name: str) -> None:
    """RuntimeError where a graph would have what other ranks send as a constant. torch.compile has ops."""
    if comm.size == 1 or torch.compiler.is_compiling():
        return
    if torch._C._get_tracing_state() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
        raise RuntimeError(
            f"{name} over {comm.size} ranks: a graph that is traced here (torch.jit.trace, make_fx) would hold what "
            "this collective has brought as a constant. Take torch.export.export, or trace the model as it was before "
            "it was split (fastpar.unparallelize)"
        )


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
        self._selector = TransportSelector(self.group, self.timeout, transport, check)
        self._launchers: dict[str, Launcher] = {mode: Launcher(self._selector, mode) for mode in MODES}
        self._use = GroupUse()  # the last attribute

    @staticmethod
    def of(group: GroupLike) -> Communicator:
        """A communicator for `group`, which is returned unchanged where it already is one."""
        return group if isinstance(group, Communicator) else Communicator(group)

    def __deepcopy__(self, memo: Any) -> Communicator:
        """Itself: a copied model still runs on the same group."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Communicator holds its processes' group and is not pickled; nor are models that fastpar has split over "
            "one: save model.state_dict(), or fastpar.save_pretrained(model, folder)"
        )

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, timeout={self.timeout:g})"

    def local_world(self) -> LocalWorld | None:
        """The ranks that share memory, all of the group's; None where they cannot, or are on several hosts.

        The first call, and the first collective, wait until all ranks have come.
        """
        return self._selector.world()

    def host_ranks(self) -> HostRanks | None:
        """The ranks on this host, of a group on several of which one at least has more than one rank; None for other
        groups, and where ranks of a host cannot share memory. Waits as `local_world` does.
        """
        hierarchy = self._selector.hierarchy()
        return None if hierarchy is None else HostRanks(hierarchy, self.timeout)

    def collectives(self, mode: Mode) -> Launcher:
        """The same collectives, all of which return a `Pending`, by who does the work and when.

        blocking     the caller, before it returns: the pending is done
        background   a thread of the group (NCCL: the device), whatever the caller does: the `_async` twins
        split_phase  the caller, in two phases; for one who computes between launch and wait, and waits for nothing else

            pending = comm.collectives("split_phase").reduce_scatter(partial)
            dweight = dout.T @ x
            dx = pending.wait()

        Over shared memory a split-phase launch shows the data to the other ranks, and `wait` does the rest on the
        caller's thread: no dearer than a blocking call, and hiding the wait for the others. Another collective of the
        group finishes the one before first. Between launch and wait a rank must not wait for other ranks by other
        means. Over torch.distributed these are the `_async` twins.
        """
        launcher = self._launchers.get(mode)
        if launcher is None:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        return launcher

    # Signatures and docstrings of the collectives are the launcher's.
    all_reduce, all_reduce_async = _twins(Launcher.all_reduce, is_fast=True)
    reduce_scatter, reduce_scatter_async = _twins(Launcher.reduce_scatter, is_fast=True)
    all_gather, all_gather_async = _twins(Launcher.all_gather, is_fast=True)
    all_to_all, all_to_all_async = _twins(Launcher.all_to_all, is_fast=True)
    broadcast, broadcast_async = _twins(Launcher.broadcast, is_fast=True)
    reduce, reduce_async = _twins(Launcher.reduce)
    scatter, scatter_async = _twins(Launcher.scatter)
    gather, gather_async = _twins(Launcher.gather)

    def barrier(self) -> None:
        """Return when every rank has entered."""
        fast = self._selector.fast_path
        if fast is not None and not torch.compiler.is_dynamo_compiling():
            fast.barrier()
        else:
            self._launchers["blocking"].barrier().wait()

    def barrier_async(self) -> Pending[None]:
        """A pending whose `wait` returns when every rank has entered."""
        return self._launchers["background"].barrier()

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
        return self._launchers["blocking"].sizes_of_parts(x, split_dim, concat_dim, input_sizes, output_sizes)

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
