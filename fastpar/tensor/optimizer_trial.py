"""The trial of an optimizer that reads across the elements of a parameter: does it do to parts what it does to a whole?

It makes two steps on parameters of a few elements, once whole and once split as the model's are. One that raises, or
comes to other values, is refused. What tensor parallelism has split, and what pipeline stages have of a model, is tried
in an optimizer's first step, and what ZeRO is to shard by `fastpar.zero.shard`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastpar.comm import Communicator
from fastpar.contracts.rehearsal import same_generators
from fastpar.tensor.optimizer_numbers import reading_whole

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
STEPS = 2
STEPS_APART = 4  # what is summed over parameters may act a step later than it is summed, and be zero in the first
ROWS = 5  # of three dims and more the others are 3: shards of different sizes, and some without rows
OF_STAGE = "fastpar_of_stage"  # the attribute of parameters beside which other ranks have others
TOLERANCE = 5e-2  # of the largest value: iterations in bfloat16 sum in another order
_LR = 1e-2  # in the place of 0, with which a schedule may begin, and an optimizer does nothing
# Optimizers, with the number of groups that they had when they were tried.
_TRIED: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to treat every element for itself."""
    kind = type(optimizer)
    return (kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE) or getattr(
        optimizer, "is_elementwise", False
    )


def needs_no_trial(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what an optimizer does to parts is known."""
    return is_elementwise(optimizer) or getattr(optimizer, "takes_dtensors", False)


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy, or the value itself of what has none: groups and the like, which no step changes."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


@functools.cache
def try_in_first_steps() -> None:
    """For all optimizers of the process; once."""
    register_optimizer_step_pre_hook(_try_first)


def _try_first(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or _TRIED.get(optimizer) == len(optimizer.param_groups):
        return
    if not needs_no_trial(optimizer):
        for options, parameter in kinds_of(optimizer):
            if all(type(placement) in (Shard, Replicate) for placement in parameter.placements):
                try_split(optimizer, options, _SplitTrial(parameter))
        for group in optimizer.param_groups:
            for shape in small_shapes([p for p in group["params"] if hasattr(p, OF_STAGE)]):
                try_apart(optimizer, options_of(group), shape)
    is_tried(optimizer)


def is_tried(optimizer: torch.optim.Optimizer) -> None:
    """Its steps need no trial any more."""
    _TRIED[optimizer] = len(optimizer.param_groups)


def of_stage(parameters: Iterable[Tensor]) -> None:
    """An optimizer of these has to update them without those that other ranks have."""
    try_in_first_steps()
    for parameter in parameters:
        vars(parameter)[OF_STAGE] = True


def small_shapes(parameters: Iterable[Tensor]) -> list[tuple[int, ...]]:
    """Shapes of a few elements, one for each number of dims."""
    return sorted({(ROWS, 4, 3, 3)[: p.ndim] + (1,) * max(p.ndim - 4, 0) for p in parameters if p.ndim > 0})


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group for a trial."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "lr" in options and not float(options["lr"]):
        options["lr"] = group.get("initial_lr") or _LR
    return options


def kinds_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], DTensor]]:
    """Of every group its options with one parameter of each kind that is split."""
    for group in optimizer.param_groups:
        split = [
            p for p in group["params"] if isinstance(p, DTensor) and not all(x.is_replicate() for x in p.placements)
        ]
        kinds = {(p.ndim, str(p.placements), p.device_mesh.mesh_dim_names): p for p in split if p.ndim > 0}
        for _, parameter in sorted(kinds.items(), key=lambda item: str(item[0])):
            yield options_of(group), parameter


class OptimizerTrial(Protocol):
    """Tensors of a shape, split as the model's are."""

    shape: tuple[int, ...]
    comms: list[Communicator]  # of the ranks that have parts
    refusal: str  # what an optimizer that does not pass cannot do
    remedy: str

    def part(self, x: Tensor) -> Tensor:
        """What an optimizer is given of x on this rank; a copy."""


class _SplitTrial:
    """Small tensors, split by tensor parallelism as a parameter is."""

    refusal = "step parameters that are split over ranks"
    remedy = "Use another optimizer, or set is_elementwise = True on it if it treats every element for itself"

    def __init__(self, like: DTensor) -> None:
        self._like = like
        self.shape = even_shape(like, 2)
        self.comms = comms_of(like)

    def part(self, x: Tensor) -> Tensor:
        return split_like(x.clone(), self._like)


def even_shape(like: DTensor, rows: int) -> tuple[int, ...]:
    """A small one whose parts on the ranks of `like` are equal, whatever those of `like` are."""
    sizes = [rows, *[2] * (like.ndim - 1)]
    for dim, placement in enumerate(like.placements):
        cut = getattr(placement, "dim", None)
        if cut is not None:
            sizes[cut] *= like.device_mesh.size(dim)
    return tuple(sizes)


def comms_of(like: DTensor) -> list[Communicator]:
    mesh = like.device_mesh
    return [Communicator(mesh.get_group(dim)) for dim in range(mesh.ndim) if mesh.size(dim) > 1]


def split_like(x: Tensor, like: DTensor) -> DTensor:
    # Every rank has it all: none is asked to send.
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


def try_split(optimizer: torch.optim.Optimizer, options: dict[str, Any], trial: OptimizerTrial) -> None:
    """Raises ValueError for an optimizer whose steps on parts raise, or come to other values. Collective."""
    shape = trial.shape
    generator = torch.Generator().manual_seed(len(shape))
    value = torch.randn(shape, generator=generator, device="cpu")
    grads = [torch.randn(shape, generator=generator, device="cpu") for _ in range(STEPS)]
    half = shape[0] // 2
    for grad, part in zip(grads, (slice(half), slice(half, None)), strict=True):
        grad[part] *= 8.0  # a rank's share of a norm is another in each step, as Adam divides by a factor that stays
    name = type(optimizer).__name__
    whole = nn.Parameter(value.clone())
    try:
        run(optimizer, options, {whole: grads})
    except Exception:  # not even whole: these shapes say nothing about it
        return
    split = nn.Parameter(trial.part(value))
    try:
        run(optimizer, options, {split: [trial.part(grad) for grad in grads]}, trial.comms)
    except Exception as error:
        raise ValueError(
            f"{name} cannot {trial.refusal}: it reads across the elements of a parameter by what DTensor does not "
            f"implement ({type(error).__name__}: {str(error)[:200]}). {trial.remedy}"
        ) from error
    expected = _local(trial.part(whole.detach()))
    scale = float((whole.detach() - value).abs().max())
    difference = (_local(split) - expected).abs().max() if expected.numel() else torch.zeros((), device="cpu")
    for comm in trial.comms:
        difference = comm.all_reduce(difference, "max")
    if not float(difference) <= TOLERANCE * scale:
        raise ValueError(
            f"{name} cannot {trial.refusal}: two steps on parts of a parameter {shape} differ by "
            f"{float(difference):.2g} from those on the whole one, which change it by {scale:.2g}. {trial.remedy}, as "
            "one that draws numbers"
        )


def try_apart(optimizer: torch.optim.Optimizer, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raises ValueError where what a parameter becomes depends on others, which are elsewhere or come later."""
    generator = torch.Generator().manual_seed(len(shape))
    value = torch.randn(shape, generator=generator, device="cpu")
    grads = [torch.randn(shape, generator=generator, device="cpu") for _ in range(STEPS_APART)]
    alone, beside, other = (nn.Parameter(value.clone()) for _ in range(3))
    try:
        run(optimizer, options, {alone: grads})
        run(optimizer, options, {beside: grads, other: [100 * grad for grad in grads]})
    except Exception:  # these shapes say nothing about it
        return
    scale = float((alone.detach() - value).abs().max())
    if not float((alone.detach() - beside.detach()).abs().max()) <= TOLERANCE * scale:
        raise ValueError(
            f"{type(optimizer).__name__} cannot update parameters in parts, as what one becomes depends on the others "
            "that it has: pipeline stages and experts' ranks have others each, and from a file some are updated at a "
            "time. Use another optimizer (or a mesh without pp and ep; offload='cpu'), or set is_elementwise = True on "
            "it if it treats every element for itself and draws numbers"
        )


def _local(x: Tensor) -> Tensor:
    return x._local_tensor.detach() if isinstance(x, DTensor) else x.detach()


def run(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    grads: Mapping[nn.Parameter, Sequence[Tensor]],
    comms: Sequence[Communicator] = (),
) -> None:
    """Steps of a copy of the optimizer that has these parameters alone. What a step raises on one rank of `comms`,
    whose part is not that of others, is raised on all."""
    inner: Any = object.__new__(type(optimizer))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memo: dict[int, Any] = {id(x): nn.Parameter(torch.empty(0), x.requires_grad) for x in held}  # no copy of a model
    for key, value in vars(optimizer).items():
        if key not in ("state", "param_groups", "step"):
            is_hooks = key.startswith("_optimizer_")  # that the step of a base class looks for
            vars(inner)[key] = OrderedDict() if is_hooks else copied(value, memo)
    inner.state, inner.param_groups = defaultdict(dict), [{**copy.deepcopy(options), "params": [*grads]}]
    is_tried(inner)
    with torch.no_grad(), same_generators():
        for step in zip(*grads.values(), strict=True):
            error: Exception | None = None
            for parameter, grad in zip(grads, step, strict=True):
                parameter.grad = grad.clone()  # which a step may write to
            try:
                with reading_whole():
                    inspect.unwrap(type(optimizer).step)(inner)
            except Exception as raised:
                error = raised
            failed = torch.tensor(float(error is not None), device="cpu")
            for comm in comms:
                failed = comm.all_reduce(failed, "max")
            if failed:
                raise error or RuntimeError("on another rank")
