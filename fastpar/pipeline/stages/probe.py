"""A layered model, tried on a few made-up tokens (or an example) before it is cut, and each part of it after.

A part of a model may need more than the hidden states: a tensor that an early module has made for later ones (a second
residual stream, shared keys and values), routers' logits of all layers for a balance loss, ids from which a mask is
made. Nothing would fail; the model would be another one. So the whole model runs once on two short sequences, and what
each unit is called with is written down (`record`). Then the part runs on what it would have received, and every
module of it must be called with the same, bit for bit but for rounding, and the part return the same (`try_part`).

The runs are made on copies of the modules that share the parameters, have buffers of their own and none of the
caller's hooks. Random numbers are drawn from the same seeds in both, so dropout may be on. This costs a forward of ten
tokens of the whole model, and one of the part. On the meta device there are no values: shapes are compared, and what
layers return is found.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpar.contracts.containers import with_own_containers
from fastpar.contracts.rehearsal import Example
from fastpar.pipeline.stages.absent import Absent
from fastpar.pipeline.stages.architecture import ModelUnit
from fastpar.pipeline.stages.calling import Convention, reduce_output
from fastpar.pipeline.stages.carve import shallow_copy
from fastpar.pipeline.stages.decisions import IdDecisions
from fastpar.pipeline.stages.stream import ArrivalNote, EnterStream, main_of, template_of
from fastpar.pipeline.stages.weighting import LossMean

_BATCH, _LENGTH = 2, 5
_OF_MODULES = frozenset(vars(nn.Module()))  # not of their code
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


class PartError(ValueError):
    """A part does not do what the whole model does there."""


@dataclass
class UnitCall:
    """One call of a unit: the hidden states, the other tensors by name, and the structure of what it returned (with
    the number of dims, where that is a tensor)."""

    main: Any
    sides: dict[str, Tensor]
    returned: Any = None
    num_dims: int = 0


@dataclass
class Recording:
    """What the whole model did with its inputs: its units' calls by path, and its output (or loss)."""

    inputs: Tensor
    keywords: dict[str, Any]
    labels: Any
    calls: dict[str, UnitCall] = field(default_factory=dict)
    output: Any = None


def record(
    model: nn.Module, units: Sequence[ModelUnit], convention: Convention, example: Example | None = None
) -> Recording | None:
    """Run the whole model; None, with a warning, where it cannot run on made-up inputs.

    Raises ValueError for a unit that is called several times or not at all, and what the model raises on an example.
    """
    given = inputs_for(model, units, convention, example)
    if isinstance(given, str):
        return None
    inputs, keywords = given
    if inputs.is_meta and "attention_mask" in convention.keywords.names:
        # Hugging Face reads numbers to make one.
        keywords.setdefault("attention_mask", torch.zeros(_BATCH, 1, _LENGTH, _LENGTH, device="meta"))
    recording = Recording(inputs, keywords, keywords.pop("labels", inputs))
    whole = hollow_copy(model, model)
    paths = [unit.path for unit in units]
    counts = _watch(whole, paths, recording.calls, inputs.device)
    labels = {"labels": recording.labels} if convention.loss else {}
    try:
        with quiet_trial(inputs):
            recording.output = reduce_output(whole(inputs.clone(), **keywords, **labels), convention.loss)
    except Exception as error:
        if example is not None:
            raise
        warnings.warn(
            f"could not try {type(model).__name__} on made-up inputs, and so not check that its parts compute what it "
            f"does: {type(error).__name__}: {error}",
            stacklevel=4,
        )
        return None
    check_counts(type(model).__name__, counts)
    return recording


def check_counts(name: str, counts: Mapping[str, int]) -> None:
    """ValueError unless every unit was called once."""
    for path, count in counts.items():
        if count == 1:
            continue
        times = "does not call it in a forward" if count == 0 else f"calls it {count} times in a forward"
        raise PartError(
            f"{path} cannot be placed on a part of a pipeline: {name} {times}, where each unit must run once. "
            + ("Switch off what skips it (such as layerdrop)" if count == 0 else "Untie the calls")
            + ", say in the Architecture that it is shared, or list the model's parts as modules "
            "(Partition.of_modules)"
        )


class Findings(NamedTuple):
    """What trying a part has found: whether its first module needs `EnterStream`, and its stream a guard."""

    enters: bool = True
    guards: bool = False


def try_part(
    part: nn.Module,
    module: nn.Module,
    units: Sequence[ModelUnit],
    recording: Recording,
    name: str,
    enter: EnterStream | None,
    decisions: IdDecisions | None = None,
) -> Findings:
    """Run one part on what the whole model had there.

    part       the module of the part, with stand-ins; module: what its hooks belong to
    units      all units of the model; `enter` is for the first of those that are here (None: part 0, or a part without)
    decisions  None: those that the model's own code makes by its ids are noted, and where there are any the part is
               tried once more with other ones, as with other ids

    Raises ValueError where the part does not do what the whole model did.
    """
    if decisions is None:
        noted = IdDecisions(is_turned=False)
        found = try_part(part, module, units, recording, name, enter, noted)
        if noted.count == 0:
            return found
        try:
            other = try_part(part, module, units, recording, name, enter, IdDecisions(is_turned=True))
        except PartError as error:
            if error.__cause__ is not None:  # it has failed, as a check of ids does
                return found
            raise PartError(
                f"{name} does not compute what the whole model does there: the model decides by its ids, which no part "
                "but the first has, what to do with the hidden states. Decide by a keyword input of the batch, which "
                "all parts get, or choose a layout that does this on part 0"
            ) from None
        return Findings(found.enters or other.enters, found.guards or other.guards)
    tried = hollow_copy(part, module)
    here = [unit.path for unit in units if not isinstance(tried.get_submodule(unit.path), Absent)]
    calls: dict[str, UnitCall] = {}
    note = None if enter is None else ArrivalNote(enter)
    if note is not None:
        tried.get_submodule(here[0]).register_forward_pre_hook(note, with_kwargs=True)
    _watch(tried, [unit.path for unit in units], calls, recording.inputs.device)
    if here[:1] != [units[0].path]:
        decisions.watch(tried, [unit.path for unit in units])
    is_first, is_last = here[:1] == [units[0].path], here[-1:] == [units[-1].path]
    inputs = recording.inputs if is_first else recording.calls[here[0]].main
    labels = {"labels": recording.labels} if is_last and recording_has_loss(part) else {}
    following = None if is_last else units[[u.path for u in units].index(here[-1]) + 1].path
    try:
        with quiet_trial(recording.inputs), torch.set_grad_enabled(note is not None):
            given = inputs.clone()
            if note is not None:
                given = given.requires_grad_().clone()  # no leaf, which nobody may change in place
            with decisions:
                output = tried(given, **recording.keywords, **labels)
    except Exception as error:
        raise PartError(
            f"{name} cannot run without the other parts: {type(error).__name__}: {error}. {_ADVICE}"
        ) from error
    if enter is not None and not enter.stream.is_guarded and not _same(given, inputs):
        enter.stream.is_guarded = True
        return try_part(part, module, units, recording, name, enter, decisions)
    expected = recording.output if following is None else recording.calls[following].main
    output = reduce_output(output, False) if following is None else output
    problem = _difference(here, calls, recording, output, expected)
    if problem:
        raise PartError(f"{name} does not compute what the whole model does there: {problem}. {_ADVICE}")
    return Findings(note is not None and note.is_needed, enter is not None and enter.stream.is_guarded)


def check_head(name: str, path: str, recording: Recording, head: nn.Module) -> None:
    """ValueError for a model whose output is not what its head returns: a sharded head computes the loss of that."""
    main = recording.calls[path].main
    with torch.no_grad():
        logits = hollow_copy(head, head)(main)
    if not _same(logits, recording.output):
        raise ValueError(
            f"the forward of {name} does something to the logits after {path} (scales or caps them, or computes a "
            "loss), which a sharded head would leave out: shard_head=False"
        )


_ADVICE = (
    "Give every unit what it needs from the hidden states and the batch alone (switch off what reads other layers, "
    "such as router losses), choose a layout that keeps these modules on one part, have the code between modules "
    "traced (split_points=[...] in the place of a layout), or list the model's parts as modules that pass such tensors "
    "on (Partition.of_modules with edges)"
)


def recording_has_loss(part: nn.Module) -> bool:
    """Whether a part returns the model's loss."""
    return any(getattr(hook, "loss", False) for hook in part._forward_hooks.values())


def _difference(
    here: Sequence[str], calls: Mapping[str, UnitCall], recording: Recording, output: Any, expected: Any
) -> str:
    for path in here:
        if path not in calls:
            return f"{path} is not called"
        own, whole = calls[path], recording.calls[path]
        for name, value in whole.sides.items():
            if name not in own.sides or not _same(own.sides[name], value):
                return f"{path} takes {name}, which depends on modules or inputs of other parts"
        if not _same(own.main, whole.main):
            return f"{path} gets other hidden states"
    if _same(output, expected):
        return ""
    if isinstance(output, Tensor) and output.dim() == 0:
        return (
            f"the loss is {float(output):.6g} and not {float(expected):.6g}, so the model adds something of other "
            "parts to it"
        )
    return "what it returns differs, though its modules were called with the same: something else is read elsewhere"


def _same(one: Any, other: Any) -> bool:
    """Equal but for a few roundings, as kernels may sum in another order."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta or other.is_meta or torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    info = torch.finfo(one.dtype)
    a, b = one.double(), other.double()
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return False
    largest = b[finite].abs().max() if finite.any() else b.new_zeros(())
    return bool((a[finite] - b[finite]).abs().le(largest * info.eps * (16 if info.bits >= 32 else 2)).all())


def inputs_for(
    model: nn.Module, units: Sequence[ModelUnit], convention: Convention, example: Example | None
) -> tuple[Tensor, dict[str, Any]] | str:
    """The first input and the keyword inputs of a trial, or why there are none.

    ValueError for an example whose first input is no tensor.
    """
    keywords: dict[str, Any] = {"use_cache": False} if convention.has_cache else {}
    if example is None:
        inputs = made_up_inputs(model, units)
        if inputs is None or not convention.runs_on_hidden_states:
            name = type(model).__name__
            return f"the forward of {name} needs more than its first input, or no ids there: give example_inputs"
        return inputs, keywords
    args, named = example.copy()
    positional = [name for name in signature(model.forward).parameters if name not in named]
    named |= dict(zip(positional[1:], args[1:], strict=False))  # all but the first by name, as in a step
    first = args[0] if args else named.pop(convention.first, None)
    if not isinstance(first, Tensor) or len(args) > len(positional):
        raise ValueError(
            f"example_inputs must have the first input of {type(model).__name__}, a tensor, in a tuple of inputs or by "
            f"the name {convention.first!r}: later parts of a pipeline get hidden states in its place; got "
            f"{type(first).__name__} and {max(len(args) - 1, 0)} further positional inputs of {len(positional) - 1}"
        )
    return first, keywords | named


def made_up_inputs(model: nn.Module, units: Sequence[ModelUnit]) -> Tensor | None:
    """Ids [2, 5] for a model with an embedding, hidden states [2, 5, H] for one without; None: neither is known."""
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), None)
    if like is None:
        return None
    generator = torch.Generator().manual_seed(0)
    if units[0].kind == "E":
        inside = model.get_submodule(units[0].path).modules()
        rows = [w.shape[0] for m in inside if isinstance(w := getattr(m, "weight", None), Tensor) and w.dim() == 2]
        if not rows:
            return None
        ids = torch.randint(0, rows[0], (_BATCH, _LENGTH), generator=generator)
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        if isinstance(padding, int) and 0 <= padding < rows[0]:
            ids[0, -1] = padding  # a mask that the model makes of ids is one that later parts cannot make
        return ids.to(like.device)
    norms = [getattr(model.get_submodule(unit.path), "weight", None) for unit in units if unit.kind == "N"]
    weight = next((norm for norm in norms if isinstance(norm, Tensor)), None)
    if weight is None:
        return None
    hidden = torch.randn(_BATCH, _LENGTH, weight.shape[-1], generator=generator)
    return hidden.to(device=like.device, dtype=like.dtype)


def find_loss_mean(model: nn.Module, convention: Convention, recording: Recording) -> LossMean:
    """What the model's own loss is the mean of; unknown where there is none, or it cannot be tried."""
    inputs = recording.inputs
    if not convention.loss or inputs.is_meta or inputs.is_floating_point():
        return LossMean()
    whole = hollow_copy(model, model)

    def loss_of(ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
        _seed_trial(0, inputs.device)
        return reduce_output(whole(ids, **recording.keywords, labels=labels, **more), True)

    try:
        with quiet_trial(inputs):
            return LossMean.find(loss_of, inputs, "num_items_in_batch" in convention.keywords)
    except Exception:  # labels of another form
        return LossMean()


# Copies to run


def hollow_copy(module: nn.Module, model: nn.Module) -> nn.Module:
    """Modules of their own around the same parameters: buffers are copies, and of the hooks only fastpar's and those of
    the packages that define the model's classes are there (transformers records routers' logits with some).

    A module that stands in two places becomes two.
    """
    own = {cls.__module__.partition(".")[0] for cls in type(model).__mro__ if issubclass(cls, nn.Module)}
    return _hollow(module, frozenset((own | {"fastpar"}) - {"torch", "__main__"}), {})


def _hollow(module: nn.Module, packages: frozenset[str], memo: dict[int, Any]) -> nn.Module:
    twin = shallow_copy(module)
    # What a forward puts into containers, which several modules may hold to add their losses to, must not stay there.
    # Without what `module.compile()` has set, which runs the module that it was called on.
    own = {name: value for name, value in nn.Module.__getstate__(module).items() if name not in _OF_MODULES}
    twin.__dict__.update({name: with_own_containers(value, memo) for name, value in own.items()})
    for name in _HOOKS:
        kept = {key: hook for key, hook in getattr(module, name).items() if _package_of(hook) in packages}
        twin.__dict__[name] = OrderedDict(kept)
    for name in _HOOK_FLAGS:
        twin.__dict__[name] = OrderedDict(getattr(module, name))
    for name, buffer in module._buffers.items():
        twin._buffers[name] = None if buffer is None else buffer.clone()
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _hollow(child, packages, memo)
    return twin


def _package_of(hook: Any) -> str:
    return (getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]


_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


class quiet_trial:
    """Nothing is remembered: no graph, and the random states are as before. Hooks on all modules of the process do not
    run: profilers would count the trial, and what changes an input would do so twice, as inputs of modules in it are
    those that modules got in another run."""

    def __init__(self, like: Tensor) -> None:
        self._like = like

    def __enter__(self) -> None:
        devices = [self._like.device] if self._like.device.type == "cuda" else []
        self._fork = torch.random.fork_rng(devices=devices)
        self._fork.__enter__()
        self._no_grad = torch.no_grad()
        self._no_grad.__enter__()
        self._hooks = [(hooks, dict(hooks)) for name in _GLOBAL_HOOKS if (hooks := getattr(nn.modules.module, name))]
        for hooks, _ in self._hooks:
            hooks.clear()
        _seed_trial(0, self._like.device)

    def __exit__(self, *error: Any) -> None:
        for hooks, kept in self._hooks:
            hooks.update(kept)
        self._no_grad.__exit__(*error)
        self._fork.__exit__(*error)


def _seed_trial(seed: int, device: torch.device) -> None:
    """Only what `quiet_trial` brings back: torch.manual_seed seeds all devices, and CUDA when it begins."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _watch(model: nn.Module, paths: Iterable[str], calls: dict[str, UnitCall], device: torch.device) -> dict[str, int]:
    """Hooks that write the calls of units down, and draw random numbers from where the unit's place says."""
    counts: dict[str, int] = {}
    for index, path in enumerate(paths):
        counts[path] = 0
        unit = model.get_submodule(path)
        before, after = _watchers(path, index, calls, counts, device)
        unit.register_forward_pre_hook(before, with_kwargs=True)
        unit.register_forward_hook(after)
    return counts


def _watchers(
    path: str, index: int, calls: dict[str, UnitCall], counts: dict[str, int], device: torch.device
) -> tuple[Callable[..., None], Callable[..., None]]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        counts[path] += 1
        main = main_of(args, kwargs)
        sides = {name: t.detach().clone() for name, t in _tensors(args, kwargs) if t is not main}
        calls[path] = UnitCall(main.detach().clone() if isinstance(main, Tensor) else main, sides)
        _seed_trial(2 * index, device)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        main = calls[path].main
        calls[path].returned = template_of(output, tuple(main.shape) if isinstance(main, Tensor) else ())
        calls[path].num_dims = output.dim() if isinstance(output, Tensor) else 0
        _seed_trial(2 * index + 1, device)

    return before, after


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for position, value in enumerate(args):
        yield from _inside(f"argument {position}", value)
    for name, value in kwargs.items():
        yield from _inside(repr(name), value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _inside(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _inside(f"{name}[{key!r}]", item)
