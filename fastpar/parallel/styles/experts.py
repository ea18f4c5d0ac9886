"""The style "expert" of `fastpar.parallelize`: stacked experts spread over the ranks of an expert group.

Rank r of the group keeps experts r * E / size on, as `Shard(0)` DTensors under their old names, and the module's
forward sends tokens to them (`stacked_experts.run_experts`). Router and shared experts stay what they are. With etp a
rank keeps a part of the inner features of each of them.

Note: the scale of gradients
    As in `fastpar.expert.MoELayer`. The tokens of an expert come from all ranks of its group, ep * etp / tp of which
    belong to different losses, so the sum that it gets is divided by that number: the gradient of a mean over losses.
    What is left is to average over the ranks that hold the same part of it, mesh["edp"]; other parameters over
    mesh["dp"], as ever. Where ep and etp are 1, experts are whole on every rank, are summed over tp, and count among
    the others.

Note: Llama 4
    Its experts are called with every token once for each expert, times its score, which is 0 for most; what chooses
    is the module around them. So this module is adopted as well: it routes as its router does, and sends each token
    to the experts it has chosen, weighed on the way in.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastpar.comm import Communicator
from fastpar.contracts.rehearsal import same_generators
from fastpar.parallel.stacked_experts import (
    ExpertSpread,
    inner_cuts,
    inner_size,
    is_stacked,
    is_transposed,
    num_experts_of,
    own_parameters,
    rule_of,
    run_experts,
)
from fastpar.parallel.styles.base import Style, SwapContext, stored
from fastpar.pretrained.adapters import is_adapter
from fastpar.tensor import layout_of
from fastpar.tensor.binding import Adoption, BoundGroup, class_like
from fastpar.tensor.grid_layout import AxisCut, GridLayout
from fastpar.tensor.parameter import MakeParameter, ParallelModule, ParameterLayout, RowMap, install_state_dict_hooks

_PROOF_TOKENS = 5


@dataclass(frozen=True)
class ExpertStyle(Style):
    """Stacked experts, spread over the expert group; tokens are sent to those that they have chosen."""

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        sharing = context.etp.comm.size
        check_experts(path, module, context.parent_of(path), context.experts.comm.size, sharing)
        block = context.block_of(path)
        if block is not None:
            raise ValueError(f"{path} has style 'expert' inside the block {block!r}, whose inputs' gradients are parts")

    def prove(self, path: str, module: nn.Module, context: SwapContext) -> None:
        prove_experts(path, module, context.parent_of(path))

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        ep, etp, tp, changes = context.experts.comm.size, context.etp.comm.size, context.comm.size, context.changes
        if takes_scaled_tokens(module):
            changes.adopted(route_tokens(context.parent_of(path)))
        adoption = spread_experts(
            module,
            context.experts,
            etp=context.etp,
            tp=context.group,
            same_tokens=context.region_of(path) is None,
            grad_scale=tp / (ep * etp) if ep * etp > 1 else 1.0,
            make=changes.parameter,
        )
        changes.adopted(adoption)
        layout = layout_of(next(module.parameters(recurse=False)))
        assert layout is not None
        notes = [f"experts of rank {context.experts.comm.rank} of {ep}"] if ep > 1 else []
        notes += [f"inner features of rank {context.etp.comm.rank} of {etp}"] if etp > 1 else []
        context.explain(path, self, stored(layout), "; ".join(notes) or "gradient summed over the group")


def check_experts(path: str, module: nn.Module, parent: nn.Module | None, size: int, etp: int = 1) -> None:
    """Raise what is wrong with the style "expert" on this module: experts over `size` ranks, each over `etp`."""
    if not is_stacked(module):
        raise TypeError(
            f"{path} has style 'expert': expected a module with gate_up_proj [E, 2I, H] (or up_proj [E, I, H]) and "
            f"down_proj [E, H, I], got {type(module).__name__}"
        )
    own_parameters(module)
    if is_adapter(parent):
        raise TypeError(
            f"{path} has style 'expert' inside an adapter of PEFT, which computes with all experts' whole weights: "
            "give the adapter other layers (target_modules without target_parameters), or merge it before "
            "(merge_and_unload)"
        )
    experts = num_experts_of(module)
    if experts % size:
        near = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ValueError(f"{path} has {experts} experts, which {size} ranks cannot share evenly; these can: {near}")
    if inner_size(module) % etp:
        raise ValueError(f"{path}: the experts' inner size ({inner_size(module)}) must be divisible by etp ({etp})")
    if etp > 1 and rule_of(module) is None:
        raise TypeError(
            f"{path} ({type(module).__name__}) computes something between its two products that no ExpertRule says, "
            f"and that may need whole rows, of which etp={etp} leaves a rank a part: use ep in its place"
        )
    if takes_scaled_tokens(module) and (rule_of(module) is None or parent is None or not _routes_itself(parent)):
        raise TypeError(
            f"{path} ({type(module).__name__}) is called without its tokens' choices; the style 'expert' knows that "
            "only inside a module with `router`, `experts`, `shared_expert` and `top_k`, as Llama 4 has"
        )


def prove_experts(path: str, module: nn.Module, parent: nn.Module | None) -> None:
    """TypeError unless `run_experts` gives what the module's own forward does, for a few random tokens: outputs, and
    the gradients of tokens, weights of the choices and biases; in training as well, where nothing may be drawn.

    The style replaces that forward, and a subclass may do more in it than the stacked weights and the activation say.
    What is zero now, such as biases, has other numbers meanwhile.
    """
    first = cast(Tensor, module._parameters["down_proj"])
    hidden, where = first.shape[2 if is_transposed(module) else 1], f"{path} ({_full_name_of(module)})"
    generator, num_experts = torch.Generator().manual_seed(0), num_experts_of(module)
    x = torch.randn(_PROOF_TOKENS, hidden, generator=generator, device="cpu").to(first).requires_grad_()
    top_k = min(2, num_experts)
    rand = functools.partial(torch.rand, generator=generator, device="cpu")
    indices = rand(_PROOF_TOKENS, num_experts).topk(top_k).indices.to(x.device)
    weights = rand(_PROOF_TOKENS, top_k).to(x).requires_grad_()
    calls: tuple[Callable[[], Tensor], Callable[[], Tensor]] = (
        lambda: module(x, indices, weights),
        lambda: run_experts(module, x, indices, weights),
    )
    if takes_scaled_tokens(module):
        run = functools.partial(run_experts, module)
        calls = (lambda: cast(Any, parent)(x)[0], lambda: _route(cast(Any, parent), run, x)[0])
    # Gradients of float64 are summed in float32 here and there. Beyond a tenth nothing would be proven (bfloat16).
    tolerance = min(64 * max(torch.finfo(first.dtype).eps, torch.finfo(torch.float32).eps) * hidden**0.5, 0.1)
    modes = [(m, m.training) for m in (parent or module).modules()]
    try:
        with _without_zeros(module, generator) as biases, torch.enable_grad():
            for training in (False, True):
                for m, _ in modes:
                    m.training = training
                with same_generators() as has_drawn:
                    wanted = _with_gradients(calls[0](), (x, weights, *biases))
                    if has_drawn():
                        raise TypeError(
                            f"{where} draws random numbers in its forward (dropout, jitter), which the style 'expert' "
                            "replaces: set their probability to 0, or leave it out of the plan"
                        )
                for ours, theirs in zip(_with_gradients(calls[1](), (x, weights, *biases)), wanted, strict=True):
                    _compare_experts(where, ours, theirs, tolerance)
    finally:
        for m, was in modes:
            m.training = was


def _full_name_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


@contextlib.contextmanager
def _without_zeros(module: nn.Module, generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Numbers in the place of a module's biases, and of weights that are all zero; yields the biases."""
    held = dict(module._parameters)
    biases: list[Tensor] = []
    try:
        for name, param in held.items():
            if param is None or (param.dim() > 2 and bool(param.any())):
                continue
            noise = torch.randn(param.shape, generator=generator, device="cpu").to(param)
            noise *= param.shape[-1:].numel() ** -0.5  # a scalar has one
            module._parameters[name] = other = nn.Parameter(param.detach() + noise)
            biases += [other] if param.dim() < 3 else []
        yield biases
    finally:
        for name, param in held.items():
            module._parameters[name] = param


def _with_gradients(out: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """A result, and what the leaves get of a loss whose weights are unlike each other; zeros where they get nothing."""
    weigh = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    grads = torch.autograd.grad((out * weigh).sum(), leaves, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def _compare_experts(where: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error, scale = float((wanted - found).abs().max()), float(wanted.abs().max())
    if not error <= tolerance * (scale + 1e-30):
        raise TypeError(
            f"{where} does more in its forward than stacked weights and an activation say: for random tokens the style "
            f"'expert' differs by {error:.2g} of {scale:.2g}. Leave it out of the plan"
        )


def takes_scaled_tokens(module: nn.Module) -> bool:
    """True for experts that are called with all tokens for all experts, as in Llama 4, and not with the choices."""
    return len(inspect.signature(type(module).forward).parameters) == 2 and not hasattr(module, "is_concatenated")


def _routes_itself(parent: nn.Module) -> bool:
    return all(hasattr(parent, name) for name in ("router", "experts", "shared_expert", "top_k"))


class ParallelExperts(ParallelModule):
    """The class of stacked experts that `spread_experts` has spread, together with their own."""

    _expert_group: BoundGroup
    _sharing: Communicator | None
    _same_tokens: Communicator | None
    _grad_scale: float
    _sum_grad: bool

    def _run(self, x: Tensor, indices: Tensor, weights: Tensor, **options: Any) -> Tensor:
        if torch.compiler.is_compiling():  # the dispatch ends the graph; functions down to it would be compiled, too
            return cast(Tensor, torch.compiler.disable(self._run)(x, indices, weights, **options))
        spread = ExpertSpread(self._expert_group.comm, self._same_tokens, self._sharing, self._grad_scale)
        return run_experts(self, x, indices, weights, spread, **options)


def _weight_property(name: str) -> property:
    return property(lambda self: self._local(name, sum_grad=self._sum_grad))


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return cast(Tensor, self._run(hidden_states, top_k_index, top_k_weights))


def spread_experts(
    module: nn.Module,
    ep: BoundGroup,
    *,
    etp: BoundGroup | None = None,
    tp: BoundGroup | None = None,
    same_tokens: bool = False,
    grad_scale: float = 1.0,
    make: MakeParameter | None = None,
) -> Adoption:
    """Spread the experts of a module over `ep`, in place; returns the `Adoption`, whose `undo` gives it back.

    etp          ranks that share each expert, with the mesh of both dims, (ep, etp); None: no rank does
    tp           the tensor-parallel group; same_tokens: its ranks hold the same tokens, so each takes a part of them
    grad_scale   multiplied into the experts' gradients: see the note above

    Where `ep` and `etp` are one rank, every rank of `tp` keeps all experts, and their gradients are summed over it.
    """
    original = type(module)
    names = own_parameters(module)
    namespace: dict[str, Any] = {name: _weight_property(name) for name in names}
    adoption = Adoption(module, class_like(original, ParallelExperts, forward=_forward, **namespace))
    parallel = cast(ParallelExperts, module)
    sharing = None if etp is None or etp.comm.size == 1 else etp
    alone = ep.comm.size == 1 and sharing is None and tp is not None
    owner = cast(BoundGroup, tp) if alone else ep
    parallel._expert_group, parallel._grad_scale, parallel._sum_grad = ep, grad_scale, alone
    parallel._sharing = None if sharing is None else sharing.comm
    parallel._same_tokens = tp.comm if tp is not None and same_tokens else None
    try:
        cuts = {} if sharing is None else inner_cuts(module, sharing.comm.size)
        for name in names:
            full = cast(nn.Parameter, adoption.original_parameters[name])
            rows = None if alone else RowMap.chunk(len(full), owner.comm.size)
            layout: Any = ParameterLayout(owner.comm, owner.mesh, full.shape, 0, rows)
            if sharing is not None:
                inner = AxisCut(sharing.comm, *cuts[name]) if name in cuts else None
                assert sharing.mesh is not None
                layout = GridLayout(sharing.mesh, full.shape, (AxisCut(ep.comm, 0), inner))
            parallel._add_parameter(name, full, layout, make)
    except BaseException:
        adoption.undo()
        raise
    adoption.handles.extend(install_state_dict_hooks(module))
    return adoption


def _route(parent: Any, run: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    scores, logits = parent.router(x)
    indices = logits.detach().topk(parent.top_k, dim=1).indices
    return run(x, indices, scores.gather(1, indices), weigh="input", add=parent.shared_expert(x)), logits


def _routing_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    return _route(self, self.experts._run, hidden_states.reshape(-1, hidden_states.shape[-1]))


def route_tokens(parent: nn.Module) -> Adoption:
    """Let the module around Llama 4's experts send each token to those it has chosen alone; in place."""
    return Adoption(parent, class_like(type(parent), forward=_routing_forward))
