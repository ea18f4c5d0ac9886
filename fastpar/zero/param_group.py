"""Parameters of stage 3 that are gathered together: their shards, and their memory while it is unsharded.

Note: memory that comes and goes. An unsharded parameter is the model's own nn.Parameter, one object for ever; its
memory is one storage for the whole group, which is taken away and given back. Autograd saves the parameter, or views of
it like a transposed weight, and these see the memory come back, since they share the storage. So nothing of what a
forward has saved keeps a group in memory, and nothing has to be patched before backward: it is enough to gather in
time.

Note: freed parameters say so. Reading a storage without memory would crash the process. While a group is freed, its
parameters have another version than they had when autograd saved them, so that a backward pass that comes to one of
them raises ("modified by an inplace operation", at version 1000000 or more) instead of reading it. Gathering brings the
version back; after an update of the shards it goes up by one, as it would have for a parameter changed in place. What
Python does with a freed parameter that it still has is refused by the parameter's class meanwhile: see
param_classes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fastpar.comm.pending import Pending
from fastpar.comm.ranges import annotate
from fastpar.optim._masters import version_of
from fastpar.precision import Precision
from fastpar.tensor.dtensor_data import set_wrapper
from fastpar.tensor.held import DataOfDTensors
from fastpar.tensor.parameter import ROWS_OF, ParallelModule
from fastpar.zero.flat import FlatLayout, MemoryPool
from fastpar.zero.groups import Groups, as_parameter, cast_parameter, contiguous_stride, local, own_storage, set_local
from fastpar.zero.offload.shard_store import ShardStore
from fastpar.zero.param_classes import hide, is_withheld, looking_at_absent, mark_absent, mark_present, show, withhold
from fastpar.zero.quantized_gather import CodedShards, Encoder, GatherFormats
from fastpar.zero.sharded_param import ShardedParam, check_alike, take_values

Places = Sequence[tuple[nn.Module, str]]
_FREED = 1_000_000  # added to the versions of parameters whose memory is gone
_ALIGNMENT = 64  # bytes
_FREED_TEXT = (
    "{!r} is sharded by stage 3, and the memory of the whole parameter is freed: take the module's parameter, which is "
    "this rank's shard, or unshard() the module first"
)


def _call_all(hooks: Mapping[int, Callable[[Tensor], Tensor | None]], grad: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        found = hook(grad)
        grad = grad if found is None else found
    return grad


class FlatGroup:
    """The parameters of a unit that have one dtype, device, group of ranks and format: their shards, and the memory for
    them whole."""

    def __init__(
        self,
        groups: Groups,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        store: ShardStore,
        encoder: Encoder | None = None,
    ) -> None:
        values = [local(parameter) for parameter in parameters]
        self.shards = (
            store.shards(groups.shard, names, values) if encoder is None else CodedShards(groups.shard, values, encoder)
        )
        step = _ALIGNMENT // values[0].itemsize
        starts = [0]
        for value in values:
            starts.append(starts[-1] + -(-value.numel() // step) * step)
        flat = torch.empty(starts[-1], dtype=values[0].dtype, device=values[0].device)
        targets = [
            flat.as_strided(x.shape, contiguous_stride(x.shape), start)
            for x, start in zip(values, starts, strict=False)
        ]
        self._rows = self.shards.rows_in(targets)
        self.versioned = tuple(_move(p, target) for p, target in zip(parameters, targets, strict=True))
        self._texts = [(parameter, _FREED_TEXT.format(name)) for parameter, name in zip(parameters, names, strict=True)]
        self._storage = flat.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._storage.resize_(0)
        self._is_for_compiler = False
        self._pending: Pending[None] | None = None

    def launch(self, pool: MemoryPool) -> None:
        """Begin to gather, into memory of the pool."""
        pool.lend(self._storage, self.nbytes)
        self._pending = self.shards.gather_rows_async(self._rows)

    def make_exact(self) -> None:
        """Let what was gathered as codes be what the shards are, of a part that is whole. Collective then."""
        if isinstance(self.shards, CodedShards):
            self.shards.gather_exact(self._rows)

    def wait(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._pending = None

    def free(self, pool: MemoryPool) -> None:
        if self._pending is not None:
            self.shards.abandon(self._pending)
            self._pending = None
        pool.take_back(self._storage)

    def mark_freed(self) -> None:
        for parameter, text in self._texts:
            mark_absent(parameter, text)

    def mark_whole(self) -> None:
        for parameter, _ in self._texts:
            mark_present(parameter)
        if self._is_for_compiler:  # none of the wrapper's own, as a copy of the parameter needs it
            self._set_wrapper_offsets(lambda memory: memory.new_empty(0))

    def be_for_compiler(self) -> None:
        """Let whole DTensors have the offset of their memory: torch.compile takes no others."""
        self._set_wrapper_offsets(lambda memory: memory)

    def _set_wrapper_offsets(self, like: Callable[[Tensor], Tensor]) -> None:
        for parameter, _ in self._texts:
            if isinstance(parameter, DTensor):
                self._is_for_compiler = True
                set_wrapper(parameter, DTensor(like(local(parameter)), parameter._spec, requires_grad=False))


class ParamGroup:
    """The parameters that are gathered together.

    At rest a module's parameter is a DTensor with this rank's rows, which the optimizer has as well (or a master weight
    for it); between `launch` and `free` it is the whole one. `persistent` parameters have their memory always, as
    Replicate() DTensors at rest; so have experts that no other rank has a copy of, as there is nothing to gather,
    unless they are offloaded.

    params    of the trainable parameters: what is reduced and updated
    nbytes   of the memory that comes and goes
    """

    def __init__(
        self,
        name: str,
        places: Mapping[str, Places],
        groups: Groups,
        precision: Precision,
        persistent: frozenset[str],
        store: ShardStore,
        formats: GatherFormats,
    ) -> None:
        self.name, self.names = name, list(places)
        self._precision, self._store = precision, store
        self._persistent = persistent
        self.is_unsharded = self.is_launched = False
        self._hooked: dict[int, Any] = {}  # handles, by the id of a parameter at rest that has hooks
        self.epoch = 0  # of the shards that were gathered last
        self._addresses: list[int] = []  # of the whole parameters that were installed last
        self.params: list[ShardedParam] = []
        self.persistent_params: list[ShardedParam] = []
        self._places = list(places.values())
        self.modules = {module for found in self._places for module, _ in found}
        self.unsharded = [_parameter_at(found) for found in self._places]
        masters = [
            _prepare(x, parameter, precision, store, x in persistent)
            for x, parameter in zip(places, self.unsharded, strict=True)
        ]
        kinds: dict[Any, list[int]] = {}
        for index, (each, parameter) in enumerate(zip(places, self.unsharded, strict=True)):
            if each not in persistent and not (store.is_device and _is_whole_anyway(parameter, groups)):
                of_part = groups.of(parameter)
                wire = formats.wire_of(each) if of_part.shard.size > 1 else None
                kinds.setdefault((parameter.dtype, parameter.device, of_part, wire), []).append(index)
        self.parts = []
        rows = [local(x) for x in self.unsharded]  # of persistents: all of them
        for (_, device, of_part, wire), members in kinds.items():
            names = [self.names[index] for index in members]
            encoder = None if wire is None else formats.encoder(wire, names, of_part, device)
            part = FlatGroup(of_part, names, [self.unsharded[index] for index in members], store, encoder)
            self.parts.append(part)
            for position, index in enumerate(members):
                rows[index] = own_storage(part.shards.shards[position])
                masters[index] = _rows_of(masters[index], part.shards.layout, position, of_part)
        self.nbytes = sum(part.nbytes for part in self.parts)
        self._versioned = tuple(x for part in self.parts for x in part.versioned)
        self._versions = [x._version for x in self._versioned]
        self.sharded: list[nn.Parameter] = []
        self._rows = rows
        for index, (each, parameter) in enumerate(zip(places, self.unsharded, strict=True)):
            spec = _spec_at_rest(parameter, groups, is_persistent=each in persistent)
            sharded = as_parameter(rows[index], spec, requires_grad=parameter.requires_grad)
            tags = {ROWS_OF if key == "fastpar_layout" else key: value for key, value in vars(parameter).items()}
            vars(sharded).update(tags)
            self.sharded.append(sharded)
            faces: list[Tensor] = [sharded]
            if parameter.requires_grad:
                param = _sharded_param(each, parameter, sharded, masters[index], spec, precision)
                (self.persistent_params if each in persistent else self.params).append(param)
                faces += [] if param.model_rows is None else [param.model_rows]
            if each not in persistent:
                store.attach(each, *faces)
        self._frozen = [index for index, x in enumerate(self.sharded) if not x.requires_grad]
        self._data = DataOfDTensors(zip(self.names, self.sharded, strict=True))
        self._mark_freed()
        self._register(self.sharded)

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Shards of the parameters that are not trained."""
        return {name: x.detach() for name, x in zip(self.names, self.sharded, strict=True) if not x.requires_grad}

    def thawed(self) -> list[int]:
        """Numbers of the parameters that have been frozen and are not any more."""
        return [index for index in self._frozen if self.sharded[index].requires_grad]

    def adopt(self, index: int) -> ShardedParam:
        """Train a parameter that has been frozen: returns its param."""
        name, parameter, sharded = self.names[index], self.unsharded[index], self.sharded[index]
        if not self._store.has_memory and name not in self._persistent:
            raise RuntimeError(
                f"{name} was frozen in fastpar.zero.shard(...) and requires a gradient now, and its shards are in a "
                "file: let it require one before shard, and freeze it afterwards"
            )
        parameter.requires_grad_()
        rows, own = local(sharded), parameter.dtype
        dtype = self._precision.master_dtype(name, own)
        needs_master = self._store.needs_copy(name in self._persistent) or dtype != own
        master = rows.to(self._store.of_masters(rows.device), dtype, copy=True) if needs_master else None
        spec = sharded._spec if isinstance(sharded, DTensor) else None
        param = _sharded_param(name, parameter, sharded, master, spec, self._precision)
        (self.persistent_params if name in self._persistent else self.params).append(param)
        self._frozen.remove(index)
        return param

    def astray(self) -> list[int]:
        """Numbers of the parameters at rest that have other memory than what is gathered. Raises RuntimeError where
        `.data` of a DTensor was set."""
        self._data.check()
        pairs = enumerate(zip(self.sharded, self._rows, strict=True))
        return [i for i, (x, rows) in pairs if getattr(x, "_local_tensor", x).data_ptr() != rows.data_ptr()]

    def bring_back(self, index: int) -> None:
        """Copy the values of a parameter at rest to where they are gathered from. Raises RuntimeError for other
        dtypes and shapes."""
        sharded, rows = self.sharded[index], self._rows[index]
        value = local(sharded)
        check_alike(self.names[index], rows, value)
        param = next((param for param in (*self.params, *self.persistent_params) if param.sharded is sharded), None)
        if not torch.equal(rows, value):
            if param is not None:
                take_values(param, rows, value)
            else:
                rows.copy_(value)
        set_local(sharded, rows)

    def launch(self, pool: MemoryPool) -> None:
        """Begin to gather; collective."""
        self.is_launched = True
        with annotate(f"fastpar::zero::all_gather {self.name}"):
            for part in self.parts:
                part.launch(pool)

    def install(self, epoch: int) -> None:
        """Wait for the gather, and give the modules their whole parameters. `epoch`: of the shards' values."""
        with annotate(f"fastpar::zero::wait all_gather {self.name}"):
            for part in self.parts:
                part.wait()
        if epoch != self.epoch:
            self.epoch = epoch
            self._versions = [version + 1 for version in self._versions]
        for part in self.parts:
            part.mark_whole()
        if self._versioned:
            _set_versions(self._versioned, self._versions)
        with looking_at_absent():  # shards have a class of their own now: see param_classes.py
            for whole, sharded in zip(self.unsharded, self.sharded, strict=True):
                if whole.requires_grad != sharded.requires_grad:
                    whole.requires_grad_(sharded.requires_grad)
                if sharded._backward_hooks and id(sharded) not in self._hooked:
                    # Autograd comes to the whole parameter: hooks of the one that users see are to run there
                    self._hooked[id(sharded)] = whole.register_hook(partial(_call_all, sharded._backward_hooks))
        self._check()
        self._register(self.unsharded)
        self._addresses = [_whole_address(whole) for whole in self.unsharded]
        self._whole_versions = [version_of(whole) for whole in self.unsharded]
        self.is_unsharded = True

    def be_for_compiler(self) -> None:
        """Before compiled code runs with the parameters."""
        if self.is_unsharded:
            for part in self.parts:
                part.be_for_compiler()

    def check_in_place(self) -> None:
        """RuntimeError for a whole parameter that its module has given other memory, which nobody would train."""
        for name, whole, address in zip(self.names, self.unsharded, self._addresses, strict=False):
            if self.is_unsharded and _whole_address(whole) != address:
                raise RuntimeError(
                    f"{name} was converted or given other memory (dtype {local(whole).dtype} now) while stage 3 had it "
                    "gathered for a forward, as .to() and an assignment to .data do: it would not be trained. Do so "
                    "before fastpar.zero.shard (precision= has patterns of what stays in float32), or use stage=2"
                )

    def written(self) -> list[str]:
        """The names of whole parameters that somebody has written to."""
        if not self.is_unsharded:
            return []
        wholes = zip(self.names, self.unsharded, self._whole_versions, strict=True)
        return [name for name, whole, version in wholes if version_of(whole) != version]

    def free(self, pool: MemoryPool) -> None:
        """Give the modules their shards back, and the memory to the pool."""
        if self.is_unsharded:
            with looking_at_absent():
                for whole, sharded in zip(self.unsharded, self.sharded, strict=True):
                    sharded.requires_grad_(whole.requires_grad)  # which somebody may have changed meanwhile
            self._register(self.sharded)
            self._versions = [x._version for x in self._versioned]
            self._mark_freed()
        for part in self.parts:
            part.free(pool)
        self.is_unsharded = self.is_launched = False

    def restore(self, pool: MemoryPool) -> None:
        """Leave the modules with whole parameters, as they were before."""
        if not self.is_launched:
            self.launch(pool)
        if not self.is_unsharded:
            self.install(self.epoch)
        for part in self.parts:
            part.make_exact()

    def _mark_freed(self) -> None:
        if self._versioned:
            _set_versions(self._versioned, [version + _FREED for version in self._versions])
        params = [*self.params, *self.persistent_params]
        withheld = [param for param in params if is_withheld(param)]
        for param in params:
            hide(param)  # what has another class already would not be marked
        for part in self.parts:
            part.mark_freed()
        for param in params:
            show(param)
        for param in withheld:
            withhold(param)

    def _check(self) -> None:
        for places, sharded in zip(self._places, self.sharded, strict=True):
            for module, attribute in places:
                if module._parameters.get(attribute) is not sharded:
                    raise RuntimeError(
                        f"{attribute!r} of a {type(module).__name__} in unit {self.name!r} is not the parameter that "
                        "stage 3 has sharded: it was replaced (load_state_dict with assign=True does that). Replace "
                        "parameters before fastpar.zero.shard, or copy into them; functional_call needs stage=2"
                    )

    def _register(self, parameters: Sequence[nn.Parameter]) -> None:
        for places, parameter in zip(self._places, parameters, strict=True):
            for module, attribute in places:
                # torch's recurrent layers keep a list of their weights; tensor-parallel ones make it in every forward.
                if type(module).__setattr__ is nn.Module.__setattr__ or isinstance(module, ParallelModule):
                    module._parameters[attribute] = parameter
                else:
                    setattr(module, attribute, parameter)


def _whole_address(parameter: Any) -> int:
    found: Tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return found.data_ptr()


def _parameter_at(places: Places) -> nn.Parameter:
    module, attribute = places[0]
    parameter = module._parameters[attribute]
    assert parameter is not None
    return parameter


def _prepare(
    name: str, parameter: nn.Parameter, precision: Precision, store: ShardStore, is_persistent: bool
) -> Tensor | None:
    """Convert a parameter to the dtype of computation; returns what it was where the optimizer needs it."""
    own, value = parameter.dtype, local(parameter)
    wanted = precision.param_dtype(name, own)
    cast_parameter(parameter, wanted)
    dtype = precision.master_dtype(name, own)
    needs_master = parameter.requires_grad and (store.needs_copy(is_persistent) or dtype != wanted)
    return value.to(store.of_masters(value.device), dtype, copy=True) if needs_master else None


def _rows_of(master: Tensor | None, layout: FlatLayout, index: int, groups: Groups) -> Tensor | None:
    return None if master is None else layout.rows_of(master, index, groups.shard.rank).clone()


def _sharded_param(
    name: str,
    parameter: nn.Parameter,
    sharded: nn.Parameter,
    master: Tensor | None,
    spec: DTensorSpec | None,
    precision: Precision,
) -> ShardedParam:
    spec = spec or getattr(parameter, "_spec", None)
    wire = precision.reduce_dtype(name, parameter.dtype)
    if master is None:
        return ShardedParam(name, parameter, sharded, spec, wire, sharded=sharded)
    target = local(sharded)
    owner = as_parameter(master.view(target.shape), spec)
    vars(owner).update(vars(sharded))  # pipelines mark what stages share
    return ShardedParam(name, parameter, owner, spec, wire, model_rows=target, sharded=sharded)


def _is_whole_anyway(parameter: nn.Parameter, groups: Groups) -> bool:
    """Whether this rank has all there is to gather: experts that no other rank has a copy of."""
    found = groups.of(parameter)
    return found is not groups and found.shard.size == 1


def _spec_at_rest(parameter: nn.Parameter, groups: Groups, *, is_persistent: bool) -> DTensorSpec | None:
    found = groups.of(parameter).row_spec(parameter)
    if found is not None and is_persistent:
        found = _replicated(found, parameter)
    return found or getattr(parameter, "_spec", None)


def _replicated(spec: DTensorSpec, parameter: nn.Parameter) -> DTensorSpec:
    """`Groups.row_spec` of a parameter whose rows are not split."""
    inner = len(parameter.placements) if isinstance(parameter, DTensor) else 0
    placements = list(spec.placements)
    placements[len(placements) - inner - 1] = Replicate()
    meta = TensorMeta(parameter.shape, contiguous_stride(parameter.shape), parameter.dtype)  # a scalar has no dims here
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta)


def _move(parameter: nn.Parameter, memory: Tensor) -> Tensor:
    """Give a parameter other memory; returns the tensor whose version autograd looks at."""
    if isinstance(parameter, DTensor):
        inner: Any = parameter
        inner._local_tensor = memory.data
        found: Tensor = inner._local_tensor
        return found
    parameter.data = memory
    return parameter


def _set_versions(tensors: tuple[Tensor, ...], versions: Sequence[int]) -> None:
    torch._C._autograd._unsafe_set_version_counter(tensors, tuple(versions))
