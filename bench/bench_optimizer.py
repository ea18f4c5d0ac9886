"""One optimizer step, AdamW: the update alone, and unscaling, clipping, update and low-precision copy together.

    fastpar bench optimizer [--quick] [--job update,wide,step,small] [--elements 20000000] [--tensors 50]
                            [--threads 1,2] [--device cuda]

What is timed, by job; sizes in bytes per element are the least traffic, everything read once and written once:

    update  parameters, gradients and both moments of one dtype               fp32 28, bf16 14
            On CUDA also as replays of a CUDA graph: the kernels, without the host's time.
    wide    bf16 parameters and gradients, fp32 moments                       22; split masters add 4
    step    bf16 parameters with fp32 masters and moments, bf16 gradients scaled by 2^12: unscale, check for values
            that are not finite, clip to a global norm, update, write the bf16 copies.
            Least traffic: 2 for the norm, and 28 for the step with its copy. With fp32: no copies, 4 and 28.
    small   `update` by the optimizers' own step() over 4096 tensors of 64 elements: what the host does per tensor.
            Divide the time by 4096. The other jobs call ops, and pay for 50 tensors.

Traps besides those of `bench.harness`:

* torch's fused AdamW takes parameters, gradients and states of one dtype, so in `wide` the peer is the fused bf16 one,
  which moves less (14 bytes), and the fp32 one behind a copy of the gradients. In `step` a user of torch copies
  gradients to fp32 and masters to bf16; both ways of unscaling and clipping are run: passes over the gradients, and the
  factor folded into the scale that the fused kernel takes.
* The norm is torch's in every provider, fastpar's too: what is compared is the passes around it. It is taken in fp32:
  get_total_norm of bf16 gradients is a bf16 number, off by up to 0.4 %.
* A step moves parameters and moments. They stay of one size here (a fixed gradient, a learning rate of 1e-4), no
  denormals, so every call does the same work. Providers of one job share the tensors; `check` starts from fresh ones.
* Tensors are made once and touched before they are timed: huge pages are the setting "tuned".
* 2e8 normal numbers take the host seconds for each role and provider: they are drawn where they are used, on CUDA
  tensors in milliseconds, where the float64 answer is kept for the next provider as well. On the CPU its 16 bytes an
  element are not.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.device import Recorded
from bench.harness import Case, Error, Provider, Rank, absent, copy_roofs
from bench.options import DTYPES, Bench, parser, positive, run
from bench.peers import find

LR, BETAS, EPS, DECAY, STEP = 1e-4, (0.9, 0.999), 1e-8, 0.01, 10
SCALE, MAX_NORM = 4096.0, 1.0
JOBS = ("update", "wide", "step", "small")
SMALL_TENSORS, SMALL_ELEMENTS = 4096, 64  # of the job "small"
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # of the norm of the result


@dataclass(frozen=True)
class OptimizerCase:
    """`elements` parameters in `tensors` tensors of as nearly the same size as can be."""

    dtype: str
    job: str
    elements: int
    tensors: int
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "job": self.job, "elements": self.elements, "tensors": self.tensors}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        if self.job == "small":
            return small_providers(problem)
        makers = {"update": update_providers, "wide": wide_providers, "step": step_providers}[self.job]
        roof = copy_roofs(min(4 * self.elements, 256 << 20), rank.world_size, rank.device)
        return [*makers(problem), *roof]


class Problem:
    """The tensors of a case; lists of `tensors` views into one buffer per role, as a flat shard has them."""

    def __init__(self, case: OptimizerCase, device: str) -> None:
        self.case, self.device, self.dtype = case, device, DTYPES[case.dtype]
        self._made: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        self._exact: tuple[Tensor, Tensor] | None = None

    def fresh(self, role: str, dtype: torch.dtype) -> list[Tensor]:
        case = self.case
        if role == "remainders":
            return list(torch.zeros(case.elements, dtype=dtype, device=self.device).tensor_split(case.tensors))
        seed = ("params", "grads", "exp_avgs", "exp_avg_sqs").index(role.replace("masters", "params"))
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.empty(case.elements, device=self.device).normal_(generator=generator)
        if role == "grads":
            x *= SCALE * 1e-3 if case.job == "step" else 1e-3
        if role == "exp_avgs":
            x *= 1e-3
        if role == "exp_avg_sqs":
            x = x.square_().add_(1e-3).mul_(1e-6)
        return list(x.to(dtype).tensor_split(case.tensors))

    def tensors(self, role: str, dtype: torch.dtype) -> list[Tensor]:
        """Shared by the providers of the job."""
        if (role, dtype) not in self._made:
            self._made[role, dtype] = self.fresh(role, dtype)
        return self._made[role, dtype]

    def exact(self) -> tuple[Tensor, Tensor]:
        """(parameters, first moments) after the step in float64."""
        found = self._exact or self._compute_exact()
        if self.device != "cpu":
            self._exact = found
        return found

    def _compute_exact(self) -> tuple[Tensor, Tensor]:
        """From fresh values in the dtypes of the job."""
        wide = torch.float32 if self.case.job not in ("update", "small") else self.dtype
        param_dtype = torch.float32 if self.case.job == "step" else self.dtype
        p, g, m, v = (
            torch.cat(self.fresh(role, dtype)).double()
            for role, dtype in (
                ("params", param_dtype),
                ("grads", self.dtype),
                ("exp_avgs", wide),
                ("exp_avg_sqs", wide),
            )
        )
        if self.case.job == "step":
            g /= SCALE
            g *= min(1.0, MAX_NORM / (g.norm().item() + 1e-6))
        m.lerp_(g, 1 - BETAS[0])
        v = BETAS[1] * v + (1 - BETAS[1]) * g.square()
        divisor = v.sqrt_().div_(math.sqrt(1 - BETAS[1] ** STEP)).add_(EPS)
        return p * (1 - LR * DECAY) - LR / (1 - BETAS[0] ** STEP) * (m / divisor), m


Tensors = dict[str, list[Tensor]]


def provider(
    problem: Problem,
    name: str,
    kind: str,
    roles: dict[str, torch.dtype],
    make: Callable[[Tensors], Callable[[], object]],
    num_bytes: float,
    result: str = "params",
) -> Provider:
    """A provider whose call is `make(tensors by role)`; the errors are those of `result` and of the first moments."""

    def check() -> dict[str, Error]:
        fresh = {role: problem.fresh(role, dtype) for role, dtype in roles.items()}
        make(fresh)()
        found = {}
        for role, exact in zip((result, "exp_avgs"), problem.exact(), strict=True):
            x = torch.cat(fresh[role])
            error = ((x.double() - exact).norm() / exact.norm()).item()
            found[role] = Error(error, TOLERANCES[x.dtype])
        return found

    shared = {role: problem.tensors(role, dtype) for role, dtype in roles.items()}
    return Provider(name, kind, call=make(shared), check=check, num_bytes=num_bytes * problem.case.elements)


# ---------------------------------------------------------------------------------------------------------- providers


def fastpar_update(x: Tensors, **options: Any) -> Callable[[], object]:
    from fastpar.ops import adamw_step

    lists = (x["params"], x["grads"], x["exp_avgs"], x["exp_avg_sqs"])
    return lambda: adamw_step(*lists, step=STEP, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **options)


def fastpar_stochastic(x: Tensors) -> Callable[[], object]:
    from fastpar.ops import StochasticRounding

    count = len(x["params"])
    return fastpar_update(x, stochastic=StochasticRounding(1, range(count), [0] * count))


def recorded(make: Callable[[Tensors], Callable[[], object]], x: Tensors) -> Callable[[], object]:
    """The step of `make` as a CUDA graph."""
    return Recorded(make(x), [tensor for role in ("params", "exp_avgs", "exp_avg_sqs") for tensor in x[role]])


def torch_fused(x: Tensors, grads: str = "grads", params: str = "params", **scalars: Any) -> Callable[[], object]:
    """The kernel under torch.optim.AdamW(fused=True), without the optimizer's own work per tensor."""
    steps = [torch.tensor(float(STEP), device=x[params][0].device) for _ in x[params]]
    return lambda: torch._fused_adamw_(
        x[params],
        x[grads],
        x["exp_avgs"],
        x["exp_avg_sqs"],
        [],
        steps,
        lr=LR,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=DECAY,
        eps=EPS,
        amsgrad=False,
        maximize=False,
        **scalars,
    )


def deepspeed_update(x: Tensors) -> Callable[[], object]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    params = [torch.nn.Parameter(p, requires_grad=True) for p in x["params"]]
    optimizer = DeepSpeedCPUAdam(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True)
    for i, (param, grad) in enumerate(zip(params, x["grads"], strict=True)):
        param.grad = grad
        optimizer.state[param] = {"step": STEP - 1, "exp_avg": x["exp_avgs"][i], "exp_avg_sq": x["exp_avg_sqs"][i]}
    return lambda: optimizer.step()


def update_providers(problem: Problem) -> list[Provider]:
    dtype = problem.dtype
    roles = dict.fromkeys(("params", "grads", "exp_avgs", "exp_avg_sqs"), dtype)
    num_bytes = 7.0 * dtype.itemsize
    found = [
        provider(problem, "fastpar", "fastpar", roles, fastpar_update, num_bytes),
        provider(problem, "torch fused", "torch", roles, torch_fused, num_bytes),
    ]
    if dtype == torch.bfloat16:
        found.append(provider(problem, "fastpar stochastic", "fastpar", roles, fastpar_stochastic, num_bytes))
    if problem.device != "cpu":
        replayed = {"fastpar": fastpar_update, "torch fused": torch_fused}
        found += [
            provider(problem, f"{name}, CUDA graph", name.split(" ")[0], roles, partial(recorded, make), num_bytes)
            for name, make in replayed.items()
        ]
    reason = find(lambda: deepspeed_update({role: [torch.zeros(8, dtype=dtype)] for role in roles}))
    if isinstance(reason, str):
        found.append(absent("DeepSpeedCPUAdam", reason))
    else:
        found.append(provider(problem, "DeepSpeedCPUAdam", "torch", roles, deepspeed_update, num_bytes))
    return found


def wide_providers(problem: Problem) -> list[Provider]:
    narrow, wide = problem.dtype, torch.float32
    roles = {"params": narrow, "grads": narrow, "exp_avgs": wide, "exp_avg_sqs": wide}

    def split(x: Tensors) -> Callable[[], object]:
        return fastpar_update(x, remainders=x["remainders"])

    def behind_copies(x: Tensors) -> Callable[[], object]:
        x = {**x, "wide_grads": [torch.zeros_like(g, dtype=wide) for g in x["grads"]]}
        x["masters"] = [p.float() for p in x["params"]]
        step = torch_fused(x, grads="wide_grads", params="masters")

        def call() -> None:
            torch._foreach_copy_(x["wide_grads"], x["grads"])
            step()
            torch._foreach_copy_(x["params"], x["masters"])

        return call

    all_narrow = {role: narrow for role in roles}  # noqa: C420
    return [
        provider(problem, "fastpar", "fastpar", roles, fastpar_update, 22.0),
        provider(problem, "fastpar split master", "fastpar", {**roles, "remainders": torch.int16}, split, 26.0),
        provider(problem, "torch fused, bf16 moments", "torch", all_narrow, torch_fused, 14.0),
        provider(problem, "torch fused, fp32 master", "torch", roles, behind_copies, 30.0),
    ]


def step_providers(problem: Problem) -> list[Provider]:
    narrow, wide = problem.dtype, torch.float32
    roles = {"masters": wide, "params": narrow, "grads": narrow, "exp_avgs": wide, "exp_avg_sqs": wide}
    if narrow == wide:
        del roles["masters"]
    result = "params" if narrow == wide else "masters"
    num_bytes = 32.0 if narrow == wide else 30.0
    makers = {"fastpar": fastpar_step, "torch, passes": torch_passes, "torch, folded": torch_folded}
    return [
        provider(problem, name, name.split(",")[0], roles, make, num_bytes, result) for name, make in makers.items()
    ]


def small_providers(problem: Problem) -> list[Provider]:
    from fastpar.optim import AdamW

    dtype = problem.dtype
    roles = dict.fromkeys(("params", "grads", "exp_avgs", "exp_avg_sqs"), dtype)
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "fastpar": partial(AdamW, state_dtype=dtype, stochastic_rounding=False),
        "fastpar stochastic": partial(AdamW, state_dtype=dtype),
        "torch fused": partial(torch.optim.AdamW, fused=True),
        "torch foreach": partial(torch.optim.AdamW, foreach=True),
    }
    if dtype == torch.float32:  # where nothing is rounded stochastically
        del makers["fastpar stochastic"]

    def steps_of(make: Callable[..., torch.optim.Optimizer], x: Tensors) -> Callable[[], object]:
        params = [torch.nn.Parameter(p) for p in x["params"]]
        optimizer = make(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        for param, grad, exp_avg, exp_avg_sq in zip(params, x["grads"], x["exp_avgs"], x["exp_avg_sqs"], strict=True):
            param.grad = grad
            step = torch.tensor(STEP - 1.0, device=param.device)
            optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        return optimizer.step

    return [
        provider(problem, name, name.split(" ")[0], roles, partial(steps_of, make), 7.0 * dtype.itemsize)
        for name, make in makers.items()
    ]


def total_norm(grads: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)))


def fastpar_step(x: Tensors) -> Callable[[], object]:
    from fastpar.ops import adamw_step

    masters = x.get("masters", x["params"])
    outputs = x["params"] if "masters" in x else None

    def call() -> None:
        norm = total_norm(x["grads"]) / SCALE
        adamw_step(
            masters,
            x["grads"],
            x["exp_avgs"],
            x["exp_avg_sqs"],
            step=STEP,
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
            grad_factor=(MAX_NORM / (norm + 1e-6)).clamp(max=1.0) / SCALE,
            found_inf=(~norm.isfinite()).float(),
            outputs=outputs,
        )

    return call


def _wide_grads(x: Tensors) -> tuple[Tensors, Callable[[], None], Callable[[], None]]:
    """Tensors with fp32 gradients to step on, and the copies before and after the step."""
    if "masters" not in x:
        # Scaling in place would shrink the gradients from call to call: every call starts from the same ones.
        x = {**x, "masters": x["params"], "wide_grads": [torch.zeros_like(g) for g in x["grads"]]}
        return x, lambda: torch._foreach_copy_(x["wide_grads"], x["grads"]), lambda: None
    x = {**x, "wide_grads": [torch.zeros_like(g, dtype=torch.float32) for g in x["grads"]]}
    return (
        x,
        lambda: torch._foreach_copy_(x["wide_grads"], x["grads"]),
        lambda: torch._foreach_copy_(x["params"], x["masters"]),
    )


def torch_passes(x: Tensors) -> Callable[[], object]:
    """What GradScaler.unscale_, clip_grad_norm_ and the fused optimizer do, on fp32 gradients."""
    x, widen, narrow = _wide_grads(x)
    step = torch_fused(x, grads="wide_grads", params="masters")
    device = x["grads"][0].device
    inverse, found_inf = torch.tensor(1.0 / SCALE, device=device), torch.zeros((), device=device)

    def call() -> None:
        widen()
        torch._amp_foreach_non_finite_check_and_unscale_(x["wide_grads"], found_inf, inverse)
        norm = total_norm(x["wide_grads"])
        torch._foreach_mul_(x["wide_grads"], (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        if not found_inf.item():
            step()
            narrow()

    return call


def torch_folded(x: Tensors) -> Callable[[], object]:
    """The norm of the gradients as they are, and a scale that the fused kernel divides by."""
    x, widen, narrow = _wide_grads(x)
    device = x["grads"][0].device
    scale, found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    skips_itself = device.type == "cuda"  # torch's fused kernel for CUDA reads found_inf on the device
    grads = "wide_grads"
    step = torch_fused(x, grads=grads, params="masters", grad_scale=scale, found_inf=found_inf)

    def call() -> None:
        norm = total_norm(x["grads"]) / SCALE
        scale.copy_(SCALE * ((norm + 1e-6) / MAX_NORM).clamp(min=1.0))
        found_inf.copy_(~norm.isfinite())
        widen()
        if skips_itself or not found_inf.item():
            step()
            narrow()

    return call


# --------------------------------------------------------------------------------------------------------------- main


def _jobs(text: str) -> list[str]:
    jobs = text.split(",")
    if not set(jobs) <= set(JOBS):
        raise argparse.ArgumentTypeError(f"unknown job in {text!r}; choose from {', '.join(JOBS)}")
    return jobs


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    sizes = {"small": (SMALL_TENSORS * SMALL_ELEMENTS, SMALL_TENSORS)}
    return [
        OptimizerCase(dtype, job, *sizes.get(job, (flags.elements, flags.tensors)))
        for job in flags.job
        for dtype in flags.dtype
        if not (job == "wide" and dtype == "fp32")  # that is `update`
    ]


BENCH = Bench(
    name="optimizer",
    baselines=("torch fused", "torch fused, bf16 moments", "torch, passes"),
    cases=cases,
    memory=False,
    quick={"elements": 200_000, "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "one AdamW step: update, unscale, clip, copy", threads=[1, 2], ranks=[1], blocks=6, iters=3)
    made.add_argument("--job", type=_jobs, default=list(JOBS), metavar="LIST", help=", ".join(JOBS))
    made.add_argument("--elements", type=positive, default=20_000_000, metavar="N", help="parameters")
    made.add_argument("--tensors", type=positive, default=50, metavar="N", help="tensors that they are in")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "optimizer", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
