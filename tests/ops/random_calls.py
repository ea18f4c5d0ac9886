"""Random calls of the ops, which are compared with plain PyTorch in float64 on one process.

A case is an op with random options, inputs in float64 and what plain PyTorch makes of the whole inputs; `Split` says
which part of an input or a result a rank has. `play` runs a case as users may: in any dtype, with inputs and upstream
gradients anywhere in memory, with gradients of some inputs only, asked for in several ways.

The tolerances are wide where a dtype has few bits. What is looked for here are wrong strides, factors, parts, signs and
missing sums, of combinations that nobody has thought of; what an op rounds is tested in its own file.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops
from fastpar.comm import Communicator, shard_sizes

TOLERANCE = {torch.float64: 4e-9, torch.float32: 8e-4, torch.float16: 3e-2, torch.bfloat16: 0.16}
SMALL = 3e-2  # errors of results smaller than this are seen beside it: 16 bits cancel
WAYS = ("backward", "backward", "backward", "twice", "autograd.grad", "one result", "changed input", "changed result")


@dataclass(frozen=True)
class Split:
    dim: int
    sizes: tuple[int, ...]

    def part(self, x: Tensor, rank: int) -> Tensor:
        return x.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])


@dataclass
class Case:
    """`op(group, **parts)` of the parts of the inputs, and `plain(**inputs)` of all of them. None: whole on each rank.

    writes  the op writes into its first input, which then is no leaf
    """

    inputs: dict[str, Tensor]
    op: Callable[..., Any]
    plain: Callable[..., Any]
    splits: dict[str, Split | None] = field(default_factory=dict)
    results: Sequence[Split | None] = (None,)
    writes: bool = False


class Draw(random.Random):
    """What all ranks draw alike."""

    def __init__(self, seed: str, ranks: int) -> None:
        super().__init__(seed)
        self.ranks = ranks

    def normal(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.randrange(1 << 30))
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def shape(self) -> list[int]:
        """Of what an op treats row by row: up to three dims, now and then an empty one."""
        return [
            self.choice((0, 1, 2)) if self.random() < 0.15 else self.randint(1, 4) for _ in range(self.randrange(4))
        ]

    def cut(self, size: int, dim: int) -> Split:
        """As torch.chunk does it, or anywhere."""
        if self.random() < 0.4:
            return Split(dim, tuple(shard_sizes(size, self.ranks)))
        ends = [0, *sorted(self.randint(0, size) for _ in range(self.ranks - 1)), size]
        return Split(dim, tuple(end - begin for begin, end in itertools.pairwise(ends)))

    def ids(self, size: int, shape: Sequence[int], ignored: int | None = None) -> Tensor:
        found = [
            ignored if ignored is not None and self.random() < 0.2 else self.randrange(size)
            for _ in range(math.prod(shape))
        ]
        return torch.tensor(found, dtype=self.choice((torch.int64, torch.int32))).view(tuple(shape))

    def maybe(self, value: Any, otherwise: Any = None) -> Any:
        return value if self.random() < 0.5 else otherwise


def somewhere(x: Tensor, draw: random.Random) -> Tensor:
    """The same values elsewhere in memory: other strides, another offset, among NaNs."""
    kind, dim = draw.randrange(5), draw.randrange(max(x.dim(), 1))
    if x.numel() < 2 or kind == 0:
        return x.clone(memory_format=torch.contiguous_format)
    if kind == 1:
        other = draw.randrange(x.dim())
        return x.transpose(dim, other).contiguous().transpose(dim, other)
    step = 2 if kind == 2 else 1
    shape = [size * step + 3 if i == dim else size for i, size in enumerate(x.shape)]
    filler = math.nan if x.is_floating_point() else 1
    begin = draw.randrange(3)
    slices = [slice(begin, begin + size * step, step) if i == dim else slice(None) for i, size in enumerate(x.shape)]
    return torch.full(shape, filler, dtype=x.dtype)[tuple(slices)].copy_(x)


# ---- what a case is played with --------------------------------------------------------------------------------------


def play(make: Callable[[Draw], Case], seed: str, group: Any = None) -> None:
    """Raises AssertionError where a rank's results or gradients are not its parts of plain PyTorch's."""
    rank, ranks = (0, 1) if group is None else (group.rank, group.size)
    draw, own = Draw(seed, ranks), random.Random(f"{seed} {rank}")
    case = make(draw)
    dtype, way = draw.choice(tuple(TOLERANCE)), draw.choice(WAYS)
    wanted_grads = {name: draw.random() < 0.75 for name in case.inputs}
    wanted_grads[draw.choice(tuple(wanted_grads))] = True
    whole, parts = {}, {}
    for name, x in case.inputs.items():
        x = x.to(dtype)
        whole[name] = x.to(torch.float64, copy=True).requires_grad_(wanted_grads[name])
        parts[name] = somewhere(_part(x, case.splits.get(name), rank), own).requires_grad_(wanted_grads[name])
    given = {name: x * 1 if case.writes and x.requires_grad else x for name, x in parts.items()}
    results, plain = _tuple(case.op(group, **given)), _tuple(case.plain(**whole))
    for result, want, split in zip(results, plain, case.results, strict=True):
        _assert_close("result", result, _part(want.detach(), split, rank), dtype)

    chosen = [i for i, want in enumerate(plain) if want.requires_grad]
    if way == "one result" and chosen:
        chosen = [draw.choice(chosen)]
    upstream = {i: draw.normal(*plain[i].shape).to(results[i].dtype) for i in chosen}
    mine = [somewhere(_part(upstream[i], case.results[i], rank), own) for i in chosen]
    if not chosen:
        return
    if way == "changed result" and not case.writes:
        # As plain PyTorch has it; what backward needs again is an error there, too.
        which = draw.choice(chosen)
        results[which].mul_(2.0)
        if not _backward([results[i] for i in chosen], mine):
            return
        upstream[which] = 2 * upstream[which].double()
    elif way == "changed input" and not case.writes and ranks == 1:
        with torch.no_grad():
            given[draw.choice(tuple(given))].add_(1.0)
        if not _backward([results[i] for i in chosen], mine):
            return
    elif way == "autograd.grad":
        leaves = [x for x in parts.values() if x.requires_grad]
        found = torch.autograd.grad([results[i] for i in chosen], leaves, mine, allow_unused=True)
        for leaf, grad in zip(leaves, found, strict=True):
            leaf.grad = grad
    else:
        if way == "twice" and not case.writes:
            torch.autograd.backward([results[i] for i in chosen], mine, retain_graph=True)
            upstream = {i: 2 * grad.double() for i, grad in upstream.items()}
        torch.autograd.backward([results[i] for i in chosen], mine)
    torch.autograd.backward([plain[i] for i in chosen], [upstream[i].double() for i in chosen])
    for name, x in parts.items():
        want = whole[name].grad
        if not wanted_grads[name]:
            assert x.grad is None, name
        elif x.grad is None:
            assert want is None or not _part(want, case.splits.get(name), rank).any(), name
        else:
            assert x.grad.dtype == dtype, name
            none = torch.zeros_like(whole[name])
            _assert_close(name, x.grad, _part(none if want is None else want, case.splits.get(name), rank), dtype)


def _backward(results: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether backward took what was changed in place; False where it says that it needs the values of before."""
    try:
        torch.autograd.backward(results, grads)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return False
    return True


def play_all(op: str, seeds: range) -> None:
    """On a rank."""
    group = Communicator(dist.group.WORLD)
    for seed in seeds:
        play_named(op, seed, group)


def play_named(op: str, seed: int, group: Any = None) -> None:
    name = f"{op} {seed} on {1 if group is None else group.size}"
    try:
        play(CASES[op], name, group)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def _part(x: Tensor, split: Split | None, rank: int) -> Tensor:
    return x if split is None else split.part(x, rank)


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _assert_close(what: str, found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == want.shape, f"{what} is {tuple(found.shape)}, not {tuple(want.shape)}"
    if found.numel() == 0:
        return
    error, scale = float((found.detach().double() - want).abs().max()), max(float(want.abs().max()), SMALL)
    assert error <= TOLERANCE[dtype] * scale, f"{what} is off by {error:.3g} of {scale:.3g} in {dtype}"


# ---- losses and what else is over a vocabulary -----------------------------------------------------------------------


def _vocabulary(draw: Draw) -> tuple[int, Split, Callable[[Any], dict[str, Any]]]:
    """Its size, the shards, and the arguments that tell them to an op."""
    size = draw.choice((1, 2, 3, 7, 16, 33, 100))
    split = draw.cut(size, -1)
    ends = [0, *(sum(split.sizes[: i + 1]) for i in range(draw.ranks))]

    def options(group: Any) -> dict[str, Any]:
        if group is None:
            return {}
        return {"group": group, "vocab_range": (ends[group.rank], ends[group.rank + 1], size)}

    return size, split, options


def _loss_options(draw: Draw) -> dict[str, Any]:
    return {
        "label_smoothing": draw.choice((0.0, 0.0, 0.1, 1.0)),
        "z_loss": draw.maybe(1e-2, 0.0),
        "softcap": draw.choice((None, None, 3.0, 30.0)),
        "logit_scale": draw.choice((1.0, 1.0, 0.5, -2.0)),
        "ignore_index": draw.choice((-100, 0)),
        "reduction": draw.choice(("mean", "sum", "none")),
        "shift": draw.choice((0, 0, 1)),
        "return_lse": draw.maybe(True, False),
    }


def _plain_loss(logits: Tensor, target: Tensor, options: dict[str, Any]) -> Any:
    z, ignored, smoothing = _transformed(logits, options), options["ignore_index"], options["label_smoothing"]
    target = target.long()
    if options["shift"] and target.shape[-1]:
        target = F.pad(target[..., options["shift"] :], (0, options["shift"]), value=ignored)
    lse, counts = z.logsumexp(-1), target != ignored
    picked = z.gather(-1, torch.where(counts, target, 0)[..., None]).squeeze(-1)
    loss = (1 - smoothing) * (lse - picked) + smoothing * (lse - z.mean(-1)) + options["z_loss"] * lse**2
    loss = torch.where(counts, loss, 0.0)
    if options["reduction"] != "none":
        loss = loss.sum() / (counts.sum().clamp(min=1) if options["reduction"] == "mean" else 1)
    return (loss, lse) if options["return_lse"] else loss


def _transformed(logits: Tensor, options: dict[str, Any]) -> Tensor:
    z = logits * options["logit_scale"]
    return z if options["softcap"] is None else options["softcap"] * torch.tanh(z / options["softcap"])


def cross_entropy(draw: Draw) -> Case:
    shape = draw.shape() or [3]
    size, split, over = _vocabulary(draw)
    options = _loss_options(draw)
    target = draw.ids(size, shape, options["ignore_index"])
    inplace = draw.random() < 0.2

    def op(group: Any, logits: Tensor) -> Any:
        return ops.vocab_parallel_cross_entropy(logits, target, inplace_backward=inplace, **over(group), **options)

    def plain(logits: Tensor) -> Any:
        return _plain_loss(logits, target, options)

    results = [None] * (1 + options["return_lse"])
    return Case({"logits": 3 * draw.normal(*shape, size)}, op, plain, {"logits": split}, results, writes=inplace)


def linear_cross_entropy(draw: Draw) -> Case:
    batch, tokens, hidden = draw.randint(1, 3), draw.randint(1, 6), draw.choice((1, 3, 8))
    size, split, over = _vocabulary(draw)
    options, chunk_bytes = _loss_options(draw), draw.maybe(64)
    target = draw.ids(size, (batch, tokens), options["ignore_index"])
    inputs = {"x": draw.normal(batch, tokens, hidden), "weight": draw.normal(size, hidden)}
    if draw.random() < 0.5:
        inputs["bias"] = draw.normal(size)
    dim = draw.randrange(2)
    by_token = draw.maybe(Split(dim, tuple(shard_sizes((batch, tokens)[dim], draw.ranks))))
    sequence = {} if by_token is None else {"sequence_parallel": True, "sequence_dim": dim - draw.choice((0, 3))}

    def op(group: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        split = {} if group is None else sequence
        given = options | over(group) | split
        return ops.linear_cross_entropy(x, weight, target, bias=bias, chunk_bytes=chunk_bytes, **given)

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return _plain_loss(F.linear(x, weight, bias), target, options)

    by_id = Split(0, split.sizes)
    results = [None] * (1 + options["return_lse"])
    return Case(inputs, op, plain, {"x": by_token, "weight": by_id, "bias": by_id}, results)


def probabilities(draw: Draw) -> Case:
    shape = draw.shape() or [3]
    size, split, over = _vocabulary(draw)
    options = {"softcap": draw.maybe(3.0), "logit_scale": draw.choice((1.0, 0.5))}
    ids = draw.ids(size, shape).long()

    def log_p(logits: Tensor) -> Tensor:
        return _transformed(logits, options).log_softmax(-1)

    def log_prob(logits: Tensor) -> Tensor:
        return log_p(logits).gather(-1, ids[..., None]).squeeze(-1)

    def entropy(logits: Tensor) -> Tensor:
        return -(log_p(logits).exp() * log_p(logits)).sum(-1)

    name, plain, results = draw.choice(
        (
            ("log_prob", log_prob, [None]),
            ("entropy", entropy, [None]),
            ("log_prob_and_entropy", lambda logits: (log_prob(logits), entropy(logits)), [None, None]),
            ("softmax", lambda logits: log_p(logits).exp(), [split]),
            ("log_softmax", log_p, [split]),
        )
    )
    called = getattr(ops, f"vocab_parallel_{name}")
    arguments = (ids,) if "log_prob" in name else ()

    def op(group: Any, logits: Tensor) -> Any:
        return called(logits, *arguments, **over(group), **options)

    return Case({"logits": 3 * draw.normal(*shape, size)}, op, plain, {"logits": split}, results)


def largest(draw: Draw) -> Case:
    shape = draw.shape() or [3]
    size, split, over = _vocabulary(draw)
    k = draw.randint(1, size)
    # Whole numbers, which are in the same order in every dtype.
    rows = [draw.sample(range(size), size) for _ in range(math.prod(shape))]
    logits = torch.tensor(rows, dtype=torch.float64).view(*shape, size)

    def op(group: Any, logits: Tensor) -> Any:
        values, ids = ops.vocab_parallel_topk(logits, k, **over(group))
        assert torch.equal(ops.vocab_parallel_argmax(logits, **over(group)), ids[..., 0])
        return values

    def plain(logits: Tensor) -> Any:
        return logits.topk(k)[0]

    return Case({"logits": logits}, op, plain, {"logits": split})


def embedding(draw: Draw) -> Case:
    size, split, over = _vocabulary(draw)
    shape, hidden, padding = [draw.randint(1, 3), draw.randint(1, 5)], draw.choice((1, 3, 33)), draw.maybe(0)
    ids, dim = draw.ids(size, shape), draw.randrange(2)
    scattered = draw.maybe(Split(dim, tuple(shard_sizes(shape[dim], draw.ranks))))

    def op(group: Any, weight: Tensor) -> Any:
        how = {} if group is None or scattered is None else {"reduce": "scatter", "scatter_dim": dim}
        return ops.vocab_parallel_embedding(ids, weight, padding_idx=padding, **over(group), **how)

    def plain(weight: Tensor) -> Any:
        return F.embedding(ids.long(), weight, padding_idx=padding)

    return Case({"weight": draw.normal(size, hidden)}, op, plain, {"weight": Split(0, split.sizes)}, [scattered])


# ---- linears ---------------------------------------------------------------------------------------------------------


def column_parallel(draw: Draw) -> Case:
    batch, tokens, hidden = draw.randint(1, 3), draw.randint(1, 8), draw.choice((1, 4, 9))
    outs = [draw.choice((1, 5, 8)) for _ in range(draw.choice((1, 1, 2)))]
    has_bias, transposed, overlap = draw.maybe(True, False), draw.maybe(True, False), draw.maybe(True, False)
    dim = draw.choice((0, 1, -2))
    by_token = draw.maybe(draw.cut((batch, tokens)[dim % 3], dim % 3))
    cuts = [draw.cut(out, 0) for out in outs]
    inputs = {"x": draw.normal(batch, tokens, hidden)}
    splits: dict[str, Split | None] = {"x": by_token}
    for i, out in enumerate(outs):
        inputs[f"weight{i}"] = draw.normal(hidden, out) if transposed else draw.normal(out, hidden)
        splits[f"weight{i}"] = Split(1 if transposed else 0, cuts[i].sizes)
        if has_bias:
            inputs[f"bias{i}"], splits[f"bias{i}"] = draw.normal(out), cuts[i]

    def op(group: Any, x: Tensor, **held: Tensor) -> Any:
        weights = [held[f"weight{i}"] for i in range(len(outs))]
        biases = [held[f"bias{i}"] for i in range(len(outs))] if has_bias else None
        options = {"group": group, "overlap": overlap, "transposed": transposed}
        several = (weights, biases) if len(outs) > 1 else (weights[0], None if biases is None else biases[0])
        if by_token is None:
            return ops.copy_to_linear(x, *several, **options)
        return ops.all_gather_linear(x, *several, dim=dim, sizes=None if group is None else by_token.sizes, **options)

    def plain(x: Tensor, **held: Tensor) -> Any:
        weights = [held[f"weight{i}"].T if transposed else held[f"weight{i}"] for i in range(len(outs))]
        return tuple(F.linear(x, weight, held.get(f"bias{i}")) for i, weight in enumerate(weights))

    return Case(inputs, op, plain, splits, [Split(-1, cut.sizes) for cut in cuts])


def row_parallel(draw: Draw) -> Case:
    batch, tokens, hidden, out = draw.randint(1, 3), draw.randint(1, 8), draw.choice((1, 4, 9)), draw.choice((1, 5))
    has_bias, transposed, overlap = draw.maybe(True, False), draw.maybe(True, False), draw.maybe(True, False)
    dim = draw.choice((0, 1, -2))
    by_token = draw.maybe(draw.cut((batch, tokens)[dim % 3], dim % 3))
    by_feature = draw.cut(hidden, -1)
    inputs = {"x": draw.normal(batch, tokens, hidden), "weight": draw.normal(out, hidden)}
    if transposed:
        inputs["weight"] = inputs["weight"].T.contiguous()
    if has_bias:
        inputs["bias"] = draw.normal(out)

    def op(group: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        options = {"group": group, "overlap": overlap, "transposed": transposed}
        if by_token is None:
            return ops.linear_all_reduce(x, weight, bias, **options)
        sizes = None if group is None else by_token.sizes
        return ops.linear_reduce_scatter(x, weight, bias, dim=dim, sizes=sizes, **options)

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return F.linear(x, weight.T if transposed else weight, bias)

    splits: dict[str, Split | None] = {"x": by_feature, "weight": Split(0 if transposed else 1, by_feature.sizes)}
    return Case(inputs, op, plain, splits, [by_token])


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts(draw: Draw) -> Case:
    tokens, hidden, inner = draw.choice((0, 1, 4, 9)), draw.choice((1, 4, 8)), draw.choice((1, 3, 8))
    number = draw.ranks * draw.randint(1, 3)
    top_k = draw.randint(1, number)
    indices = torch.tensor([draw.sample(range(-1, number), top_k) for _ in range(tokens)]).long().view(tokens, top_k)
    by_token, by_expert = draw.cut(tokens, 0), Split(0, (number // draw.ranks,) * draw.ranks)
    inputs = {
        "x": draw.normal(tokens, hidden),
        "weights": draw.normal(tokens, top_k),
        "first": draw.normal(number, 2 * inner, hidden),
        "second": draw.normal(number, hidden, inner),
    }
    if draw.random() < 0.5:
        inputs |= {"first_bias": draw.normal(number, 2 * inner), "second_bias": draw.normal(number, hidden)}
    if draw.random() < 0.5:
        inputs["add"] = draw.normal(tokens, hidden)
    transport = draw.choice(("shared_memory", "all_to_all"))

    def op(group: Any, x: Tensor, weights: Tensor, add: Tensor | None = None, **held: Tensor) -> Any:
        chosen = indices if group is None else by_token.part(indices, group.rank)
        dispatch = None if group is None else ops.Dispatch(transport)
        return ops.moe_mlp(x, chosen, weights, ops.ExpertWeights(**held), add=add, group=group, dispatch=dispatch)

    def plain(x: Tensor, weights: Tensor, first: Tensor, second: Tensor, **rest: Tensor) -> Any:
        out = rest.get("add", torch.zeros_like(x))
        for k in range(top_k):
            chosen = indices[:, k].clamp(min=0)
            inner_sums = torch.einsum("th,tih->ti", x, first[chosen])
            if "first_bias" in rest:
                inner_sums = inner_sums + rest["first_bias"][chosen]
            gate, up = inner_sums.chunk(2, -1)
            y = torch.einsum("ti,thi->th", F.silu(gate) * up, second[chosen])
            if "second_bias" in rest:
                y = y + rest["second_bias"][chosen]
            out = out + torch.where(indices[:, k, None] >= 0, weights[:, k, None] * y, 0.0)
        return out

    splits: dict[str, Split | None] = dict.fromkeys(inputs, by_expert)
    splits |= dict.fromkeys(("x", "weights", "add"), by_token)
    return Case(inputs, op, plain, splits, [by_token])


def experts_linear(draw: Draw) -> Case:
    number, hidden, out, transposed = draw.randint(1, 4), draw.choice((1, 3, 8)), draw.choice((1, 5)), draw.maybe(1, 0)
    ends = [0]
    for _ in range(number):
        ends.append(ends[-1] + draw.choice((0, 1, 2, 5)))
    inputs = {
        "x": draw.normal(ends[-1], hidden),
        "weight": draw.normal(number, *(out, hidden)[:: -1 if transposed else 1]),
    }
    if draw.random() < 0.5:
        inputs["bias"] = draw.normal(number, out)

    def op(group: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return ops.grouped_linear(x, weight, ends, bias, transposed=bool(transposed))

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        weight = weight.mT if transposed else weight
        found = [
            F.linear(x[begin:end], weight[i], None if bias is None else bias[i])
            for i, (begin, end) in enumerate(itertools.pairwise(ends))
        ]
        return torch.cat(found)

    return Case(inputs, op, plain)


def router(draw: Draw) -> Case:
    tokens, hidden, number = draw.choice((0, 1, 5)), draw.choice((1, 8)), draw.randint(1, 4)
    inputs = {"x": draw.normal(tokens, hidden), "weight": draw.normal(number, hidden)}
    if draw.random() < 0.5:
        inputs["bias"] = draw.normal(number)
    return Case(
        inputs, lambda group, **held: ops.router_logits(**held), lambda x, weight, bias=None: F.linear(x, weight, bias)
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def norm(draw: Draw) -> Case:
    shape, hidden = draw.shape(), draw.choice((1, 2, 3, 8, 17, 64))
    split, eps, offset = draw.cut(hidden, -1), draw.choice((1e-6, 1e-2)), draw.choice((0.0, 1.0, -0.5))
    inputs = {"x": draw.normal(*shape, hidden)}
    if draw.random() < 0.5:
        inputs["residual"] = draw.normal(*shape, hidden)
    if draw.random() < 0.7:
        inputs["weight"] = draw.normal(hidden)
    has_residual, options = "residual" in inputs, {"eps": eps, "weight_offset": offset if "weight" in inputs else 0.0}

    def op(group: Any, x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None) -> Any:
        if residual is None:
            return ops.rms_norm(x, weight, group=group, **options)
        return ops.add_rms_norm(x, residual, weight, group=group, **options)

    def plain(x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None) -> Any:
        h = x if residual is None else x + residual
        out = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        out = out if weight is None else out * (offset + weight)
        return (out, h) if has_residual else out

    return Case(inputs, op, plain, dict.fromkeys(inputs, split), [split] * (1 + has_residual))


def swiglu(draw: Draw) -> Case:
    shape, width = draw.shape(), draw.choice((1, 2, 3, 8, 33))
    if draw.random() < 0.5:
        packed = {"gate_up": draw.normal(*shape, 2 * width)}
        return Case(
            packed,
            lambda group, gate_up: ops.swiglu(gate_up),
            lambda gate_up: F.silu(gate_up[..., :width]) * gate_up[..., width:],
        )
    inputs = {"gate": draw.normal(*shape, width), "up": draw.normal(*shape, width)}
    return Case(inputs, lambda group, gate, up: ops.swiglu(gate, up), lambda gate, up: F.silu(gate) * up)


def attention(draw: Draw) -> Case:
    batch, groups, heads = draw.choice((0, 1, 2, 3)), draw.randint(1, 3), draw.randint(1, 2)
    queries, size = draw.choice((1, 2, 7, 33)), draw.choice((1, 4, 8, 24))
    causal, size_v = draw.maybe(True, False), draw.choice((size, size, 5))
    keys = queries if causal else draw.choice((1, 3, 8, 40))
    scale, softcap, return_lse = draw.maybe(0.3), draw.choice((None, None, 2.0)), draw.maybe(True, False)
    inputs = {
        "q": draw.normal(batch, heads * groups, queries, size),
        "k": draw.normal(batch, heads, keys, size),
        "v": draw.normal(batch, heads, keys, size_v),
    }
    if draw.random() < 0.3:
        inputs["sink"] = draw.normal(heads * groups)
    options = {"causal": causal, "scale": scale, "softcap": softcap, "return_lse": return_lse}

    def plain(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Any:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (size**-0.5 if scale is None else scale) * q @ k.mT
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if causal:
            scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -math.inf)
        lse = scores.logsumexp(-1)
        lse = lse if sink is None else torch.logaddexp(lse, sink[:, None].expand_as(lse))
        out = torch.exp(scores - lse[..., None]) @ v
        return (out, lse) if return_lse else out

    return Case(inputs, lambda group, **held: ops.attention(**held, **options), plain, {}, [None] * (1 + return_lse))


def rotary(draw: Draw) -> Case:
    layout, batch, tokens, heads = (
        draw.choice(("bshd", "bhsd")),
        draw.choice((None, 0, 1, 2)),
        draw.choice((1, 2, 5)),
        3,
    )
    size, interleaved, inplace = draw.choice((2, 4, 8, 34)), draw.maybe(True, False), draw.random() < 0.2
    turned = draw.choice([r for r in (2, 4, 8) if r <= size] + [size])
    of_batch = [] if batch is None else [batch]
    shape = of_batch + ([tokens, heads, size] if layout == "bshd" else [heads, tokens, size])
    positions = draw.ids(50, [*draw.maybe(of_batch, []), tokens])

    def op(group: Any, x: Tensor) -> Any:
        options = {"rotary_dim": turned, "interleaved": interleaved, "layout": layout, "inplace": inplace}
        return ops.rotary_embedding(x, positions=positions, **options)

    def plain(x: Tensor) -> Any:
        angle = positions[..., None].double() * 10000.0 ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
        angle = angle.unsqueeze(-2 if layout == "bshd" else -3) if layout == "bshd" or positions.dim() == 2 else angle
        y = x[..., :turned]
        a, b = (y[..., 0::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
        pair = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
        y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat([y, x[..., turned:]], -1)

    return Case({"x": draw.normal(*shape)}, op, plain, writes=inplace)


OVER_RANKS = {
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "probabilities": probabilities,
    "largest": largest,
    "embedding": embedding,
    "column_parallel": column_parallel,
    "row_parallel": row_parallel,
    "experts": experts,
    "norm": norm,
}
CASES = OVER_RANKS | {
    "experts_linear": experts_linear,
    "router": router,
    "swiglu": swiglu,
    "attention": attention,
    "rotary": rotary,
}
