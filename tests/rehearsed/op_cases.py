"""One call of every public op, forward and backward, on one rank: name -> (device) -> tensors to compare.

A case makes its inputs on the CPU from a fixed seed, so that every device gets the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastpar import ops

Case = Callable[[str], Sequence[Tensor]]
CASES: dict[str, Case] = {}
T, H, V, E, K = 6, 16, 40, 4, 2  # tokens, hidden, vocabulary, experts, choices of a token


class Maker:
    """Inputs on a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.leaves: list[Tensor] = []

    def plain(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def leaf(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = self.plain(*shape, dtype=dtype).requires_grad_()
        self.leaves.append(x)
        return x

    def ids(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(0, bound, shape, generator=self.generator).to(self.device)

    def choices(self) -> Tensor:
        """[T, K] experts, those of a token different."""
        return torch.stack([torch.randperm(E, generator=self.generator)[:K] for _ in range(T)]).to(self.device)


def backward(make: Maker, *outputs: Tensor) -> list[Tensor]:
    """The outputs and the gradients of all leaves."""
    total = sum(
        (out.float() * torch.arange(1, out.numel() + 1, device=out.device).view(out.shape)).sum() for out in outputs
    )
    total.backward()  # type: ignore[union-attr]
    assert all(x.grad is not None for x in make.leaves)
    return [*(out.detach() for out in outputs), *(x.grad for x in make.leaves)]  # type: ignore[misc]


def case(name: str) -> Callable[[Callable[[Maker], Sequence[Tensor]]], Any]:
    def add(fn: Callable[[Maker], Sequence[Tensor]]) -> Any:
        assert name not in CASES
        CASES[name] = lambda device: fn(Maker(device))
        return fn

    return add


# ---- vocabulary ------------------------------------------------------------------------------------------------------


@case("vocab_parallel_cross_entropy")
def _(m: Maker) -> Sequence[Tensor]:
    target = m.ids(V, T)
    target[1] = -100
    return backward(m, ops.vocab_parallel_cross_entropy(m.leaf(T, V), target))


@case("vocab_parallel_cross_entropy, every option")
def _(m: Maker) -> Sequence[Tensor]:
    loss, lse = ops.vocab_parallel_cross_entropy(
        m.leaf(T, V), m.ids(V, T), label_smoothing=0.1, z_loss=1e-3, softcap=5.0, logit_scale=0.5,
        weight=m.plain(V).abs(), reduction="none", return_lse=True,
    )  # fmt: skip
    return backward(m, loss, lse)


@case("vocab_parallel_cross_entropy, in place")
def _(m: Maker) -> Sequence[Tensor]:
    x = m.leaf(T, V)
    return backward(m, ops.vocab_parallel_cross_entropy(x * 1.0, m.ids(V, T), inplace_backward=True))


@case("linear_cross_entropy")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.linear_cross_entropy(m.leaf(T, H), m.leaf(V, H), m.ids(V, T), bias=m.leaf(V)))


def _loss_parts(m: Maker) -> tuple[Any, ...]:
    hidden, weight, target = m.plain(T, H), m.plain(V, H), m.ids(V, T)
    loss, lse = ops.linear_cross_entropy(hidden, weight, target, reduction="none", return_lse=True)
    return hidden, weight, target, lse, torch.ones_like(loss)


@case("linear_cross_entropy_dgrad")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.linear_cross_entropy_dgrad(*_loss_parts(m))]


@case("linear_cross_entropy_wgrad")
def _(m: Maker) -> Sequence[Tensor]:
    return [x for x in ops.linear_cross_entropy_wgrad(*_loss_parts(m)) if x is not None]


@case("vocab_parallel_embedding")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.vocab_parallel_embedding(m.ids(V, T), m.leaf(V, H)))


@case("vocab_parallel_softmax")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.vocab_parallel_softmax(m.leaf(T, V), softcap=5.0))


@case("vocab_parallel_log_softmax")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.vocab_parallel_log_softmax(m.leaf(T, V)))


@case("vocab_parallel_entropy")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.vocab_parallel_entropy(m.leaf(T, V)))


@case("vocab_parallel_log_prob")
def _(m: Maker) -> Sequence[Tensor]:
    x = m.leaf(T, V)
    return backward(m, ops.vocab_parallel_log_prob(x, m.ids(V, T)))


@case("vocab_parallel_log_prob_and_entropy")
def _(m: Maker) -> Sequence[Tensor]:
    x = m.leaf(T, V)
    return backward(m, *ops.vocab_parallel_log_prob_and_entropy(x, m.ids(V, T)))


@case("vocab_parallel_argmax")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.vocab_parallel_argmax(m.plain(T, V))]


@case("vocab_parallel_topk")
def _(m: Maker) -> Sequence[Tensor]:
    return list(ops.vocab_parallel_topk(m.plain(T, V), 3))


@case("vocab_parallel_sample")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.vocab_parallel_sample(m.plain(T, V), seed=3, temperature=0.7)]


@case("vocab_parallel_top_k_top_p")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.vocab_parallel_top_k_top_p(m.plain(T, V), top_k=9, top_p=0.8, min_p=0.01)]


# ---- rows ------------------------------------------------------------------------------------------------------------


@case("rms_norm")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.rms_norm(m.leaf(T, H), m.leaf(H)))


@case("add_rms_norm")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, *ops.add_rms_norm(m.leaf(T, H), m.leaf(T, H), m.leaf(H)))


@case("all_reduce_rms_norm")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, *ops.all_reduce_rms_norm(m.leaf(T, H), m.leaf(H), group=None, residual=m.leaf(T, H)))


@case("reduce_scatter_rms_norm")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, *ops.reduce_scatter_rms_norm(m.leaf(T, H), m.leaf(H), group=None, residual=m.leaf(T, H)))


@case("swiglu")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.swiglu(m.leaf(T, 2 * H)))


@case("sharded_dropout")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.sharded_dropout(m.leaf(T, H), 0.3, seed=5, offset=[0, 3], global_shape=[T, H + 7]))


@case("rotary_tables")
def _(m: Maker) -> Sequence[Tensor]:
    return list(ops.rotary_tables(torch.arange(T, device=m.device), 8))


@case("rotary_embedding")
def _(m: Maker) -> Sequence[Tensor]:
    q, k = m.leaf(1, T, 2, 8), m.leaf(1, T, 1, 8)
    return backward(m, *(ops.rotary_embedding(x, positions=torch.arange(T, device=m.device)) for x in (q, k)))


@case("quantize_blocks")
def _(m: Maker) -> Sequence[Tensor]:
    codes, scales = ops.quantize_blocks(m.plain(500))
    return [codes.view(torch.uint8), scales]


@case("dequantize_blocks")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.dequantize_blocks(*ops.quantize_blocks(m.plain(500)))]


# ---- attention -------------------------------------------------------------------------------------------------------

TOKENS = (ops.TokenRange(0, 7), ops.TokenRange(20, 31))
MASK = ops.AttentionMask(causal=True, window=(9, 0), documents=((4, 21, 6), (13, 18)))


def _heads(m: Maker, dtype: torch.dtype = torch.float32, value_dim: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return m.leaf(2, 4, 18, 8, dtype=dtype), m.leaf(2, 2, 18, 8, dtype=dtype), m.leaf(2, 2, 18, value_dim, dtype=dtype)


@case("attention")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.attention(*_heads(m), causal=True))


@case("attention, 16 bits")
def _(m: Maker) -> Sequence[Tensor]:
    """By torch's kernels forward, and by ours backward."""
    out = ops.attention(*_heads(m, torch.bfloat16, 8), causal=True)
    return [out.detach(), *backward(m, out.float() / 1000)]


@case("attention, torch's kernels")
def _(m: Maker) -> Sequence[Tensor]:
    """By flash, forward and backward, of packed documents."""
    tokens, mask = (ops.TokenRange(0, 18),), ops.AttentionMask(causal=True, window=(9, 0), documents=((4, 14), (12, 6)))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = ops.attention(*_heads(m, torch.bfloat16, 8), mask.tiles(tokens, tokens))
    return [out.detach(), *backward(m, out.float() / 1000)]


@case("attention, every option")
def _(m: Maker) -> Sequence[Tensor]:
    where = torch.cat([torch.arange(r.start, r.stop) for r in TOKENS])
    dropout = ops.AttentionDropout(0.3, seed=3, q_positions=where, k_positions=where, first_head=2)
    q, k, v = _heads(m)
    out, lse = ops.attention(
        q, k, v, MASK.tiles(TOKENS, TOKENS), softcap=4.0, sink=m.leaf(4), dropout=dropout, return_lse=True
    )
    return backward(m, out, lse)


@case("context_attention")
def _(m: Maker) -> Sequence[Tensor]:
    layout = [(ops.TokenRange(0, 18),)]
    return backward(
        m, ops.context_attention(*_heads(m), group=None, layout=layout, mask=ops.AttentionMask(causal=True))
    )


# ---- linears on one rank ---------------------------------------------------------------------------------------------


@case("all_gather_linear")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.all_gather_linear(m.leaf(T, H), m.leaf(V, H), m.leaf(V), group=None))


@case("copy_to_linear")
def _(m: Maker) -> Sequence[Tensor]:
    store = ops.WeightGradStore()
    weight = torch.nn.Parameter(m.plain(V, H))
    m.leaves.append(weight)
    out = ops.copy_to_linear(m.leaf(T, H), weight, group=None, wgrad_store=store)
    out.square().sum().backward()
    store.run()
    return [out.detach(), *(x.grad for x in m.leaves)]  # type: ignore[misc]


@case("linear_all_reduce")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.linear_all_reduce(m.leaf(T, H), m.leaf(V, H), m.leaf(V), group=None))


@case("linear_reduce_scatter")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.linear_reduce_scatter(m.leaf(T, H), m.leaf(V, H), m.leaf(V), group=None))


@case("newton_schulz")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.newton_schulz(m.plain(8, 12), dtype=torch.float32)]


# ---- optimizer steps and sums ----------------------------------------------------------------------------------------


@case("adamw_step")
def _(m: Maker) -> Sequence[Tensor]:
    tensors = [[m.plain(33), m.plain(5, 7)] for _ in range(4)]
    tensors[3] = [x.square() for x in tensors[3]]
    ops.adamw_step(*tensors, step=3, lr=1e-2)
    return [x for some in tensors for x in some]


@case("adamw_step, counted on the device")
def _(m: Maker) -> Sequence[Tensor]:
    tensors = [[m.plain(33)], [m.plain(33)], [m.plain(33)], [m.plain(33).square()]]
    step = torch.tensor(3.0, device=m.device)
    found = torch.zeros((), device=m.device)
    ops.adamw_step(*tensors, step=step, lr=1e-2, found_inf=found, grad_factor=torch.ones((), device=m.device))
    return [x for some in tensors for x in some]


@case("sgd_step")
def _(m: Maker) -> Sequence[Tensor]:
    tensors = [[m.plain(33), m.plain(5, 7)] for _ in range(3)]
    ops.sgd_step(*tensors, lr=1e-2, momentum=0.9)
    return [x for some in tensors for x in some]


@case("lion_step")
def _(m: Maker) -> Sequence[Tensor]:
    tensors = [[m.plain(33), m.plain(5, 7)] for _ in range(3)]
    ops.lion_step(*tensors, lr=1e-2)
    return [x for some in tensors for x in some]


@case("exact_square_sum")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.exact_square_sum([m.plain(300), m.plain(7, dtype=torch.bfloat16)])]


@case("square_sum_norm")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.square_sum_norm(ops.exact_square_sum([m.plain(300)]))]


# ---- experts ---------------------------------------------------------------------------------------------------------


@case("router_logits")
def _(m: Maker) -> Sequence[Tensor]:
    return backward(m, ops.router_logits(m.leaf(T, H), m.leaf(E, H)))


@case("moe_route")
def _(m: Maker) -> Sequence[Tensor]:
    routing = ops.moe_route(m.leaf(T, E), ops.RouteRule(K, normalize=True))
    return [routing.indices, routing.counts, *backward(m, routing.weights)]


@case("moe_route, groups and a bias")
def _(m: Maker) -> Sequence[Tensor]:
    rule = ops.RouteRule(K, score="sigmoid", num_groups=2, top_groups=1, scale=2.5)
    routing = ops.moe_route(m.leaf(T, E), rule, bias=m.plain(E))
    return [routing.indices, routing.counts, *backward(m, routing.weights)]


@case("expert_choice_route")
def _(m: Maker) -> Sequence[Tensor]:
    routing = ops.expert_choice_route(m.leaf(T, E), 2)
    return [routing.indices, routing.counts, *backward(m, routing.weights)]


@case("moe_capacity")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.moe_capacity(m.choices(), m.plain(T, K).sigmoid(), num_experts=E, factor=0.5)]


@case("moe_capacity, in position")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.moe_capacity(m.choices(), None, num_experts=E, factor=0.5, policy="position")]


@case("moe_plan")
def _(m: Maker) -> Sequence[Tensor]:
    plan = ops.moe_plan(m.choices(), m.plain(T, K), num_experts=E)
    return [plan.source, plan.row_weights, plan.counts]


@case("moe_send")
def _(m: Maker) -> Sequence[Tensor]:
    plan = ops.moe_plan(m.choices(), m.plain(T, K), num_experts=E)
    return backward(m, ops.moe_send(m.leaf(T, H), plan)[0])


@case("moe_dispatch")
def _(m: Maker) -> Sequence[Tensor]:
    rows, weights, plan = ops.moe_dispatch(m.leaf(T, H), m.choices(), m.leaf(T, K), num_experts=E)
    return [plan.source, *backward(m, rows, weights)]


@case("moe_combine")
def _(m: Maker) -> Sequence[Tensor]:
    rows, weights, plan = ops.moe_dispatch(m.leaf(T, H), m.choices(), m.leaf(T, K), num_experts=E)
    return backward(m, ops.moe_combine(rows * 2.0, plan, weights))


@case("moe_dispatch, padded")
def _(m: Maker) -> Sequence[Tensor]:
    padded = ops.Dispatch(padding=ops.Padding(align=4))
    rows, weights, plan = ops.moe_dispatch(m.leaf(T, H), m.choices(), m.leaf(T, K), num_experts=E, dispatch=padded)
    return backward(m, ops.moe_combine(rows * 2.0, plan, weights))


@case("moe_mlp")
def _(m: Maker) -> Sequence[Tensor]:
    x, weights = m.leaf(T, H), m.leaf(T, K)
    return backward(m, ops.moe_mlp(x, m.choices(), weights, ops.ExpertWeights(m.leaf(E, 2 * H, H), m.leaf(E, H, H))))


@case("moe_mlp, by grouped products")
def _(m: Maker) -> Sequence[Tensor]:
    x, weights = m.leaf(T, H), m.leaf(T, K)
    experts = ops.ExpertWeights(m.leaf(E, 2 * H, H), m.leaf(E, H, H), m.leaf(E, 2 * H), m.leaf(E, H))
    return backward(m, ops.moe_mlp(x, m.choices(), weights, experts, dispatch=ops.Dispatch("all_to_all")))


@case("grouped_linear")
def _(m: Maker) -> Sequence[Tensor]:
    splits = (0, 3, 3, 7, T + 4)
    return backward(m, ops.grouped_linear(m.leaf(T + 4, H), m.leaf(E, V, H), splits, m.leaf(E, V)))


@case("grouped_linear, bfloat16")
def _(m: Maker) -> Sequence[Tensor]:
    kinds = {"dtype": torch.bfloat16}
    return backward(m, ops.grouped_linear(m.leaf(T + 4, H, **kinds), m.leaf(E, V, H, **kinds), (0, 3, 3, 7, T + 4)))


@case("grouped_linear, padded")
def _(m: Maker) -> Sequence[Tensor]:
    """What lies in padding is read by nobody, in forward and backward."""
    found: list[Tensor] = []
    for dtype, transposed in ((torch.float16, False), (torch.float32, True), (torch.bfloat16, False)):
        m.leaves, counts = [], (2, 0, 4, 1)
        shape = (E, H, V) if transposed else (E, V, H)
        x, weight, bias = (m.leaf(*s, dtype=dtype) for s in ((T + 4, H), shape, (E, V)))
        with torch.no_grad():
            x[[2, 8, 9]] = float("nan")
        out = ops.grouped_linear(x, weight, (0, 3, 3, 7, T + 4), bias, counts=counts, transposed=transposed)
        grad = torch.ones_like(out).masked_fill_(torch.isnan(x.detach()).any(1)[:, None], float("nan"))
        found += [out.detach(), *torch.autograd.grad(out, m.leaves, grad)]
    return found


@case("grouped_linear_dgrad")
def _(m: Maker) -> Sequence[Tensor]:
    return [ops.grouped_linear_dgrad(m.plain(T + 4, V), m.plain(E, V, H), (0, 3, 3, 7, T + 4))]


@case("grouped_linear_wgrad")
def _(m: Maker) -> Sequence[Tensor]:
    arguments = m.plain(T + 4, V), m.plain(T + 4, H), m.plain(E, V, H)
    return [ops.grouped_linear_wgrad(*arguments, (0, 3, 3, 7, T + 4))]
