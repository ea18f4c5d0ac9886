"""`apply_kernels`: fused norms, SwiGLU and loss in a model that exists, on one device and without a mesh.

    fp.apply_kernels(model)            # in place; a model of transformers, or any whose modules compute the same
    fp.remove_kernels(model)

A module is known by what it computes and not by its name: it is tried on random numbers against the fused op, and keeps
its own forward if results or gradients differ, or if it leaves more than its result. It stays the object that it was,
with its parameters, hooks and children, and gets a class that differs in its forward; so copies, state dicts,
optimizers, gradient checkpointing and fully_shard see nothing.

Note: the loss
    The head of a causal model that computes its loss by transformers' next-token loss returns `DeferredLogits` while
    the model trains on labels: hidden states and weight, of which the loss is made a chunk of tokens at a time. To
    whatever else reads them, autograd included, they are logits, computed then.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from fastpar.arguments import checked
from fastpar.contracts.containers import containers_in
from fastpar.contracts.rehearsal import MadeTensors, own_attributes
from fastpar.ddp import check_model
from fastpar.ops.linear_cross_entropy import linear_cross_entropy
from fastpar.ops.rms_norm import rms_norm
from fastpar.ops.swiglu import swiglu
from fastpar.parallel.model_methods import calls_loss_function
from fastpar.tensor.own_forward import has_hooks, runs_forward_of

__all__ = ["apply_kernels", "remove_kernels"]

_log = logging.getLogger("fastpar.apply_kernels")
M = TypeVar("M", bound=nn.Module)
_ROWS = 5  # of a trial
_TOLERANCE = 2e-5  # of the largest number, in float32: a hundred roundings; another activation differs by a tenth
_GRAD_TOLERANCE = 1e-3  # a sum over rows rounds in another order; one that is not computed is off by more
_PLAIN = (int, float, str, bool, type(None))
_TRACES = "it fails by itself, or writes to what it holds or keeps what it computes, which a fused op would not"
_MACHINERY = frozenset(vars(nn.Module()))  # parameters, children, hooks; `training` too, as trials are in both modes


@checked(computed=False, but=("model",))
def apply_kernels(model: M, *, norms: bool = True, mlps: bool = True, loss: bool = True) -> M:
    """Let a model's modules compute with fused ops, in place; returns the model.

    norms  RMSNorms, with weights or with what is added to one: `fastpar.ops.rms_norm`
    mlps   down(silu(gate(x)) * up(x)), of three linears, or two with gate and up in one: `fastpar.ops.swiglu`
    loss   transformers' next-token loss in training: `fastpar.ops.linear_cross_entropy`, with no tensor of all logits

    Results are those of before but for rounding: a fused op computes in float32 and rounds once. Modules that compute
    something else are passed over; the logger "fastpar.apply_kernels" says what was replaced (INFO) and what looked
    alike and was not, and why (INFO). Rotary embeddings are functions of transformers and stay what they are.

    With `loss` the head's weight is read outside of its forward: under ZeRO's stage 3, and fully_shard of the head by
    itself, pass loss=False (RuntimeError in the forward pass otherwise). Logits of a training step are computed when
    they are first read, which is before the optimizer's step (RuntimeError otherwise). The loss of a batch without any
    label is 0, as of `linear_cross_entropy`; transformers' is NaN.

    Raises ValueError where a model has kernels already or nothing to replace, for one that `fastpar.parallelize` has
    split, and TypeError for what is no module. Nothing has changed then.
    """
    check_model(model, "apply_kernels")
    if "_fastpar_parallel" in vars(model) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("apply_kernels is for whole models: this one is sharded (its parameters are DTensors)")
    if any(isinstance(module, _FusedModule) for module in model.modules()):
        raise ValueError("the model has kernels already; call fastpar.remove_kernels(model) first")
    found: list[tuple[str, nn.Module, type[nn.Module]]] = []
    kept: list[str] = []
    verdicts: dict[Any, Any] = {}
    for path, module in model.named_modules():
        for wanted, looks_alike, judge in ((norms, _looks_like_norm, _norm_class), (mlps, _looks_like_mlp, _mlp_class)):
            if not (wanted and looks_alike(module)):
                continue
            key = _kind_of(module)
            if key not in verdicts:
                verdicts[key] = judge(module)
            if isinstance(verdicts[key], str):
                kept.append(f"{path} ({type(module).__name__}): {verdicts[key]}")
            else:
                found.append((path, module, verdicts[key]))
    problem = _loss_problem(model) if loss else "not asked for"
    if not found and problem:
        raise ValueError(f"apply_kernels found nothing to replace in this {type(model).__name__}; loss: {problem}")
    for _, module, cls in found:
        module.__class__ = cls
    if not problem:
        _fuse_loss(model)
    counts: dict[str, int] = {}
    for _, module, _cls in found:
        name = type(module).__name__
        counts[name] = counts.get(name, 0) + 1
    said = [f"{count} {name}" for name, count in counts.items()] + ([] if problem else ["the loss"])
    _log.info("fused: %s", ", ".join(said))
    for line in kept + ([f"loss: {problem}"] if loss and problem else []):
        _log.info("kept: %s", line)
    return model


@checked(computed=False, but=("model",))
def remove_kernels(model: M) -> M:
    """Undo `apply_kernels`, in place; returns the model. ValueError for a model without kernels, and for one whose
    modules have been wrapped in another class since."""
    check_model(model, "remove_kernels")
    fused = [(path, module) for path, module in model.named_modules() if isinstance(module, _FusedModule)]
    if not fused:
        raise ValueError("the model has no kernels of fastpar.apply_kernels")
    for path, module in fused:
        if "_fastpar_fused" not in vars(type(module)):
            raise ValueError(
                f"{path or 'the model'} has been given the class {type(module).__name__} after apply_kernels (by "
                "fully_shard, say): take that away first"
            )
    for _, module in fused:
        if isinstance(module, _FusedModel):
            own: Any = module
            if isinstance(own.loss_function, FusedLoss):  # else somebody has given it another
                own.loss_function = own.loss_function.own
        for name in ("_defers", "_has_changed"):
            vars(module).pop(name, None)
        module.__class__ = type(module).__bases__[1]
    return model


class _FusedModule:
    """The mark of classes that `apply_kernels` makes; each stands before the class that a module had."""

    _tried_settings: tuple[dict[str, Any], str] | None = None  # which kernels stand for, but for that one's value
    _has_changed = False  # whether they are others now

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not name.startswith("_") and self._tried_settings is not None:  # here and not in forwards, which are many
            settings, but = self._tried_settings
            vars(self)["_has_changed"] = _settings(cast(nn.Module, self), but) != settings


def _fused_class(base: type[nn.Module], mark: type, **namespace: Any) -> type[nn.Module]:
    namespace |= {"_fastpar_fused": True, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (mark, base), namespace)  # transformers writes the name into config.json


def _kind_of(module: nn.Module) -> Any:
    """A key that two modules share which compute the same on other numbers."""
    rows = []
    for name, child in module.named_modules():
        own = {k: v for k, v in vars(child).items() if k != "layer_idx" and k not in _MACHINERY}
        said = sorted((k, str(type(v)), v if isinstance(v, _PLAIN) else id(v)) for k, v in own.items())
        shapes = [(k, tuple(p.shape), p.dtype, p.device.type) for k, p in child.named_parameters(recurse=False)]
        buffers = [(k, id(b)) for k, b in child.named_buffers(recurse=False)]  # whose values may differ
        rows.append((name, type(child), tuple(said), tuple(shapes), tuple(buffers)))
    return tuple(rows)


def _trial_copy(module: nn.Module) -> nn.Module | str:
    """A copy in float32 with noise on its parameters, or why there is none."""
    parameters = list(module.parameters())
    if any("forward" in vars(child) for child in module.modules()):
        return "somebody has given it a forward of its own, which a class cannot replace"
    if any(p.device.type == "meta" for p in parameters):
        return "its parameters are on the meta device, where it cannot be tried"
    if any(p.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16) for p in parameters):
        return "its parameters are quantised"
    try:
        twin = copy.deepcopy(module).float()
    except Exception as error:  # of the module's own code, or of a weight that is computed from others: any
        return f"it cannot be copied and tried ({type(error).__name__}: {error})"
    generator = torch.Generator(parameters[0].device).manual_seed(0)
    with torch.no_grad():
        for p in twin.parameters():
            noise = torch.randn(p.shape, device=p.device, generator=generator)
            p.add_(noise * (0.3 if p.dim() < 2 else p.shape[-1] ** -0.5))
    return twin


def _agrees(
    twin: nn.Module, size: int, ours: Callable[[Tensor], Tensor], device: torch.device, scales: tuple[float, ...] = ()
) -> bool:
    """Whether a module gives what `ours` does, for rows of several sizes, in eval and in training; False where it
    fails."""
    generator = torch.Generator(device).manual_seed(1)
    for scale, is_training in itertools.product((1.0, 30.0, *scales), (False, True)):
        x = (torch.randn(2, _ROWS, size, device=device, generator=generator) * scale).requires_grad_()
        weigh = torch.randn(2, _ROWS, size, device=device, generator=generator)
        leaves = [x, *(p for p in twin.parameters() if p.requires_grad)]
        try:
            # What draws numbers (dropout as a function) differs, and must not move the caller's generators.
            with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                outs = wanted, found = twin.train(is_training)(x), ours(x)
                if not isinstance(wanted, Tensor) or wanted.shape != found.shape or wanted.dtype != found.dtype:
                    return False
                grads = [torch.autograd.grad((out * weigh).sum(), leaves, allow_unused=True) for out in outs]
        except Exception:  # of the module's own code: any
            return False
        pairs = [(wanted, found, _TOLERANCE), *((*each, _GRAD_TOLERANCE) for each in zip(*grads, strict=True))]
        if not all(_is_near(*pair) for pair in pairs):
            return False
    return True


@torch.no_grad()
def _is_near(wanted: Tensor | None, found: Tensor | None, tolerance: float) -> bool:
    if wanted is None or found is None:
        return wanted is found
    return float((wanted - found).abs().max()) <= tolerance * float(wanted.abs().max())


def _leaves_traces(twin: nn.Module, size: int, device: torch.device) -> bool:
    """Whether a module's code writes to what it holds or keeps what it computes, as statistics and losses of
    activations: a fused op would not."""
    hooks = dict(twin._forward_hooks)  # which see what the fused module returns, too
    twin._forward_hooks.clear()
    made, is_written = MadeTensors(lists=True), False
    try:
        for is_training in (False, True):
            before = _held(twin.train(is_training))
            with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), made:
                twin(torch.randn(2, _ROWS, size, device=device, requires_grad=True))
            is_written = is_written or _held(twin) != before
        return is_written or bool(made.left())
    except Exception:  # of the module's own code: any
        return True
    finally:
        made.take_back()
        twin._forward_hooks.update(hooks)


def _held(module: nn.Module) -> list[Any]:
    """What shows that something has been written to buffers, attributes and the containers in them."""
    found: list[Any] = [(id(buffer), buffer._version) for buffer in module.buffers()]
    for child in module.modules():
        own = own_attributes(child)
        found += [(k, v if isinstance(v, _PLAIN) else id(v)) for k, v in own.items()]
        found += [len(container) for container in containers_in(own.values())]
    return found


def _settings(module: nn.Module, but: str = "") -> dict[str, Any]:
    """What decides what a module computes beside its parameters: numbers, functions and kinds of children."""
    own = {k: v for k, v in own_attributes(module).items() if isinstance(v, _PLAIN) or callable(v)}
    own |= {name: type(child) for name, child in module._modules.items() if not isinstance(child, nn.Linear)}
    return {k: v for k, v in own.items() if k not in (but, "layer_idx") and not k.startswith("_")}


# ---- norms


def _looks_like_norm(module: nn.Module) -> bool:
    own = list(module._parameters.values())
    return len(own) == 1 and own[0] is not None and own[0].dim() == 1 and not list(module.children())


def _norm_class(module: nn.Module) -> type[nn.Module] | str:
    """The class that a norm gets, or why none."""
    ((name, weight),) = module._parameters.items()
    assert weight is not None
    twin = _trial_copy(module)
    if isinstance(twin, str):
        return twin
    if _leaves_traces(twin, len(weight), weight.device):
        return _TRACES
    for attribute in sorted(k for k, v in vars(module).items() if isinstance(v, float) and 0 <= v < 0.1):
        for offset in (0.0, 1.0):
            ours = functools.partial(_normed, name=name, eps=attribute, offset=offset)
            # Of rows as small as eps or smaller the result says where eps stands, and which number it is.
            root = getattr(module, attribute) ** 0.5
            small = (root, 0.01 * root, 1e-5)
            if _agrees(twin, len(weight), functools.partial(ours, twin), weight.device, small):
                return _fused_class(
                    type(module),
                    _FusedModule,
                    forward=_norm_forward(name, attribute, offset),
                    _tried_settings=(_settings(module, attribute), attribute),
                )
    return "it computes something else than an RMSNorm"


def _normed(module: nn.Module, x: Tensor, *, name: str, eps: str, offset: float) -> Tensor:
    return rms_norm(x, getattr(module, name), eps=getattr(module, eps), weight_offset=offset)


def _norm_forward(name: str, eps: str, offset: float) -> Callable[..., Tensor]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A gate, say; or a dtype that it would return.
        is_other = kwargs or len(args) != 1 or args[0].dtype != getattr(self, name).dtype
        if is_other or self._has_changed:
            return _own_forward(self)(*args, **kwargs)
        return _normed(self, args[0], name=name, eps=eps, offset=offset)

    return forward


def _own_forward(module: Any) -> Callable[..., Any]:
    """The forward that the module has without `apply_kernels`."""
    for cls in type(module).__mro__:
        if "_fastpar_fused" in vars(cls):
            base: Any = cls.__bases__[1]
            return functools.partial(base.forward, module)
    raise AssertionError("a fused module")


# ---- SwiGLU


def _looks_like_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    linears = [child for child in children.values() if isinstance(child, nn.Linear)]
    others = [child for child in children.values() if not isinstance(child, nn.Linear)]
    is_small = not list(module.parameters(recurse=False)) and not any(list(child.parameters()) for child in others)
    return is_small and len(linears) in (2, 3) and not any(_drops(child) for child in others)


def _drops(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())


def _mlp_class(module: nn.Module) -> type[nn.Module] | str:
    """The class that an MLP gets, or why none."""
    linears: dict[str, nn.Linear] = {n: c for n, c in module.named_children() if isinstance(c, nn.Linear)}
    twin = _trial_copy(module)
    if isinstance(twin, str):
        return twin
    first = next(iter(linears.values()))
    if _leaves_traces(twin, first.in_features, first.weight.device):
        return _TRACES
    for names in _roles(linears):
        first = linears[names[0]]
        ours = functools.partial(_gated, names=names)
        if _agrees(twin, first.in_features, functools.partial(ours, twin), first.weight.device):
            return _fused_class(
                type(module), _FusedModule, forward=_mlp_forward(names), _tried_settings=(_settings(module), "")
            )
    return "it computes something else than down(silu(gate(x)) * up(x))"


def _roles(linears: dict[str, nn.Linear]) -> Iterator[tuple[str, ...]]:
    """Which linears may be (gate, up, down), or (gate and up, down)."""
    for down, last in linears.items():
        first = [name for name in linears if name != down]
        sizes = {(linears[name].in_features, linears[name].out_features) for name in first}
        if len(first) == 2 and sizes == {(last.out_features, last.in_features)}:
            yield first[0], first[1], down
            yield first[1], first[0], down
        elif len(first) == 1 and sizes == {(last.out_features, 2 * last.in_features)}:
            yield first[0], down


def _gated(module: Any, x: Tensor, *, names: tuple[str, ...]) -> Tensor:
    *first, down = (getattr(module, name) for name in names)
    out: Tensor = down(swiglu(*(linear(x) for linear in first)))
    return out


def _mlp_forward(names: tuple[str, ...]) -> Callable[..., Tensor]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        others = [child for name, child in self._modules.items() if name not in names]  # which are not called
        if kwargs or len(args) != 1 or any(map(has_hooks, others)) or self._has_changed:
            return _own_forward(self)(*args, **kwargs)
        return _gated(self, args[0], names=names)

    return forward


# ---- the loss


class DeferredLogits(Tensor):
    """Logits that nobody has read: hidden [..., K] and a head's weight [V, K]. Reading them computes them, once.

    To autograd they are the output of `_DeferredLinear`, whatever is done with them and wherever; only below autograd
    are they computed. RuntimeError where the weight has changed or has been freed by then.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    whole: Tensor | None
    version: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        device = hidden.device.type
        is_converted = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if is_converted else hidden.dtype
        shape = (*hidden.shape[:-1], weight.shape[0])
        made: DeferredLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made.hidden, made.weight, made.bias, made.whole = hidden, weight, bias, None
        made.version = 0 if weight.is_inference() else weight._version
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_computed, args), **tree_map(_computed, kwargs or {}))

    def check_weight(self) -> None:
        """RuntimeError where the weight is not what it was when the head ran."""
        if self.weight.untyped_storage().nbytes() == 0 and self.weight.numel() > 0:
            raise RuntimeError(
                "the head's weight was freed after the head had run (by fully_shard or ZeRO's stage 3), and the loss "
                "and the logits are computed of it later: call fastpar.apply_kernels with loss=False, or read the "
                "logits before backward() if that freed it"
            )
        if not self.weight.is_inference() and self.weight._version != self.version:
            raise RuntimeError(
                "these logits are computed when they are first read, and the head's weight has changed since the head "
                "ran: read them before optimizer.step(), or call fastpar.apply_kernels with loss=False"
            )


def _computed(x: Any) -> Any:
    if not isinstance(x, DeferredLogits):
        return x
    if x.whole is None:
        x.check_weight()
        with torch.no_grad():
            x.whole = _linear(x.hidden, x.weight, x.bias, x.dtype)
    return x.whole


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """F.linear in the dtype that autocast had chosen, whether it is on by now or not."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class _DeferredLinear(torch.autograd.Function):
    """F.linear, of which the forward is left for later."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        ctx.save_for_backward(hidden, weight, bias)
        made = DeferredLogits(hidden, weight, bias)
        ctx.dtype = made.dtype
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            (grad @ weight.to(ctx.dtype)).to(hidden.dtype) if needs_hidden else None,
            (rows.t() @ hidden.to(ctx.dtype).reshape(len(rows), -1)).to(weight.dtype) if needs_weight else None,
            rows.sum(0).to(bias.dtype) if needs_bias else None,
        )


class FusedLoss:
    """transformers' next-token loss, of `DeferredLogits` without computing them."""

    def __init__(self, own: Any):
        self.own = own

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Any:
        options = {name: kwargs.get(name) for name in ("num_items_in_batch", "shift_labels")}
        if not isinstance(logits, DeferredLogits) or logits.whole is not None or logits.shape[-1] != vocab_size:
            return self.own(logits, labels, vocab_size, **kwargs)
        logits.check_weight()
        shifted = options["shift_labels"]
        target = labels if shifted is None else shifted
        return linear_cross_entropy(
            logits.hidden,
            logits.weight,
            target.to(logits.device),
            bias=logits.bias,
            shift=1 if shifted is None else 0,
            ignore_index=kwargs.get("ignore_index", -100),
            denominator=options["num_items_in_batch"],
        )


class _FusedModel(_FusedModule):
    """A model whose loss is fused: its head defers logits while it trains on labels."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = self
        head = own.get_output_embeddings()
        kind: Any = type(self)
        names = _parameter_names(kind)
        labels = kwargs.get("labels", dict(zip(names, args, strict=False)).get("labels"))
        head._defers = own.training and labels is not None and not torch.compiler.is_compiling()
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            head._defers = False


@functools.cache
def _parameter_names(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _head_forward(self: Any, input: Tensor) -> Tensor:  # as nn.Linear calls it
    if vars(self).get("_defers") and not torch.compiler.is_compiling():
        deferred: Tensor = _DeferredLinear.apply(input, self.weight, self.bias)
        return deferred
    return F.linear(input, self.weight, self.bias)


def _loss_problem(model: Any) -> str:
    """Why the loss cannot be fused; "" where it can."""
    theirs = getattr(sys.modules.get("transformers.loss.loss_utils"), "ForCausalLMLoss", None)
    if not hasattr(type(model), "loss_function") or theirs is None:
        return "the model computes no loss as those of transformers do"
    if model.loss_function is not theirs or not calls_loss_function(model):
        return "it is not transformers' next-token loss, or not computed by the model's loss_function"
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not runs_forward_of(head, nn.Linear):
        return f"the head is no plain nn.Linear, but {type(head).__name__}"
    return ""


def _fuse_loss(model: Any) -> None:
    head = model.get_output_embeddings()
    head.__class__ = _fused_class(type(head), _FusedModule, forward=_head_forward)
    model.__class__ = _fused_class(type(model), _FusedModel)
    model.loss_function = FusedLoss(model.loss_function)
