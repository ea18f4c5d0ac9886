"""Hooks and methods that data parallelism puts into a model and an optimizer, and the calls that they watch.

Note: copies. `copy.deepcopy(model)` (an average of weights, say) copies a module's hooks and attributes. A copy has no
data parallelism: what is called for another module than the one it was made for does nothing, or what torch does. In
stage 3 a copy has shards as the model has, gathers them for each module that runs, and frees them after it: enough for
averages of weights and their evaluation.

Note: moments in backward. The backward of a call begins when the gradient of one of its outputs is there: a hook on the
tensors. It ends when the gradients of all its inputs are: a hook on the tensor where there is one input that needs a
gradient, which costs least and lets the module change it in place; for several inputs an identity that all of them go
through, since the gradient of a tensor that other layers use too (what a decoder's layers attend to) is complete much
later than this call's part in it. (Not for what lies in a list or a dict, which a module may write to: there the hook
is on the tensors.) A call without such inputs ends with the backward pass.

Note: results. They may be in what a module returns, in attributes of it and of the modules within (a balance loss), and
in what it was given. Where there is none, somebody may have it in another way, or there is none: the parameters stay
unsharded until backward has ended.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from fastpar.comm import Communicator
from fastpar.mesh.grid import TENSOR_GRID_DIMS
from fastpar.precision import Precision
from fastpar.tensor.grid_layout import GridLayout
from fastpar.tensor.parameter import ParameterLayout

if TYPE_CHECKING:
    from fastpar.zero.param_group import ParamGroup
    from fastpar.zero.stage3 import Stage3


class ForwardHook:
    """A forward (pre-)hook of one module, called with what torch calls such a hook with; nothing for a copy of it."""

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        self._module, self._call = weakref.ref(module), call

    def __call__(self, module: Any, *args: Any) -> Any:
        return self._call(module, *args) if self._module() is module else None

    def __deepcopy__(self, memo: Any) -> ForwardHook:
        return self

    def __reduce__(self) -> Any:
        return _nothing, ()


class CastInputs:
    """Floating-point inputs of the model in the dtype of its parameters: a forward pre-hook, of copies too."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(self._cast, args), tree_map(self._cast, kwargs)

    def _cast(self, x: Any) -> Any:
        return x.to(self._dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


class Autocast:
    """Runs the model's forward under autocast: `enter` and `leave` are hooks, of copies too."""

    def __init__(self, precision: Precision, device_type: str) -> None:
        self._precision, self._device_type = precision, device_type
        self._entered: list[Any] = []

    def enter(self, *_: Any) -> None:
        self._entered.append(self._precision.autocast(self._device_type))
        self._entered[-1].__enter__()

    def leave(self, *_: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)


def hook_casts(model: nn.Module, precision: Precision, device: str) -> list[Any]:
    """Let the model run in a precision: with inputs in the dtype of its parameters, under autocast. Returns handles."""
    handles: list[Any] = []
    if precision.param is not None:
        handles.append(model.register_forward_pre_hook(CastInputs(precision.param), with_kwargs=True))
    if precision.compute is not None:
        autocast = Autocast(precision, device)
        handles.append(model.register_forward_pre_hook(autocast.enter))
        handles.append(model.register_forward_hook(autocast.leave, always_call=True))
    return handles


class ZeroGrad:
    """`zero_grad` of a module or an optimizer, which drops what was reduced and summed, too: `forget`, called with
    `set_to_none`."""

    def __init__(self, owner: Any, forget: Callable[[bool], None]) -> None:
        self._owner, self._forget = weakref.ref(owner), forget
        self._before = vars(owner).get("zero_grad")

    def __call__(self, set_to_none: bool = True) -> None:
        uncompiled(self._call, set_to_none)

    def _call(self, set_to_none: bool) -> None:
        owner = self._owner()
        if owner is None:
            return
        self._forget(set_to_none)
        if self._before is not None:
            self._before(set_to_none)
        else:
            type(owner).zero_grad(owner, set_to_none)

    def remove(self) -> None:
        owner = self._owner()
        if owner is not None and vars(owner).get("zero_grad") is self:
            del owner.zero_grad
            if self._before is not None:
                owner.zero_grad = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner: Any = self._owner()
        return functools.partial(type(owner).zero_grad, memo.get(id(owner), owner))

    def __reduce__(self) -> Any:
        owner: Any = self._owner()
        return functools.partial, (type(owner).zero_grad, owner)


class LoadStates:
    """`load_state_dict` of an optimizer, whose states are rows: calls `load` with the optimizer's own, and what it was
    given."""

    def __init__(self, owner: Any, load: Callable[..., None]) -> None:
        self._owner, self._load = weakref.ref(owner), load
        owner.load_state_dict = self

    def __call__(self, state_dict: Any) -> None:
        owner: Any = self._owner()
        self._load(owner, functools.partial(type(owner).load_state_dict, owner), state_dict)

    def remove(self) -> None:
        owner = self._owner()
        if owner is not None and vars(owner).get("load_state_dict") is self:
            del owner.load_state_dict

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner: Any = self._owner()
        return functools.partial(type(owner).load_state_dict, memo.get(id(owner), owner))

    def __reduce__(self) -> Any:
        owner: Any = self._owner()
        return functools.partial, (type(owner).load_state_dict, owner)


def _nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    return None


_AT_REST = "_fastpar_copy_at_rest"


class OnCopy:
    """A hook of stage 3 on a copy: "_before" gathers a module's own parameters, "_after" puts the shards back;
    the others do nothing. Collective, as forward is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._name == "_before" and _AT_REST not in vars(module):
            held = {name: x for name, x in module._parameters.items() if isinstance(x, DTensor)}
            vars(module)[_AT_REST] = held
            for name, x in held.items():
                _register(module, name, _whole(name, x))
        elif self._name == "_after":
            for name, x in vars(module).pop(_AT_REST, {}).items():
                _register(module, name, x)


def nothing_on_copy(*_: Any) -> None:
    """`unshard` and `reshard` of a copy, which gathers by itself."""


def _whole(name: str, x: Any) -> nn.Parameter:
    if any(name == "tp" or name in TENSOR_GRID_DIMS for name in x.device_mesh.mesh_dim_names or ()):
        raise RuntimeError(
            f"{name} is split by tensor parallelism as well: a copy of the model can hold values, and cannot run. Load "
            "them into a model, with load_state_dict"
        )
    with torch.no_grad():
        whole = nn.Parameter(x.full_tensor(), requires_grad=x.requires_grad)
    if whole.requires_grad:
        whole.register_hook(partial(_refuse_to_train, name))
    return whole


def _refuse_to_train(name: str, _: Tensor) -> None:
    raise RuntimeError(
        f"a gradient of {name} was computed in a copy of a model in stage 3, whose shards no gradient comes to: run "
        "the copy under torch.no_grad() or freeze it (copy.requires_grad_(False)); to train it, copy the model before "
        "shard(...) and shard the copy, or take stage=2"
    )


def _register(module: nn.Module, name: str, parameter: Any) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:  # torch's recurrent layers keep a list of their weights
        setattr(module, name, parameter)


_DEPTH = 3  # of objects in objects
_OF_MODULES = frozenset(vars(nn.Module()))
# What parallel modules have in attributes by the dozen, each of which leads to hundreds of objects of its transport.
_WITHOUT_RESULTS = (
    type,
    nn.Module,
    ParameterLayout,
    GridLayout,
    Communicator,
    ProcessGroup,
    DeviceMesh,
    RemovableHandle,
)


def is_under_compiler() -> bool:
    """In code that torch.compile traces, and in what runs between its pieces. (To disable always would wrap anew at
    every call.)"""
    return torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """`call(*args)`, of which torch.compile compiles nothing where it is called, as by a backward pass, from a function
    that is compiled."""
    return (torch.compiler.disable(_called) if is_under_compiler() else _called)(call, *args)


def _called(call: Callable[..., Any], *args: Any) -> Any:
    compiled_autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        raise RuntimeError(
            "compiled autograd puts gradients into `.grad` after ZeRO's hooks have run, which would miss them: call "
            "backward() outside of it, with torch._dynamo.config.compiled_autograd = False"
        )
    return call(*args)


def refuse_to_pickle() -> NoReturn:
    """For what a model in stage 3 has: of which this rank's file would have no more than its own part."""
    raise TypeError(
        "a model in stage 3 cannot be pickled, which would have this rank's shards: save zero.state_dict() or "
        "model.state_dict(), or torch.save the model after zero.detach()"
    )


class UncompiledHook:
    """A hook that torch.compile does not look into: the model is compiled in pieces between hooks.

    prepare   called behind the hook where compiled code follows
    """

    def __init__(self, hook: Callable[..., Any], prepare: Callable[[], None] = lambda: None) -> None:
        self._hook, self._prepare = hook, prepare

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_under_compiler():
            return torch.compiler.disable(self._call_and_prepare)(*args, **kwargs)
        return self._hook(*args, **kwargs)

    def _call_and_prepare(self, *args: Any, **kwargs: Any) -> Any:
        result = self._hook(*args, **kwargs)
        self._prepare()
        return result

    def __reduce__(self) -> Any:
        refuse_to_pickle()

    def __deepcopy__(self, memo: Any) -> Any:
        return OnCopy(self._hook.func.__name__) if isinstance(self._hook, partial) else OnCopy("")


class ByHand:
    """`unshard` or `reshard` of a module."""

    def __init__(self, call: Callable[..., None], *args: Any) -> None:
        self._call, self._args = call, args

    def __call__(self, *args: Any) -> None:
        self._call(*self._args, *args)

    def __deepcopy__(self, memo: Any) -> Any:
        return nothing_on_copy


class UnshardedCapture:
    """Keeps a unit whole while a layer of it is recomputed, whose hooks lie outside of what is run again: what
    fastpar.recompute calls a capture."""

    def __init__(self, stage3: Stage3, unit: ParamGroup) -> None:
        self._stage3, self._unit = stage3, unit

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """Called while a layer runs; layers of one chain have their captures in common."""
        return partial(self._stage3.kept_unsharded, self._unit) if self._stage3.is_running(self._unit) else nullcontext

    def __deepcopy__(self, memo: Any) -> Any:
        return _NoCapture()


class _NoCapture:
    """The capture of a copy, which captures nothing."""

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext


class ForwardCall:
    """One call of a module of a unit, with gradients. It lives as long as the graph.

    begin, end   what to do when its backward begins and ends; both may come more than once, and `end` never
    previous     the call before it in the same forward pass
    number       of the forward pass
    """

    __slots__ = ("__weakref__", "_begin", "_end", "_previous", "has_inputs", "number", "unit")

    def __init__(
        self,
        unit: ParamGroup,
        number: int,
        previous: ForwardCall | None,
        begin: Callable[[ForwardCall], None],
        end: Callable[[ForwardCall], None],
    ) -> None:
        self.unit, self.number = unit, number
        self._previous = None if previous is None else weakref.ref(previous)
        self._begin, self._end = begin, end
        self.has_inputs = False  # that need gradients

    @property
    def previous(self) -> ForwardCall | None:
        """None too where its graph is gone."""
        return None if self._previous is None else self._previous()

    def watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """See to it that `end` is called. Returns changed arguments, or None: they stay as they are."""
        leaves, structure = tree_flatten((args, kwargs))
        found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.has_inputs = bool(found)
        if not found:
            return None
        tensors = {id(leaves[i]): leaves[i] for i in found}
        if len(tensors) == 1:
            leaves[found[0]].register_hook(self._ended)
            return None
        if any(_is_mutable(x) for x in (*args, *kwargs.values())):  # the module may write to it, not to a copy of it
            torch.autograd.graph.register_multi_grad_hook(list(tensors.values()), self._ended)
            return None
        for i, x in zip(found, _Boundary.apply(self, *(leaves[i] for i in found)), strict=True):
            leaves[i] = x
        changed: tuple[Any, Any] = tree_unflatten(leaves, structure)
        return changed

    def watch_outputs(self, *outputs: Any) -> bool:
        """See to it that `begin` is called. Returns whether anything was found that has a gradient."""
        is_any = False
        for x in (x for output in outputs for x in tensors_in(output)):
            if x.requires_grad and x.grad_fn is not None:
                is_any = True
                x.register_hook(self._began)
                if x._base is not None and x._base.grad_fn is not None:  # in-place changes of views replace their node
                    x._base.grad_fn.register_prehook(self._began)
        return is_any

    def _began(self, _: Any) -> None:
        uncompiled(self._begin, self)

    def _ended(self, _: Any) -> None:
        uncompiled(self._end, self)


class Frame(NamedTuple):
    """A call that is running."""

    module: nn.Module | None
    call: ForwardCall | None  # with gradients


class UnitState:
    """The calls and claims that keep a unit unsharded."""

    def __init__(self) -> None:
        self.running: list[Frame] = []
        self.in_backward: set[ForwardCall] = set()
        self.is_pinned = False
        self.is_wanted = False  # results are where nobody sees their gradients come: whole until backward has ended
        self.is_in_graph = False  # that a backward pass has made of itself (create_graph), until backward through it
        self.open_calls: weakref.WeakSet[ForwardCall] = weakref.WeakSet()  # whose backward has not ended

    @property
    def is_used(self) -> bool:
        return bool(self.running or self.in_backward or self.is_pinned or self.is_wanted or self.is_in_graph)


class _Boundary(torch.autograd.Function):
    """Identity, whose backward runs when the gradients of all tensors are there."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call._ended(None)
        return (None, *grads)


class UnitOrder:
    """The units in the order in which the last complete forward pass ran them; before the first, as given."""

    def __init__(self, units: Sequence[ParamGroup]) -> None:
        self._expected, self._position = list(units), 0
        self._seen: list[ParamGroup] = []

    def begin(self) -> None:
        """A forward pass begins."""
        self._seen, self._position = [], 0

    def end(self) -> None:
        """The pass has ended."""
        if self._seen:
            self._expected = self._seen

    def next_after(self, unit: ParamGroup) -> ParamGroup | None:
        """The unit that probably runs after this one, which is running now; None where there is none."""
        self._seen.append(unit)
        rest = self._expected[self._position :]
        if unit not in rest:
            return None
        self._position += rest.index(unit) + 1
        return self._expected[self._position] if self._position < len(self._expected) else None


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in what a module returned: in containers that torch knows, dataclasses, and attributes of objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth > 0 and not isinstance(leaf, _WITHOUT_RESULTS):
            names = [field.name for field in dataclasses.fields(leaf)] if dataclasses.is_dataclass(leaf) else []
            held = [getattr(leaf, name) for name in names] or list(getattr(leaf, "__dict__", {}).values())
            for x in held:
                yield from tensors_in(x, depth - 1)


def results_in(modules: Sequence[nn.Module]) -> list[Any]:
    """Attributes that modules may have put results into."""
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if name not in _OF_MODULES and isinstance(value, (Tensor, list, tuple, dict))
    ]


def _is_mutable(value: Any) -> bool:
    """Whether a module may write to an argument that has tensors in it."""
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def containers(args: Any, kwargs: Any) -> list[Any]:
    """Arguments that a module may have put results into."""
    return [x for x in (*args, *kwargs.values()) if x is not None and not isinstance(x, (Tensor, int, float, str))]
