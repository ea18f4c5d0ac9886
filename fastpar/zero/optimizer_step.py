"""The optimizer's step, in phases, on the object that the user has.

Note: hooks. All of it happens in a step pre-hook, after which torch runs the step proper: on a stand-in without
parameters, since many optimizers count steps in their groups or in themselves, and would count each twice
(`_spent`). That keeps the object (LR schedulers wrap its `step`, GradScaler calls it, others hold it), lets a step be
skipped, and lets it be taken in pieces, each of which begins with the counts of the first (`KeptCounts`).

Note: model_param and optim_param (of a `ShardedParam`). Between steps `param_groups` and `state` hold the model's own
parameters, which programs look for there (torch.distributed.checkpoint.state_dict does, and
`optimizer.state[model.weight]`). While the optimizer runs they hold what it updates: rows of them, or wider copies. A
copy is shown among the states as "master_param", so that what saves states saves it.

Note: plain tensors. The optimizers of torch that work on every element for itself get the rows of this rank as plain
tensors, since DTensor's dispatch costs more than the update of a small tensor, and fused kernels refuse lists of both.
Others (torch's Muon, one's own) get the DTensors, and see whole matrices in their means and norms, as far as DTensor
implements what they call (torch 2.13 does not for Adafactor); numbers that they read are those of the whole
(`reading_whole`). One with `is_elementwise = True` gets plain rows, and one with `takes_dtensors = True` (those of
fastpar.optim) is taken at its word. Any other is tried first: see optimizer_trial.py.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fastpar.tensor.optimizer_numbers import reading_whole
from fastpar.tensor.optimizer_trial import copied, is_elementwise
from fastpar.zero.flat import FlatLayout
from fastpar.zero.groups import Groups, as_dtensor, local, own_storage
from fastpar.zero.hooks import is_under_compiler
from fastpar.zero.sharded_param import ShardedParam

SCALARS = ("step", "eta", "mu", "mu_product")  # states of torch's optimizers that are one number for any parameter
SCALER_SCALARS = ("grad_scale", "found_inf", "grad_factor")  # attributes of an optimizer, for one step
MASTER = "master_param"  # among the states of a parameter: its master weights


class PlainRow(NamedTuple):
    """A parameter in an optimizer's groups, what the optimizer updates in its place, and this rank's rows of that."""

    shown: nn.Parameter
    optim_param: Any
    rows: Tensor
    states: dict[str, Any] | None  # with plain tensors in the place of DTensors


class PlainRows:
    """The parameters and states of an optimizer's groups as plain tensors. Most updates write to tensors in place, so
    that what one step was given serves the next."""

    def __init__(
        self, params: list[list[Any]], kept: list[dict[str, Any] | None], optim_params: Mapping[int, nn.Parameter]
    ) -> None:
        self._shown, self._kept = [*itertools.chain(*params)], kept
        self._kept_values = _values_of(kept)
        self.params: list[list[Any]] = []  # of each group
        self.rows: list[PlainRow] = []
        states = iter(kept)
        for group in params:
            self.params.append([])
            for shown in group:
                optim_param, of_shown = optim_params.get(id(shown), shown), next(states)
                rows = optim_param._local_tensor if isinstance(optim_param, DTensor) else optim_param
                self.params[-1].append(rows)
                if rows is not shown:
                    plain = None if of_shown is None else {key: _plain(value) for key, value in of_shown.items()}
                    self.rows.append(PlainRow(shown, optim_param, rows, plain))
        self._plain_values = _values_of([row.states for row in self.rows])

    def is_of(self, params: list[list[Any]], kept: list[dict[str, Any] | None]) -> bool:
        """Whether groups and states hold what they held before."""
        return (
            _are_same([*itertools.chain(*params)], self._shown)
            and [*map(len, params)] == [*map(len, self.params)]
            and _are_same(kept, self._kept)
            and _are_same(_values_of(kept), self._kept_values)
            and all(_plain(row.optim_param) is row.rows for row in self.rows)
        )

    def are_states(self, found: list[dict[str, Any] | None]) -> bool:
        """Whether an update has left all states where they were: `found` are those of `rows`."""
        return _are_same(found, [row.states for row in self.rows]) and _are_same(_values_of(found), self._plain_values)


def _plain(x: Any) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x


def _values_of(states: Sequence[dict[str, Any] | None]) -> list[Any]:
    return [value for each in states if each for value in each.values()]


def _are_same(found: Sequence[Any], known: Sequence[Any]) -> bool:
    return len(found) == len(known) and all(map(is_, found, known))


@contextmanager
def _without_offsets(tensors: Sequence[Any]) -> Iterator[None]:
    """DTensors whose parts have storages of their own in the block, in the same memory: torch.compile, which some
    optimizers put around their update, takes no others."""
    parts = [(x, x._local_tensor) for x in tensors if isinstance(x, DTensor) and x._local_tensor.storage_offset()]
    for x, part in parts:
        x._local_tensor = own_storage(part)
    try:
        yield
    finally:
        for x, part in parts:
            x._local_tensor = part


class Stepper:
    """Puts `phases` into the place of an optimizer's step.

    phases   called with this object by optimizer.step(), without gradient mode; calls `update`, or not
    stepped  called after that
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        phases: Callable[[Stepper], None],
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the model several times in a step, which cannot be sharded")
        self.optimizer, self._phases, self._stepped = optimizer, phases, stepped
        self._is_stepping = self._is_holding = False
        self._optim_params: dict[int, nn.Parameter] = {}  # of model parameters that are updated through others, by id
        self._model_params: dict[int, nn.Parameter] = {}  # the other way round
        self._copies: list[nn.Parameter] = []  # with memory of their own
        self.outputs: set[int] = set()  # ids of optim_params that the optimizer's update rounds to their parameters
        self._own_states: dict[int, dict[str, Any]] = {}  # of these, while others are shown
        self._raw = inspect.unwrap(type(optimizer).step)
        self._is_elementwise = is_elementwise(optimizer)
        self._takes_dtensors = getattr(optimizer, "takes_dtensors", False)
        self._plain_rows: PlainRows | None = None  # of the last step
        self._hook = optimizer.register_step_pre_hook(self._before)
        # Of hooks that come later, too, this is the last: they change what the step is to take, and it takes it
        vars(optimizer)["register_step_pre_hook"] = partial(_register_before, weakref.ref(optimizer), self._hook.id)

    def detach(self) -> None:
        """The optimizer keeps the optim_params."""
        self._hook.remove()
        self._plain_rows = None
        vars(self.optimizer).pop("register_step_pre_hook", None)
        if self._optim_params and not self._is_holding:
            self._hide_copies()
            self._exchange(self._optim_params)
        self._optim_params = {}

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates, in the order of its groups."""
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [self._optim_params.get(id(parameter), parameter) for parameter in held]

    def adopt(self, params: Sequence[ShardedParam], groups: Groups, frozen: Mapping[int, nn.Parameter]) -> None:
        """Give the optimizer what it is to update in the place of the model's parameters, with its part of the states.

        frozen  what modules have at rest instead of parameters that are not trained, by the id of these
        """
        optimizer: Any = self.optimizer
        self._plain_rows = None
        param_of = {id(x): param for param in params for x in (param.parameter, param.sharded)}
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                at_rest = frozen.get(id(parameter), parameter)  # of one whose memory comes and goes
                if at_rest is not parameter:
                    group["params"][index] = at_rest
                    if parameter in optimizer.state:  # of an optimizer that makes states at once, or trained it before
                        states = optimizer.state.pop(parameter)
                        of_rows = getattr(at_rest, "_spec", None)
                        optimizer.state[at_rest] = _cut_states(
                            states, parameter, local(at_rest), of_rows, groups.of(parameter)
                        )
                param = param_of.get(id(parameter))
                if param is None:
                    continue
                model_param, optim_param = param.model_param, param.optim_param
                if model_param is not optim_param:
                    self._optim_params[id(model_param)], self._model_params[id(optim_param)] = optim_param, model_param
                    if param.model_rows is not None:
                        self._copies.append(optim_param)
                if optim_param is not parameter:
                    group["params"][index] = optim_param
                    if parameter in optimizer.state:
                        states = optimizer.state.pop(parameter)
                        optimizer.state[optim_param] = _cut_states(
                            states, param.parameter, local(optim_param), param.spec, groups.of(param.parameter)
                        )
        if hasattr(optimizer, "outputs"):  # the update rounds to these in its own pass
            rounded = [param for param in params if param.is_output]
            optimizer.outputs.update({param.optim_param: param.model_rows for param in rounded})
            self.outputs |= {id(param.optim_param) for param in rounded}

    @contextmanager
    def holding_optim_params(self) -> Iterator[None]:
        """param_groups and state have the optim_params in the block, and the model's parameters after it."""
        if self._is_holding:
            yield
            return
        with outside_inference_mode():
            if self._optim_params:  # before `adopt` there are none
                self._exchange(self._optim_params)
            self._is_holding = True
            self._hide_copies()
            try:
                yield
            finally:
                self._show_copies()
                self._is_holding = False
                if self._model_params:
                    self._exchange(self._model_params)

    def _exchange(self, others: dict[int, nn.Parameter]) -> None:
        state: dict[Any, Any] = self.optimizer.state
        for group in self.optimizer.param_groups:
            group["params"][:] = [others.get(id(parameter), parameter) for parameter in group["params"]]
        entries = [(others.get(id(key), key), value) for key, value in state.items()]
        state.clear()
        state.update(entries)

    def _show_copies(self) -> None:
        """Show copies in dicts of their own: what state_dict() gives has these, and keeps them."""
        for optim_param in self._copies:
            states = self.optimizer.state.get(optim_param)
            if states and (local(optim_param).untyped_storage().nbytes() > 0 or local(optim_param).numel() == 0):
                self._own_states[id(optim_param)] = states
                self.optimizer.state[optim_param] = {
                    **states,
                    MASTER: optim_param.detach(),
                }  # not of one that is in a file

    def _hide_copies(self) -> None:
        for optim_param in self._copies:
            shown = self.optimizer.state.get(optim_param)
            if shown is not None and MASTER in shown:
                own = self._own_states.pop(id(optim_param), {})  # the same dict as ever: optimizers may hold it
                own.clear()
                own.update({key: value for key, value in shown.items() if key != MASTER})
                self.optimizer.state[optim_param] = own

    def with_gradient(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.grad is not None]

    def update(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """The optimizer's own step, on these parameters (None: all that it has)."""
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        was_stepping, self._is_stepping = self._is_stepping, True  # for a subclass that calls its base's step
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if wanted is None or id(p) in wanted]
            with torch.no_grad(), self._as_it_takes_them():
                self._raw(self.optimizer)
        finally:
            self._is_stepping = was_stepping
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_stepping:
            return None
        if is_under_compiler():  # around the step, which talks to other ranks
            return torch.compiler.disable(self._step)(optimizer, args, kwargs)
        return self._step(optimizer, args, kwargs)

    def _step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_stepping = True
        try:
            with outside_inference_mode():
                closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
                loss = None
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
                # An update of plain rows takes them from what the groups show; only masters hide among the states.
                needs_optim_params = self._copies or not self._is_elementwise
                with torch.no_grad(), self.holding_optim_params() if needs_optim_params else _nothing():
                    self._bring_scalars()
                    self._phases(self)
        finally:
            self._is_stepping = False
        self._stepped()
        if hasattr(optimizer, "grad_factor"):  # of this step, also where it was skipped
            optimizer.grad_factor = optimizer.found_inf = None
        return (_spent(optimizer), *(() if closure is None else (lambda: loss,))), {}

    def _bring_scalars(self) -> None:
        """Bring what a scaler has set on a device to masters in the host's memory. The host waits, as it is
        about to read them; torch's fused optimizers would send them without."""
        found = {name: getattr(self.optimizer, name, None) for name in SCALER_SCALARS}
        elsewhere = {name: x for name, x in found.items() if isinstance(x, Tensor) and x.device.type != "cpu"}
        if elsewhere and any(local(x).device.type == "cpu" for x in self.parameters() if x.requires_grad):
            for name, value in elsewhere.items():
                setattr(self.optimizer, name, value.cpu())

    @contextmanager
    def _as_it_takes_them(self) -> Iterator[None]:
        """Parameters and gradients as plain rows, or as DTensors that look whole."""
        if self._is_elementwise:
            with self._as_plain_tensors():
                yield
        elif self._takes_dtensors:
            yield
        else:
            held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            with reading_whole(), _without_offsets([*held, *(parameter.grad for parameter in held)]):
                yield

    @contextmanager
    def _as_plain_tensors(self) -> Iterator[None]:
        """param_groups and state with local tensors in the place of DTensors, and of parameters that are updated
        through others; states that are DTensors stay with these."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        before = [group["params"] for group in groups]
        kept = [state.get(shown) for params in before for shown in params]
        plain = self._plain_rows
        if plain is None or not plain.is_of(before, kept):
            plain = self._plain_rows = PlainRows(before, kept, self._optim_params)
        found: list[dict[str, Any] | None] = []
        try:
            for group, params in zip(groups, plain.params, strict=True):
                group["params"] = params[:]
            for _, optim_param, rows, states in plain.rows:
                if rows is not optim_param:
                    rows.grad = _plain(optim_param.grad)
                if states is not None:
                    state[rows] = states
            yield
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params
            for _, optim_param, rows, _ in plain.rows:
                found.append(state.pop(rows, None))
                if rows is not optim_param:
                    rows.grad = None
            if not plain.are_states(found):
                self._plain_rows = None
                for (shown, optim_param, rows, _), states in zip(plain.rows, found, strict=True):
                    if states is not None:
                        _take_states(state[shown], states, rows, getattr(optim_param, "_spec", None))


def _take_states(kept: dict[str, Any], found: dict[str, Any], rows: Tensor, spec: DTensorSpec | None) -> None:
    """Let the states of a parameter be what an update of its rows has made of them."""
    for key in [key for key in kept if key not in found]:
        del kept[key]
    for key, value in found.items():
        if _plain(kept.get(key)) is not value:
            is_rows = isinstance(value, Tensor) and value.shape == rows.shape
            kept[key] = as_dtensor(value, spec) if is_rows else value


def _cut_states(
    states: Mapping[str, Any], parameter: Tensor, mine: Tensor, spec: DTensorSpec | None, groups: Groups
) -> dict[str, Any]:
    """This rank's rows of states that have the parameter's shape, as `mine` and `spec` are those of the parameter;
    `groups`: the ranks that share it."""
    shape = local(parameter).shape
    layout = FlatLayout([shape], groups.shard.size)
    cut: dict[str, Any] = {}
    for key, value in states.items():
        if isinstance(value, Tensor) and local(value).shape == shape and key not in SCALARS:
            rows = local(value)
            if mine.numel() != rows.numel():  # persistent parameters are whole
                rows = layout.rows_of(rows, 0, groups.shard.rank)
            cut[key] = as_dtensor(rows.to(mine.device).clone().view(mine.shape), spec)
        else:
            cut[key] = value
    return cut


def _register_before(owner: Any, last: int, hook: Any) -> Any:
    """An optimizer's `register_step_pre_hook` that keeps the hook with the number `last` behind all others."""
    optimizer = owner()
    handle = type(optimizer).register_step_pre_hook(optimizer, hook)
    optimizer._optimizer_step_pre_hooks.move_to_end(last)
    return handle


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copied(value) for key, value in group.items() if key != "params"}


def _spent(optimizer: Any) -> Any:
    """An optimizer of the same kind without parameters and hooks, on which a step changes nothing of this one."""
    spent = object.__new__(type(optimizer))
    vars(spent).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    vars(spent).update({key: OrderedDict() for key in vars(spent) if key.startswith("_optimizer_")})  # hooks
    of_no_parameter = {key: copied(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    spent.state = defaultdict(dict, of_no_parameter)
    spent.param_groups = [{**_options(group), "params": []} for group in optimizer.param_groups]
    return spent


class KeptCounts:
    """What a step may change in an optimizer itself and in the options of its groups, to begin another with."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._groups = [(group, dict(group), _options(group)) for group in optimizer.param_groups]
        self._own = {key: value for key, value in vars(optimizer).items() if isinstance(value, (int, float))}

    def put_back(self) -> None:
        vars(self._optimizer).update(self._own)
        for group, held, options in self._groups:
            for key, value in options.items():
                if isinstance(value, Tensor):
                    held[key].copy_(value)
                group[key] = held[key] if isinstance(value, Tensor) else copied(value)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """What is made in the block under torch.inference_mode(), such as states, may be changed without it, too."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # the first would turn gradients on
        yield
