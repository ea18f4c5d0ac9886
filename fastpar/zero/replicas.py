"""A model of which every rank has all parameters (stages 0 to 2): where they lie, and what is reduced.

Note: replaced parameters. A rank's rows of a parameter are the optimizer's, in the parameter's own memory. What gives a
parameter other memory (`model.to("cpu:0")`, `p.data = ...`) or a module another parameter
(`load_state_dict(assign=True)`) would separate the two: the model would be trained no more, and nobody would be told.
So `Connection` compares memory before every training forward and step, one pointer a parameter; new values of the same
dtype and device are copied to where the old ones were. An evaluation computes with what is there, which may go again. A
parameter that a module was given is set aside then: it shares the memory, and an optimizer that has it is refused.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.utils import stateless
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastpar.tensor.held import DataOfDTensors
from fastpar.tensor.parameter import ROWS_OF, layout_of
from fastpar.zero.flat import WholeParameters
from fastpar.zero.groups import Groups, as_parameter, cast_parameter, local, set_local
from fastpar.zero.hooks import uncompiled
from fastpar.zero.options import ShardOptions
from fastpar.zero.order_reducer import OrderReducer
from fastpar.zero.quantized_gather import CodedParameters, GatherFormats, ParamWire
from fastpar.zero.reducer import GradReducer
from fastpar.zero.replica_writes import Replica, ReplicaWrites
from fastpar.zero.sharded_param import ShardedParam, check_alike, places_of, take_values, union


class ModelParams(Protocol):
    """The holder of a model's parameters: `Replicas` (stages 0 to 2) or `Stage3`.

    params          of the trainable ones: what is reduced and updated
    persistent      names of those that are sharded by nobody while others are
    layouts         how parameters lie over the ranks of tensor parallelism, where they do, by name
    frozen          those that are not trained, as they are at rest, by name
    frozen_at_rest  what modules have at rest in their place, by the id of the unsharded ones
    buffers         memory that shards are read into
    coded_bytes     of exact rows and their codes, beside parameters that are gathered as codes
    """

    params: list[ShardedParam]
    formats: GatherFormats
    persistent: frozenset[str]
    layouts: Mapping[str, Any]

    @property
    def reducer(self) -> GradReducer: ...
    @property
    def frozen(self) -> dict[str, Tensor]: ...
    @property
    def frozen_at_rest(self) -> Mapping[int, nn.Parameter]: ...
    @property
    def buffers(self) -> Sequence[Tensor]: ...
    @property
    def coded_bytes(self) -> int: ...
    def check(self) -> None:
        """See to it that the optimizer changes what the model has. Collective where it does not."""

    def thawed(self) -> dict[str, nn.Parameter]:
        """Parameters that have been frozen and are not any more, by name."""

    def adopt(self, names: Sequence[str]) -> list[ShardedParam]:
        """Train parameters that have been frozen. Collective."""

    def released(self) -> None:
        """Before rows are written to: waits until no rank reads them any more. Collective."""

    def published(self, owner: int | None = None) -> None:
        """After rows were written to: lets the other ranks have them, of one optimizer's parameters (None: of all).
        Collective."""

    def writing(self, params: Sequence[ShardedParam]) -> AbstractContextManager[None]:
        """Shards without memory have some in the block, which is to give these parameters new values."""

    def load(self) -> None:
        """Have all shards in memory, until something is gathered or `published` is called."""

    def detach(self) -> None: ...


class Replicas:
    """Whole parameters, and what the optimizer has instead of them: the same, rows of them, or copies.

    named   the parameters, which get the precision's dtypes and may be moved to where other ranks can read them
    held_by the number of the optimizer that has a parameter, by the parameter's id
    began   called when a backward pass brings its first gradient
    model   whose modules have the parameters, where it is known
    """

    persistent: frozenset[str] = frozenset()
    frozen_at_rest: Mapping[int, nn.Parameter] = MappingProxyType({})
    buffers: Sequence[Tensor] = ()

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        groups: Groups,
        options: ShardOptions,
        held_by: Mapping[int, int],
        *,
        began: Callable[[], None],
        model: nn.Module | None = None,
    ) -> None:
        self._model, self._held_by = model, held_by
        self.formats = GatherFormats(options.param_wires)
        self._groups, self._precision, self._has_copies = groups, options.precision, options.offload is not None
        self._has_wire = options.wire is not None
        self.layouts: Mapping[str, Any] = {name: layout_of(parameter) for name, parameter in named.items()}
        self.params, self._whole = self._make_params(named)
        self.reducer = OrderReducer(
            self.params,
            groups,
            options.wire,
            accumulate=options.accumulate if options.stage < 2 else 1,
            bucket_bytes=options.bucket_bytes,
            began=began,
        )
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        self._connection = Connection(model, self.params, self.released)
        everyone = tuple(groups.everyone())
        self.reducer.writes = ReplicaWrites([Replica(name, parameter, everyone) for name, parameter in named.items()])

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Parameters that are not trained, by name."""
        return {name: parameter.detach() for name, parameter in self._frozen.items()}

    def check(self) -> None:
        """See to it that the optimizer still changes what the model has."""
        if self._connection.check():
            self.reducer.writes.replaced()

    def thawed(self) -> dict[str, nn.Parameter]:
        """Parameters that have been frozen and are not any more, by name."""
        return {name: parameter for name, parameter in self._frozen.items() if parameter.requires_grad}

    def adopt(self, names: Sequence[str]) -> list[ShardedParam]:
        """Train parameters that have been frozen: returns their params. Collective."""
        params, whole = self._make_params({name: self._frozen.pop(name) for name in names})
        self.params += params
        self._whole += whole
        self.reducer.extend(params)
        self._connection = Connection(self._model, self.params, self.released)
        return params

    def released(self) -> None:
        """Before rows are written to: others read them in `gather` alone, which returns when all have."""

    def published(self, owner: int | None = None) -> None:
        """After rows were written to: brings those of the other ranks in. Collective."""
        self.formats.roll()
        for whole, its_owner in self._whole:
            if owner is None or owner == its_owner:
                whole.gather()
        self.reducer.writes.note()

    @property
    def coded_bytes(self) -> int:
        """Bytes of exact rows and their codes, beside parameters that are gathered as codes."""
        return sum(whole.nbytes for whole, _ in self._whole if isinstance(whole, CodedParameters))

    def writing(self, params: Sequence[ShardedParam]) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self) -> None:
        pass

    def detach(self) -> None:
        self.reducer.detach()

    def _make_params(
        self, named: Mapping[str, nn.Parameter]
    ) -> tuple[list[ShardedParam], list[tuple[WholeParameters | CodedParameters, int]]]:
        """Move parameters to where they will stay, and make what the optimizers are to have. What is gathered together
        has one optimizer: one may step, and the others not."""
        policy = self._precision
        trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        originals = {}
        for name, parameter in trainable.items():
            own = parameter.dtype
            if self._has_copies or policy.master_dtype(name, own) != policy.param_dtype(name, own):
                is_coded = self.formats.wire_of(name) is not None  # the parameter is about to get other values
                originals[name] = local(parameter).to(policy.master_dtype(name, own), copy=is_coded)
        wires = {name: policy.reduce_dtype(name, parameter.dtype) for name, parameter in trainable.items()}
        for name, parameter in named.items():
            cast_parameter(parameter, policy.param_dtype(name, parameter.dtype))
        kinds: dict[tuple[torch.dtype, torch.device, ParamWire | None, int], list[str]] = {}
        for name, parameter in trainable.items():
            param_wire = self.formats.wire_of(name) if self._groups.shard.size > 1 else None
            owner = self._held_by[id(parameter)]
            kinds.setdefault((parameter.dtype, parameter.device, param_wire, owner), []).append(name)
        params: dict[str, ShardedParam] = {}
        everything: list[tuple[WholeParameters | CodedParameters, int]] = []
        for (_, device, param_wire, owner), names in kinds.items():
            values = [local(trainable[name]) for name in names]
            if param_wire is None:
                whole: WholeParameters | CodedParameters = WholeParameters(self._groups.shard, values)
            else:
                encoder = self.formats.encoder(param_wire, names, self._groups, device)
                whole = CodedParameters(self._groups.shard, values, encoder)
            everything.append((whole, owner))
            if whole.is_shared:
                for name, value in zip(names, whole.values, strict=True):
                    set_local(trainable[name], value)
            for index, (name, rows) in enumerate(zip(names, whole.rows, strict=True)):
                original = originals.pop(name, None)
                if original is not None:
                    original = whole.layout.rows_of(original, index, self._groups.shard.rank).clone()
                params[name] = param = self._make_param(name, trainable[name], rows, original, wires[name])
                if isinstance(whole, CodedParameters):  # what the optimizer changes is beside the parameter
                    param.model_rows, param.quantized_rows, param.dequantized_rows = (
                        rows,
                        whole.seen[index],
                        partial(whole.shown, index),
                    )
        return [params[name] for name in trainable], everything

    def _make_param(
        self, name: str, parameter: nn.Parameter, rows: Tensor, master: Tensor | None, wire: torch.dtype
    ) -> ShardedParam:
        row_spec = self._groups.row_spec(parameter)
        spec = row_spec or getattr(parameter, "_spec", None)
        if master is not None:
            if self._has_copies and master.device.type != "cpu":
                master = master.cpu().pin_memory()
            return ShardedParam(name, parameter, _owner_of(parameter, master, spec), spec, wire, model_rows=rows)
        if row_spec is None and not self._keeps_means_apart(parameter, wire):
            return ShardedParam(name, parameter, parameter, spec, wire)
        mine = local(parameter) if row_spec is None else rows
        return ShardedParam(name, parameter, _owner_of(parameter, mine, spec), spec, wire)

    def _keeps_means_apart(self, parameter: nn.Parameter, wire: torch.dtype) -> bool:
        """Whether a mean must not lie where autograd adds to it (stage 0): it could not be reduced once more as if it
        were a gradient, since it is not its own mean (sums over cp), or not known as one (it is not in its bucket)."""
        groups = self._groups
        return groups.size > 1 and (groups.num_parts > 1 or self._has_wire or wire != parameter.dtype)


def _owner_of(parameter: nn.Parameter, rows: Tensor, spec: DTensorSpec | None) -> nn.Parameter:
    """What the optimizer has instead of a parameter, with its attributes: pipelines mark what stages share."""
    owner = as_parameter(rows, spec)
    vars(owner).update({ROWS_OF if key == "fastpar_layout" else key: x for key, x in vars(parameter).items()})
    return owner


class Connection:
    """Watches the parameters of some params.

    model    whose modules are looked at; None: there is none, and parameters alone are watched
    release  called before rows that other ranks may be reading are written to; collective
    """

    def __init__(self, model: nn.Module | None, params: Sequence[ShardedParam], release: Callable[[], None]) -> None:
        self._release = release
        # Detached: `.data = value` of a DTensor gives its local part, the same object, other memory.
        homes = [(param, _memory(param.parameter).detach()) for param in params]
        self._homes = [(param, home, home.data_ptr()) for param, home in homes]
        self._data = DataOfDTensors((param.name, param.parameter) for param in params)
        names = [param.name for param in params]
        places = {} if model is None else places_of(model, names)
        self._places = [
            (param, module._parameters, attribute)
            for param in params
            for module, attribute in places.get(param.name, [])
        ]

    def check(self) -> bool:
        """Bring back what has gone astray; returns whether values were among that. Raises RuntimeError, naming the
        parameter, for another dtype, shape or device, and where `.data` of a DTensor was set.
        """
        self._data.check()
        astray: dict[str, tuple[ShardedParam, Tensor, nn.Parameter]] = {}
        for param, home, pointer in self._homes:  # whose memory is held here, and is nobody else's
            inner: Any = param.parameter
            if (inner._local_tensor if isinstance(inner, DTensor) else inner).data_ptr() != pointer:
                astray[param.name] = param, home, param.parameter
        homes = {param.name: home for param, home, _ in self._homes}
        for param, held, attribute in self._places:
            found = held[attribute] if attribute in held else None  # noqa: SIM401  (torch.jit's have no `get`)
            if found is not None and found is not param.parameter:
                astray[param.name] = param, homes[param.name], found
        return bool(astray) and not _is_in_functional_call() and self._bring_back(list(astray.values()))

    def _bring_back(self, astray: Sequence[tuple[ShardedParam, Tensor, nn.Parameter]]) -> bool:
        for param, home, found in astray:
            check_alike(param.name, home, _memory(found))
        changed = [each for each in astray if not torch.equal(each[1], _memory(each[2]))]
        if changed:
            self._release()
        for param, home, found in changed:
            take_values(param, home, _memory(found))
        for param, home, _ in astray:
            set_local(param.parameter, home)
        homes = {param.name: home for param, home, _ in astray}
        for param, held, attribute in self._places:
            replacement = held.get(attribute)  # None: it was taken out of the module, as prune.remove does
            if replacement is not None and replacement is not param.parameter:
                held[attribute] = param.parameter
                _set_aside(replacement, param.name, homes[param.name])
        return bool(changed)


def _set_aside(replacement: nn.Parameter, name: str, home: Tensor) -> None:
    """A parameter whose values were taken: whoever holds it sees what the model has. It gets no gradients."""
    set_local(replacement, home)
    vars(replacement)["fastpar_set_aside"] = name
    _refuse_to_step_what_is_set_aside()


@functools.cache
def _refuse_to_step_what_is_set_aside() -> None:
    def check(optimizer: Any, *_: Any) -> None:
        for parameter in [x for group in optimizer.param_groups for x in group["params"]]:
            if (name := getattr(parameter, "fastpar_set_aside", None)) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} would step a parameter that was put in the place of {name} after "
                    "fastpar.zero.shard, which took its values and goes on with its own: this one has no gradients. "
                    "Copy into parameters, or make the optimizer after the first forward with the new ones"
                )

    # A compiler that looks into groups of parameters takes none whose gradient is a DTensor and which is none itself.
    register_optimizer_step_pre_hook(partial(uncompiled, check))


def _is_in_functional_call() -> bool:
    """Whether torch.func.functional_call runs a module, which has other tensors for that long and gets its own back."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def _memory(parameter: Any) -> Tensor:
    found: Tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
    return found


def synchronise_values(
    model: nn.Module | None, parts: Sequence[tuple[dict[str, nn.Parameter], Groups]], sync_weights: str
) -> None:
    """Give all ranks of each group its rank 0's values, for the model's buffers too. Collective: one broadcast a
    tensor. `sync_weights`: "check" raises ValueError where ranks differ, "broadcast" warns; "none": nothing."""
    if sync_weights == "none":
        return
    tensors = [{name: local(parameter) for name, parameter in named.items()} for named, _ in parts]
    if model is not None:
        tensors[0] |= {name: local(x) for name, x in model.named_buffers() if x.numel() > 0}
    differing: list[str] = []
    for values, (_, groups) in zip(tensors, parts, strict=True):
        for comm in groups.everyone():
            for name, x in values.items():
                found = comm.broadcast(x, 0)
                if not _are_equal(found, x):
                    differing.append(name)
                if sync_weights == "broadcast":
                    x.copy_(found)
    for comm in [comm for _, groups in parts for comm in groups.everyone()]:
        differing = union(differing, comm)
    if differing:
        shown = ", ".join(differing[:4]) + (", ..." if len(differing) > 4 else "")
        text = f"ranks that average gradients have different values of {shown}"
        if sync_weights == "check":
            raise ValueError(f"{text}: seed every rank alike before building the model, or load the same weights")
        warnings.warn(f"{text}: rank 0's are taken", stacklevel=5)


def cast_buffers(model: nn.Module | None, dtype: torch.dtype | None) -> None:
    """Give the floating-point buffers of a model a dtype; None: they keep theirs."""
    if model is None or dtype is None:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, whatever the dtype: NaN is like NaN."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
