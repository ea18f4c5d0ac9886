"""Muon: momentum, orthogonalized by Newton-Schulz, for matrices that lie on one rank or in parts on many.

A step is four phases:

    momentum        B = lerp(B, g, 1 - momentum); u = lerp(g, B, momentum) with Nesterov, else B
    collect         parts of u travel to the ranks that orthogonalize (`_matrix_plan` chooses them)
    orthogonalize   o = newton_schulz(u)
    distribute      parts of o travel back; p = (1 - lr * weight_decay) p - lr * adjust(shape) * o

What travels is in the dtype of Newton-Schulz, bfloat16 by default: with Psi elements over R ranks, 2 Psi / R bytes
there and as many back, where gathering every matrix everywhere would take 2 Psi, and R times the products.

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, arXiv:2502.16982 (weight
decay, match_rms_adamw); torch.optim.Muon, whose conventions these are; Yang, Simon, Bernstein 2023, arXiv:2310.17813
(spectral).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.contracts.newton_schulz import DTYPES, polynomials
from fastpar.contracts.optimizer import check_group, checked_params
from fastpar.ops.newton_schulz import newton_schulz
from fastpar.optim._matrix_exchange import MatrixExchange
from fastpar.optim._matrix_layout import LayoutReader, MatrixLayout
from fastpar.optim._matrix_plan import MODES, assign, rates_of

if TYPE_CHECKING:
    from fastpar.comm import GroupLike

_ADJUSTMENTS: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1, rows / max(1, columns))),
    "original": lambda rows, columns: math.sqrt(max(1, rows / max(1, columns))),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / max(1, columns)),
    "none": lambda rows, columns: 1.0,
}
_MOST_PLANS = 64


@dataclass
class _Matrix:
    """A parameter in this step: its group's options, what it is locally, and how it lies over the ranks."""

    index: int  # among the parameters of the optimizer: the same on every rank
    param: Tensor
    options: Mapping[str, Any]
    layout: MatrixLayout
    update: Tensor  # [count, rows, columns] of this rank, in the dtype of Newton-Schulz

    @property
    def local(self) -> Tensor:
        return _local(self.param)


@dataclass
class _Batch:
    """Matrices that travel together: the same axes, dtype and device."""

    axes: tuple[Communicator, ...]
    matrices: list[_Matrix] = field(default_factory=list)


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for parameters that are whole, tensor-parallel, ZeRO shards, both, or replicated.

        muon = fp.optim.Muon([p for p in model.blocks.parameters() if p.ndim >= 2], lr=0.02)
        adamw = torch.optim.AdamW([everything else: embeddings, head, norms, biases])

    Parameters have at least two dims. [m, n, k1, ..] is one matrix of n * k1 * .. columns, as a convolution's weight
    is. Parameters may be plain tensors and DTensors in any mix; a DTensor may be sharded by rows and columns over any
    dims of its mesh (ZeRO over tensor parallelism included), in the chunks of torch.chunk, and replicated over others.
    The momentum buffer lies as its parameter does.

    lr, weight_decay, momentum, nesterov, eps, ns_steps   as in torch.optim.Muon; weight decay is decoupled
    ns_coefficients   a name ("quintic", "polar_express", "cubic"), (a, b, c), or such a triple for each step; see
                      `fastpar.ops.newton_schulz`
    adjust_lr_fn      factor of lr for a matrix [m, n]: "original" (or None) sqrt(max(1, m / n)); "match_rms_adamw"
                      0.2 sqrt(max(m, n)); "spectral" sqrt(m / n); "none" 1
    ns_dtype          of the products and of what travels: bfloat16, float32 or float64
    batch_dims        so many leading dims count matrices: 1 for the weights [experts, m, n] of grouped experts. Shards
                      along them need no communication
        These are options of a parameter group, too; the next two are not.
    replicas          group whose ranks hold the same parameters (data parallelism without shards): each orthogonalizes
                      some of the matrices and gives the results to the others. For DTensors whose mesh does not
                      include the group it comes on top; replicated mesh dims are used in this way by themselves
    distribute        "owners": every matrix is put together on one rank, which orthogonalizes it; "shards": matrices
                      stay split along an axis, and Newton-Schulz runs on the parts; "auto": owners, except for the
                      matrices that would keep their owner busy while others wait, by a model of flops and bytes

    Bits. Replicas of a parameter whose gradients have the same bits keep the same bits. With "owners",
    float32 parameters have the bits that one rank gives them with as many threads, under every layout (but for packed
    tensor-parallel weights, whose rows lie in another order), and these are the bits of torch.optim.Muon. Matrices that
    stay split agree up to rounding of the products: some 1e-6 of an update in float32, some 0.02 in bfloat16.
    Parameters in 16 bits are updated in float32 and rounded once, where torch rounds after every operation.

    Ranks must agree on which parameters have gradients (a parameter without is left alone) and call `step` together. A
    `torch.amp.GradScaler` works as it does with torch's optimizers. `grad_factor` (multiplied into the gradients, in
    float32) and `found_inf` (nonzero: nothing changes; read on the host, equal on all ranks) hold for one step, which
    resets them to None. After the update, the parameter is copied to its tensor in `outputs`, if it has one there.

    Raises ValueError and TypeError for options and parameters, as early as it can.
    """

    grad_factor: Tensor | float | None
    found_inf: Tensor | None
    outputs: dict[Tensor, Tensor]

    takes_dtensors = True  # what fastpar.zero asks: rows are updated as a part of the whole

    @checked(computed=False)
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = "quintic",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        batch_dims: int = 0,
        replicas: GroupLike = None,
        distribute: str = "auto",
    ) -> None:
        if distribute not in MODES:
            raise ValueError(f"distribute must be one of {', '.join(map(repr, MODES))}, got {distribute!r}")
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "batch_dims": batch_dims,
        }
        super().__init__(checked_params(params), options)
        self._distribute = distribute
        self._set_up(Communicator.of(replicas))

    def _set_up(self, replicas: Communicator) -> None:
        self.grad_factor = None
        self.found_inf = None
        self.outputs = {}
        self._replicas = replicas
        self._layouts = LayoutReader(replicas)
        self._exchanges: dict[Hashable, MatrixExchange] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy or an unpickled optimizer, as torch makes them: without what belongs to a process group."""
        super().__setstate__(state)
        self.__dict__.setdefault("_distribute", "auto")
        if "_layouts" not in self.__dict__:
            self._set_up(Communicator(None))

    @checked(computed=False)
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch. Raises ValueError or TypeError for options and for parameters that are not
        matrices."""
        check_group(param_group, "param_group")
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    @checked(computed=False)
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on all parameters that have a gradient; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_factor, found_inf = self.grad_factor, self.found_inf
        self.grad_factor = self.found_inf = None
        if found_inf is not None and found_inf.item() != 0:
            return loss
        for batch in self._momentum(grad_factor):
            for matrix, result in zip(batch.matrices, self._orthogonalized(batch), strict=True):
                self._apply(matrix, result)
        return loss

    # ---- phases

    def _momentum(self, grad_factor: Tensor | float | None) -> list[_Batch]:
        """Updates the momentum of every parameter with a gradient; the matrices to orthogonalize, batched."""
        batches: dict[Hashable, _Batch] = {}
        index = -1
        for group in self.param_groups:
            for param in group["params"]:
                index += 1
                if param.grad is None:
                    continue
                layout = self._layouts.read(param, group["batch_dims"], group["ns_steps"])
                update = _as_matrices(self._updated_momentum(param, group, grad_factor), group["batch_dims"])
                key = (layout.domain, group["ns_dtype"], update.device)
                batch = batches.setdefault(key, _Batch(layout.axes))
                batch.matrices.append(_Matrix(index, param, group, layout, update.to(group["ns_dtype"])))
        return list(batches.values())

    def _updated_momentum(self, param: Tensor, group: Mapping[str, Any], factor: Tensor | float | None) -> Tensor:
        grad = _local_grad(param)
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        buffer = _local(state["momentum_buffer"])
        if factor is not None:
            grad = grad.to(torch.promote_types(grad.dtype, torch.float32)) * _local(factor)
        grad = grad.to(buffer.dtype)
        buffer.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _orthogonalized(self, batch: _Batch) -> list[Tensor]:
        parts = [matrix.update for matrix in batch.matrices]
        exchange = self._exchange(batch, parts)
        blocks = exchange.collect(parts)
        results = {}
        # Split matrices first, in one order on all ranks: they are computed together.
        for index in sorted(blocks, key=lambda i: (exchange.split(i) is None, i)):
            options = batch.matrices[index].options
            comm, dim, sizes = exchange.split(index) or (None, -1, None)
            results[index] = newton_schulz(
                blocks[index],
                group=comm,
                dim=dim,
                sizes=sizes,
                steps=options["ns_steps"],
                coefficients=options["ns_coefficients"],
                eps=options["eps"],
                dtype=options["ns_dtype"],
            )
        return exchange.distribute(results, parts[0])

    def _exchange(self, batch: _Batch, parts: Sequence[Tensor]) -> MatrixExchange:
        """The plan for these matrices; made anew when others have gradients or their layouts change."""
        specs = [matrix.layout.spec for matrix in batch.matrices]
        key = (
            tuple(matrix.index for matrix in batch.matrices),
            tuple(specs),
            batch.matrices[0].layout.domain,
            parts[0].dtype,
            parts[0].device,
        )
        if key not in self._exchanges:
            if len(self._exchanges) >= _MOST_PLANS:
                self._exchanges.clear()
            rates = rates_of(parts[0].device.type, parts[0].dtype)
            sizes = [comm.size for comm in batch.axes]
            places = assign(specs, sizes, rates, parts[0].element_size(), self._distribute)
            self._exchanges[key] = MatrixExchange(batch.axes, specs, places, parts)
        return self._exchanges[key]

    def _apply(self, matrix: _Matrix, result: Tensor) -> None:
        options, local = matrix.options, matrix.local
        lr = float(options["lr"])
        step = -lr * _ADJUSTMENTS[options["adjust_lr_fn"]](*matrix.layout.spec.shape)
        exact = local.dtype in (torch.float32, torch.float64)
        weight = local if exact else local.float()
        weight.mul_(1 - lr * options["weight_decay"]).add_(result.view(local.shape), alpha=step)
        if not exact:
            local.copy_(weight)
        if matrix.param in self.outputs:
            _local(self.outputs[matrix.param]).copy_(weight)


# ---- parameters and options ------------------------------------------------------------------------------------------


def _local(x: Any) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x


def _local_grad(param: Tensor) -> Tensor:
    """The gradient's local part. Raises TypeError or ValueError for one that does not lie as its parameter does."""
    grad = cast(Tensor, param.grad)
    if grad.is_sparse:
        raise TypeError("Muon needs dense gradients, got a sparse one")
    if isinstance(grad, DTensor) != isinstance(param, DTensor):
        raise TypeError(f"a parameter that is a {type(param).__name__} has a gradient that is a {type(grad).__name__}")
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        raise ValueError(
            f"the gradient of a parameter {param.placements} must have its placements, got {grad.placements}"
        )
    return cast(Tensor, _local(grad))


def _as_matrices(local: Tensor, batch_dims: int) -> Tensor:
    """[count, rows, columns]."""
    shape = local.shape
    count, columns = math.prod(shape[:batch_dims]), math.prod(shape[batch_dims + 1 :])
    return local.reshape(count, shape[batch_dims], columns)


def _check_group(group: Mapping[str, Any]) -> None:
    for name in ("lr", "weight_decay", "momentum"):
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must be a number or a tensor of one, got shape {tuple(value.shape)}")
        if not float(value) >= 0:
            raise ValueError(f"{name} must not be negative, got {float(value)}")
    polynomials(group["ns_coefficients"], group["ns_steps"])
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        names = ", ".join(repr(name) for name in _ADJUSTMENTS)
        raise ValueError(f"adjust_lr_fn must be one of {names}, got {group['adjust_lr_fn']!r}")
    if group["ns_dtype"] not in DTYPES:
        raise TypeError(f"ns_dtype must be one of {', '.join(map(str, DTYPES))}, got {group['ns_dtype']}")
    for param in group["params"]:
        if not param.is_floating_point():
            raise TypeError(f"Muon needs real floating-point parameters, got {param.dtype}")
        if param.ndim < 2 + group["batch_dims"]:
            raise ValueError(
                f"Muon is for matrices: a parameter needs at least {2 + group['batch_dims']} dims (batch_dims="
                f"{group['batch_dims']}), got shape {tuple(param.shape)}; give it to another optimizer, such as AdamW"
            )
