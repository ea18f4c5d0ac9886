"""Models as users write them, against one process: code that no plan, name or class tells of."""

from __future__ import annotations

import copy
import logging
import types
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar as fp
from fastpar.tensor import full_parameter
from tests.dist import run_ranks

VOCAB, HIDDEN, TOKENS = 12, 8, 6
BLOCKS = {
    "blocks.*": "stream",
    "blocks.*.mlp": "block",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}
ENDS = {"embed": "vocab", "head": "vocab"}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)))


class NormsInTraining(MLP):
    def middle(self, h: Tensor) -> Tensor:
        return h / h.norm(dim=-1, keepdim=True) if self.training else h


class Softmax(MLP):
    def middle(self, h: Tensor) -> Tensor:
        return h.softmax(-1)


class Residual(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class KeepsLoss(MLP):
    def middle(self, h: Tensor) -> Tensor:
        self.balance = h.square().mean()
        return h


class Counts(MLP):
    """Numbers, and containers of them, that decide on the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.is_odd, self.scale, self.seen = 0, False, 1.0, [0]
        self.recent, self.counts, self.nested = deque([0], maxlen=2), Counter({"calls": 0}), {"of": [0]}

    def middle(self, h: Tensor) -> Tensor:
        self.calls, self.is_odd, self.scale = self.calls + 1, not self.is_odd, 0.9 * self.scale
        self.seen, self.counts["calls"] = [*self.seen, self.calls], self.counts["calls"] + 1
        self.recent.append(self.calls)
        self.nested["of"].append(self.calls)
        return F.gelu(h * self.scale) * len(self.nested["of"]) + self.is_odd

    def state(self) -> list[Any]:
        numbers = [self.calls, self.is_odd, self.scale, self.seen]
        return copy.deepcopy([*numbers, list(self.recent), dict(self.counts), self.nested])


class Block(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module] = MLP):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module] = MLP):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(VOCAB, HIDDEN), nn.ModuleList([Block(mlp), Block(mlp)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(self.norm(x))


class Shifts(Model):
    def between(self, x: Tensor) -> Tensor:
        return x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class CountsPositions(Model):
    def between(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.size(1)).view(1, -1, 1) * torch.linspace(0, 1, HIDDEN, dtype=x.dtype)


class KeepsBetween(Model):
    """A loss on hidden states, collected in a list that the training loop empties."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def between(self, x: Tensor) -> Tensor:
        self.losses.append(x.square().mean())
        return x


class CountsSteps(Model):
    def __init__(self) -> None:
        super().__init__(Counts)
        self.temperature, self.steps = nn.Parameter(torch.ones(())), 0

    def between(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * self.temperature / self.steps

    def state(self) -> list[Any]:
        return [self.steps, *(block.mlp.state() for block in self.blocks)]


def share(model: Model, name: str) -> Model:
    if name == "mlp":
        model.blocks[1].mlp = model.blocks[0].mlp
    elif name == "block":
        model.blocks[1] = model.blocks[0]
    return model


def ids() -> Tensor:
    return torch.randint(VOCAB, (3, TOKENS), generator=torch.Generator().manual_seed(1))


def check_equal(model: nn.Module, parallel: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """Loss and all gradients; of float64 models."""
    wanted, found = loss(model), loss(parallel)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    wanted.backward()
    found.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, p in parallel.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(full_parameter(p, p.grad), grads[name], rtol=1e-6, atol=1e-9, msg=name)


def cross_entropy(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(ids()).view(-1, VOCAB), ids().view(-1))


# ---- modules that are used in several places


def _shared() -> None:
    for name in ("mlp", "block"):
        for plan in (BLOCKS, BLOCKS | ENDS, "auto"):
            for sequence in (False, True):
                model = share(Model(), name).double()
                parallel: Any = copy.deepcopy(model)
                fp.parallelize(parallel, dist.group.WORLD, plan, sequence_parallel=sequence)
                check_equal(model, parallel, cross_entropy)
    twice = Model()
    twice.blocks.append(twice.blocks[0])
    with pytest.raises(ValueError, match="use one module several times"):
        fp.parallelize(twice, dist.group.WORLD, BLOCKS, sequence_parallel=True)
    torn = Model()
    torn.blocks[0].extra = torn.blocks[1].norm
    with pytest.raises(ValueError, match=r"are one module .* treats them differently"):
        fp.parallelize(torn, dist.group.WORLD, BLOCKS | {"blocks.0": "block", "blocks.0.norm": "partial"})


def test_module_that_layers_share_trains_as_in_one_process() -> None:
    run_ranks(2, _shared)


# ---- blocks that cannot be split


def _blocks() -> None:
    for mlp, what in {
        NormsInTraining: "its output would be off",
        Softmax: "its output would be off",
        Residual: "the gradient of its input would be off",
        KeepsLoss: "keeps tensors that it computes",
    }.items():
        with pytest.raises(ValueError, match=rf"blocks.0.mlp \({mlp.__name__}\), split as the plan says.*{what}"):
            fp.parallelize(Model(mlp), dist.group.WORLD, BLOCKS)
        model = Model(mlp).double()
        parallel: Any = fp.parallelize(copy.deepcopy(model), dist.group.WORLD)
        styles = {row["style"] for row in fp.explain(parallel).rows}
        # A residual is no obstacle where every linear sums the gradient of its own input.
        assert "block" not in styles, mlp.__name__
        assert ("colwise" in styles) == (mlp is Residual), mlp.__name__
        check_equal(model, parallel, cross_entropy)
    split = fp.parallelize(Model(), dist.group.WORLD)
    assert "colwise" in {row["style"] for row in fp.explain(split).rows}


def test_blocks_of_written_and_found_plans_compute_what_they_do_whole_in_both_modes() -> None:
    run_ranks(2, _blocks)


def _partial() -> None:
    class Ends(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.LayerNorm(HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(super().forward(x))

    with pytest.raises(ValueError, match=r"mlp.last.* has the style 'partial', but every rank has its whole gradient"):
        fp.parallelize(Model(Ends), dist.group.WORLD, BLOCKS | {"blocks.*.mlp.last": "partial"})
    fp.parallelize(Model(Ends), dist.group.WORLD, BLOCKS | {"blocks.*.mlp.last": "replicate"})


def test_partial_style_of_what_runs_after_the_sum_is_refused() -> None:
    run_ranks(2, _partial)


def said_by(run: Callable[[], Any]) -> list[str]:
    """What the logger "fastpar" says meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fastpar")
    logger.addHandler(handler)
    run()
    logger.removeHandler(handler)
    return said


def _backward_hooks() -> None:
    """What a block's hook is given is a term, and what the block around it is given is the gradient."""
    whole = Model().double()
    split: Any = fp.parallelize(copy.deepcopy(whole), dist.group.WORLD, BLOCKS)
    seen: list[Tensor] = []
    for model in (whole, split):
        model.blocks[0].mlp.register_full_backward_hook(lambda _m, grads, _: seen.append(grads[0]))
        model.blocks[1].register_full_backward_hook(lambda _m, grads, _: seen.append(grads[0]))
    cross_entropy(whole).backward()
    said = said_by(lambda: cross_entropy(split).backward())
    assert any("blocks.0.mlp has a backward hook, whose grad_input is this rank's term" in text for text in said)
    assert said_by(lambda: cross_entropy(split).backward()) == []
    around, term = seen[2], seen[3]
    torch.testing.assert_close(around, seen[0])
    dist.all_reduce(term)
    torch.testing.assert_close(term, seen[1])
    with pytest.raises(TypeError, match=r"transforms of torch.func .* Take torch.autograd.grad"):
        torch.func.grad(lambda values: torch.func.functional_call(split, values, ids()).sum())(
            dict(split.named_parameters())
        )


def test_backward_hooks_in_blocks_are_warned_of_and_transforms_refused() -> None:
    run_ranks(2, _backward_hooks)


def _lent_values() -> None:
    whole = Model()
    values = {name: 2 * p.detach() for name, p in whole.named_parameters()}
    split = fp.parallelize(Model(), dist.group.WORLD, {"head": "vocab"})
    own = {name: 2 * p.detach() for name, p in split.named_parameters()}
    out = torch.func.functional_call(split, own, ids()).full_tensor()
    torch.testing.assert_close(out, torch.func.functional_call(whole, values, ids()))
    with pytest.raises(TypeError, match=r"weight is a plain tensor of the shape .* as the split model has them"):
        torch.func.functional_call(split, values, ids())


def test_whole_tensors_that_are_lent_to_a_split_model_are_refused() -> None:
    run_ranks(2, _lent_values)


def _hooks() -> None:
    model = Model()
    model.blocks[1].mlp.up.register_forward_hook(lambda _m, _a, out: F.layer_norm(out, out.shape[-1:]))
    with pytest.raises(TypeError, match=r"blocks.1.mlp.up .* forward runs hooks and cannot be kept"):
        fp.parallelize(model, dist.group.WORLD, BLOCKS)
    model = Model().double()
    for block in model.blocks:
        block.mlp.up.register_forward_hook(lambda _m, _a, out: 1.5 * out)
        block.mlp.down.register_forward_pre_hook(lambda _m, args: (0.5 * args[0],))
    check_equal(model, fp.parallelize(copy.deepcopy(model), dist.group.WORLD, BLOCKS), cross_entropy)
    model = Model().double()
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block.mlp.up)
    check_equal(model, fp.parallelize(copy.deepcopy(model), dist.group.WORLD), cross_entropy)


def _hook_that_fails() -> None:
    def stop(*_: Any) -> None:
        raise KeyError("stop here")

    model = fp.parallelize(Model(), dist.group.WORLD, BLOCKS)
    hooks = list(model._forward_hooks.values())
    handle = model.register_forward_hook(stop)
    with pytest.raises(KeyError, match="stop here"):
        model(ids())
    handle.remove()
    try:
        raise ValueError("of the loop around")
    except ValueError:
        model(ids())  # which does not fail because something else has
    assert list(model._forward_hooks.values()) == hooks


def test_the_error_of_a_hook_on_the_model_is_what_is_raised() -> None:
    run_ranks(2, _hook_that_fails)


def test_hooks_on_split_layers_are_tried_and_trials_leave_states_alone() -> None:
    run_ranks(2, _hooks)


def _counted() -> None:
    for plan in ("auto", BLOCKS):
        for sequence in (False, True):
            whole = CountsSteps().double()
            parallel: Any = fp.parallelize(copy.deepcopy(whole), dist.group.WORLD, plan, sequence_parallel=sequence)
            assert parallel.state() == whole.state()
            for _ in range(2):
                torch.testing.assert_close(cross_entropy(parallel), cross_entropy(whole), rtol=1e-9, atol=1e-9)
                assert parallel.state() == whole.state()
            parallel.temperature.requires_grad_(False)
            parallel.head.weight.requires_grad_(False)
            parallel.note = parallel.blocks[0].mlp.up.note = "set later"
            fp.unparallelize(parallel)
            assert parallel.state() == whole.state()
            assert parallel.note == parallel.blocks[0].mlp.up.note == "set later"
            frozen = [name for name, p in parallel.named_parameters() if not p.requires_grad]
            assert frozen == ["temperature", "head.weight"]
            torch.testing.assert_close(cross_entropy(parallel), cross_entropy(whole), rtol=1e-9, atol=1e-9)


def test_numbers_that_modules_keep_go_on_as_in_one_process() -> None:
    run_ranks(2, _counted)


# ---- code between the layers, under sequence parallelism


def _between() -> None:
    for cls, what in {Shifts: "output", CountsPositions: "output", KeepsBetween: r"losses\[0\]"}.items():
        model = fp.parallelize(cls(), dist.group.WORLD, BLOCKS, sequence_parallel=True)
        with pytest.raises(ValueError, match=rf"{cls.__name__} computes something else than without \({what}"):
            model(ids())
        whole = cls().double()
        parallel: Any = fp.parallelize(copy.deepcopy(whole), dist.group.WORLD, BLOCKS)
        check_equal(whole, parallel, lambda m: cross_entropy(m) + sum(getattr(m, "losses", [])))
        assert len(getattr(parallel, "losses", "12")) == 2  # of the one forward
    model = fp.parallelize(Model(), dist.group.WORLD, BLOCKS, sequence_parallel=True)
    model.blocks[0].register_forward_hook(lambda *_: None)
    said = said_by(lambda: model(ids()))
    assert any("blocks.0 has a forward hook" in text for text in said)


def test_code_between_layers_that_mixes_positions_is_refused_under_sequence_parallelism() -> None:
    run_ranks(2, _between)


# ---- models that take no ids


class Images(nn.Module):
    """A vision transformer's shape; `mlp` is called with what only this model knows."""

    def __init__(self, mlp: Callable[[], nn.Module] = MLP):
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, HIDDEN, 4, 4)
        self.blocks = nn.ModuleList([Block(mlp), Block(mlp)])

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


def _images() -> None:
    plan = {pattern: style for pattern, style in BLOCKS.items() if style != "stream"}
    pixels = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = lambda m: m(pixels).square().mean()  # noqa: E731
    wrong = {Softmax: "its output", Residual: "the gradient of its input", NormsInTraining: "its output"}
    for cls, what in wrong.items():
        model = fp.parallelize(Images(cls).double(), dist.group.WORLD, plan)
        said = rf"blocks.0.mlp \({cls.__name__}\), split as the plan says.*: {what} would be off"
        with pytest.raises(ValueError, match=said), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(pixels)
    whole = Images().double()
    parallel: Any = fp.parallelize(copy.deepcopy(whole), dist.group.WORLD, plan)
    state = torch.get_rng_state()
    copied = copy.deepcopy(parallel)
    check_equal(whole, parallel, loss)
    assert torch.equal(torch.get_rng_state(), state)
    whole.zero_grad()
    check_equal(whole, copied, loss)
    assert not parallel.blocks[0].mlp.up._forward_pre_hooks
    fp.unparallelize(parallel)
    assert not any(module._forward_pre_hooks for module in parallel.modules())


class Attends(nn.Module):
    """Heads of one input, on keys and values of another."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out, self.num_heads = nn.Linear(HIDDEN, HIDDEN), 2

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, HIDDEN // 2)).transpose(1, 2) for y in (self.query(x), self.key(of), self.value(of))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class After(nn.Module):
    """The end of a sublayer, as BERT has it: a linear, the residual, and a norm behind both."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.dense(h) + x)


class Reads(nn.Module):
    """A layer whose MLP is in two modules, and which looks at pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.after = (
            Attends(),
            nn.Sequential(nn.Linear(HIDDEN, 3 * HIDDEN), nn.GELU()),
            After(3 * HIDDEN),
        )

    def forward(self, x: Tensor, pixels: Tensor) -> Tensor:
        x = x + self.attention(x, pixels)
        return self.after(self.up(x), x)


class Nested(nn.Module):
    """Layers that are lists of modules, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleList([nn.LayerNorm(HIDDEN), MLP()]), nn.ModuleList([nn.Identity(), MLP()])]
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, mlp in self.layers:
            x = x + mlp(norm(x))
        return x


class Captions(nn.Module):
    """Two inputs and three stacks: patches in an nn.Sequential of blocks and lists of lists, ids in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, HIDDEN, 4, stride=4)
        self.encoder, self.nested = nn.Sequential(Block(), Block(Residual)), Nested()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({"first": Reads(), "second": Reads()})
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        seen = self.nested(self.encoder(self.patches(pixels).flatten(2).transpose(1, 2)))
        x = self.embed(ids)
        for layer in self.layers.values():
            x = layer(x, seen)
        return self.head(x)


def _examples() -> None:
    pixels = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Captions().double()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    with pytest.raises(ValueError, match=r"a run on a few ids \(see example_inputs\) failed"):
        fp.parallelize(Captions().double(), dist.group.WORLD)
    for given in ({"pixels": pixels[:1], "ids": ids()[:1]}, (pixels, ids())):
        parallel: Any = fp.parallelize(copy.deepcopy(model), dist.group.WORLD, example_inputs=given)
        split = {row["module"] for row in fp.explain(parallel).rows if row["style"] in ("colwise", "rowwise")}
        assert {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"} == split
        model.zero_grad()
        check_equal(model, parallel, lambda m: F.cross_entropy(m(pixels, ids()).view(-1, VOCAB), ids().view(-1)))
    rank = dist.get_rank()
    for other in (None if rank else (pixels, ids()), (pixels + rank, ids()), {"pixels": pixels[rank:], "ids": ids()}):
        with pytest.raises(ValueError, match="example_inputs must be equal on all ranks"):
            fp.parallelize(copy.deepcopy(model), dist.group.WORLD, example_inputs=other)
    with pytest.raises(TypeError, match="example_inputs must be a mapping or a sequence"):
        fp.parallelize(copy.deepcopy(model), dist.group.WORLD, example_inputs=pixels)


def test_models_of_other_inputs_than_ids_are_split_by_an_example() -> None:
    run_ranks(2, _examples)


def _declared(cls: Callable[[], nn.Module]) -> nn.Module:
    model = Images(cls).double()
    model.config = types.SimpleNamespace(
        base_model_tp_plan={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    )
    return model


def _untried() -> None:
    pixels = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for split in (False, True):
        wrong = fp.parallelize(_declared(Softmax), dist.group.WORLD, sequence_parallel=split)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"blocks.0.mlp \(Softmax\).*its output would be off"):
                wrong(pixels)
        parallel = fp.parallelize(_declared(MLP), dist.group.WORLD, sequence_parallel=split)
        check_equal(_declared(MLP), parallel, lambda m: m(pixels).square().mean())


def test_blocks_of_a_declared_plan_that_no_ids_reach_are_tried_when_they_are_called_first() -> None:
    run_ranks(2, _untried)


class Drops(nn.Module):
    """A layer whose MLP is no module of its own, with dropout between its linears, and after them."""

    def __init__(self, inside: str = "", after: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN), inside
        self.drop, self.last = nn.Dropout(0.5), nn.Dropout(after)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if self.inside == "module":
            h = self.drop(h)
        elif self.inside:
            h = F.dropout(h, 0.5, self.training)
        return x + self.last(F.dropout(self.down(h), self.last.p, self.training))


def _drops() -> None:
    pairs = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    for inside in ("function", "module"):
        model = Model()
        model.blocks = nn.ModuleList([Drops(), Drops(inside)])
        parallel: Any = fp.parallelize(model, dist.group.WORLD, pairs)
        what = r"blocks.1.drop \(" if inside == "module" else r"blocks.1 \(Drops\)"
        with pytest.raises(ValueError, match=rf"{what}.* between a column- and a row-parallel linear"):
            parallel(ids())
        parallel.eval()(ids())
    model = Model()
    model.blocks = nn.ModuleList([Drops(), Drops("module")])
    parallel = fp.parallelize(model, dist.group.WORLD)
    split = {row["module"] for row in fp.explain(parallel).rows if row["style"] in ("colwise", "rowwise")}
    assert split == {"blocks.0.up", "blocks.0.down"}
    parallel(ids())
    model = Model()
    model.blocks = nn.ModuleList([Drops(after=0.5)])
    parallel = fp.parallelize(model, dist.group.WORLD, pairs)
    parallel(ids()).sum().backward()


def test_dropout_between_split_linears_that_are_in_no_block_is_refused() -> None:
    run_ranks(2, _drops)


class TalkingHeads(nn.Module):
    """Two heads of four features, mixed before the softmax: keys stay whole, and their bias has a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "out"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN))
        self.num_heads, self.mix = 2, nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HIDDEN // 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = self.mix((q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def _talking() -> None:
    ids = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    whole = Model(TalkingHeads).double()
    parallel = fp.parallelize(copy.deepcopy(whole), dist.group.WORLD)
    check_equal(whole, parallel, lambda m: m(ids).square().mean())


def test_a_bias_without_a_gradient_is_treated_as_its_weight() -> None:
    run_ranks(2, _talking)


def _stages() -> None:
    ids = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    mesh = fp.init_mesh(pp=2, tp=2, device="cpu")
    plan = BLOCKS | ENDS
    pipe = fp.parallelize_pipeline(
        Model(Softmax), mesh, num_microbatches=1, loss=lambda out, _: out.full_tensor().mean(), plan=plan
    )
    with pytest.raises(fp.pipeline.PipelineError if mesh.rank("pp") == 0 else Exception) as error:
        pipe.step(ids, target=ids)
    assert "would compute something else than whole" in str(error.value)
    pipe.close()
    mesh.close()


def test_blocks_of_a_written_plan_are_tried_in_the_stages_of_a_pipeline() -> None:
    run_ranks(4, _stages)


class SoftmaxWithoutBackward(Softmax):
    def middle(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            raise NotImplementedError("no backward on a CPU")  # as flex attention
        return super().middle(h)


@torch.no_grad()
def _without_backward() -> None:
    parallel = fp.parallelize(Model(SoftmaxWithoutBackward), dist.group.WORLD, BLOCKS)
    with pytest.raises(ValueError, match="would compute something else than whole"):
        parallel(torch.zeros(2, TOKENS, dtype=torch.long))


def test_blocks_that_have_no_backward_are_tried_without_one() -> None:
    run_ranks(2, _without_backward)


def test_blocks_that_no_ids_reach_are_tried_by_what_they_are_called_with_first() -> None:
    run_ranks(2, _images)


class Kept:
    """What layers share, as a cache of keys."""

    def __init__(self, before: list[Tensor]) -> None:
        self.kept = before

    def add(self, h: Tensor) -> Tensor:
        self.kept.append(h)
        return torch.stack(torch.broadcast_tensors(*self.kept)).sum(0)


class Keeping(MLP):
    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        return self.down(kept.add(self.middle(self.up(x))))


class KeepingSoftmax(Keeping, Softmax):
    pass


class ImagesKept(Images):
    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        kept = Kept([0 * x.sum()[None, None, None]])  # which autograd has made: torch does not copy it
        for block in self.blocks:
            x = x + block.mlp(block.norm(x), kept)
        return x


def _kept() -> None:
    plan = {pattern: style for pattern, style in BLOCKS.items() if style != "stream"}
    pixels = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wrong = fp.parallelize(ImagesKept(KeepingSoftmax).double(), dist.group.WORLD, plan)
    with pytest.raises(ValueError, match=r"blocks.0.mlp \(KeepingSoftmax\), split as the plan says.*: its output"):
        wrong(pixels)
    whole = ImagesKept(Keeping).double()
    parallel = fp.parallelize(copy.deepcopy(whole), dist.group.WORLD, plan)
    check_equal(whole, parallel, lambda m: m(pixels).square().mean())


def test_blocks_that_write_to_an_object_that_they_are_given_are_tried_on_copies_of_it() -> None:
    run_ranks(2, _kept)


# ---- what users do with logits


READINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), y.view(-1), reduction="sum", ignore_index=3),
    "smooth": lambda x, y: F.cross_entropy(x.float().transpose(1, 2), y, label_smoothing=0.1).double(),
    "weighted": lambda x, y: nn.CrossEntropyLoss(torch.arange(1.0, VOCAB + 1).double())(x.flatten(0, 1), y.flatten()),
    "shifted": lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, VOCAB), y[:, 1:].reshape(-1)),
    "nll": lambda x, y: -x.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "entropy": lambda x, _: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "teacher": lambda x, _: F.kl_div(x.log_softmax(-1), torch.full_like(x.detach(), 1 / VOCAB), reduction="batchmean"),
    "mean": lambda x, _: x.mean() * x.mean().item() + float(x.detach().max()),
    "accuracy": lambda x, y: x.square().mean() * (x.argmax(-1) == y).double().mean(),
    "slices": lambda x, _: x[..., 3:8].square().mean() + x[:, -1].mean() + x[..., [1, -1]].mean(),
    "mask": lambda x, y: F.cross_entropy(x[:, 0].masked_fill(torch.arange(VOCAB) > 10, -9.0), y[:, 0].clamp(max=10)),
    "bias": lambda x, _: (x / 2 + torch.arange(VOCAB)).square().mean(),
    "numpy": lambda x, _: x.mean() * float(x.detach().numpy().max()),
    "nothing": lambda x, y: (
        torch.nan_to_num(F.cross_entropy(x.view(-1, VOCAB), 0 * y.view(-1), ignore_index=0), 7.0) + x.mean()
    ),
}


def _readings() -> None:
    model = Model().double()
    for name, reading in READINGS.items():
        parallel: Any = fp.parallelize(copy.deepcopy(model), dist.group.WORLD, BLOCKS | ENDS)
        model.zero_grad()
        try:
            check_equal(model, parallel, lambda m, reading=reading: reading(m(ids()), ids()))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    logits = parallel(ids())
    halves = (logits / 2).float()[:, 1:]
    assert [p.is_shard(halves.dim() - 1) for p in halves.placements] == [True]  # nothing was gathered
    with pytest.raises(TypeError, match=r"cannot be changed by masked_fill_ with a tensor: write it out of place"):
        logits.detach().masked_fill_(torch.ones(VOCAB, dtype=torch.bool), 0.0)
    for index in (3, slice(10, None), torch.tensor([1, 4])):
        with pytest.raises(TypeError, match=r"cannot be changed by an index .* write it out of place \(torch.where"):
            logits.detach()[..., index] = -9.0
    assert "SplitLogits" not in str(type(copy.deepcopy(logits.detach())))


def test_whatever_is_done_with_split_logits_gives_the_numbers_of_one_process() -> None:
    run_ranks(2, _readings)


class ActivationMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.activation: nn.Module = nn.GELU()

    def middle(self, h: Tensor) -> Tensor:
        return self.activation(h)  # type: ignore[no-any-return]


class Normalise(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return F.normalize(h, dim=-1)


def _swap_activations() -> None:
    model: Any = Model(ActivationMLP).double()
    parallel: Any = fp.parallelize(copy.deepcopy(model), dist.group.WORLD, BLOCKS | ENDS)
    for each in (model, parallel):
        each.blocks[0].mlp.activation = nn.Tanh()
    check_equal(model, parallel, lambda m: m(ids()).square().mean())
    for wrong in (Normalise(), nn.Softmax(-1), nn.Sequential(nn.SiLU(), Normalise())):
        parallel.blocks[1].mlp.activation = wrong  # also after a forward
        for _ in range(2):
            with pytest.raises(ValueError, match=r"blocks.1.mlp.activation.*does not compute each of them by itself"):
                parallel(ids())
    parallel.blocks[1].mlp.activation = nn.GELU()
    model.blocks[1].mlp.activation = nn.GELU()
    parallel.zero_grad()
    model.zero_grad()
    check_equal(model, parallel, lambda m: m(ids()).square().mean())


def test_activations_put_into_split_blocks_work_on_each_feature_or_are_refused() -> None:
    run_ranks(2, _swap_activations)


def _other_losses() -> None:
    rank = dist.get_rank()

    def drawn(logits: Any) -> Tensor:
        torch.manual_seed(rank)
        return -torch.distributions.Categorical(logits=logits).log_prob(torch.randint(VOCAB, logits.shape[:-1])).mean()

    def labelled(logits: Any) -> Tensor:
        return F.cross_entropy(logits.view(-1, VOCAB), ids().roll(rank, 1).view(-1))

    for loss, is_gathered in ((drawn, False), (labelled, False), (drawn, True)):
        model: Any = fp.parallelize(Model(), dist.group.WORLD, BLOCKS | ENDS, gather_logits=is_gathered)
        with pytest.raises(RuntimeError, match=r"different losses of the model's logits.*seed ranks alike"):
            loss(model(ids())).backward()


def test_losses_that_ranks_make_of_other_labels_or_draws_are_an_error() -> None:
    run_ranks(2, _other_losses)


def _read_gradients(model: Any) -> tuple[list[float], list[Tensor]]:
    """What hooks around a head read of its output's gradient, which they double, and the gradients of a step."""
    read: list[float] = []

    def hook(grad: Tensor) -> Tensor:
        read.extend([grad.norm().item(), float(grad.max()), float(grad[0, -1].sum())])
        return 2 * grad

    handle = model.head.register_full_backward_pre_hook(lambda module, grads: (hook(grads[0]),))
    logits = model(ids())
    handle.remove()
    logits.retain_grad()
    logits.register_hook(hook)
    F.cross_entropy((logits.float() / 3).view(-1, VOCAB), ids().flatten()).backward()
    hook(logits.grad)
    return read, [full_parameter(p, p.grad) for p in model.parameters()]


def _gradients_of_logits() -> None:
    model = Model().double()
    parallel = fp.parallelize(copy.deepcopy(model), dist.group.WORLD, BLOCKS | ENDS)
    for _ in range(2):
        torch.testing.assert_close(_read_gradients(parallel), _read_gradients(model), rtol=1e-6, atol=1e-9)
    parallel.head.register_full_backward_hook(lambda *_: None)
    assert parallel(ids()).placements[0].is_shard(2)  # nothing was gathered for it


def test_hooks_on_logits_and_around_a_head_read_and_change_the_gradient_of_one_process() -> None:
    run_ranks(2, _gradients_of_logits)


def _normed() -> None:
    weight_norm = nn.utils.parametrizations.weight_norm
    model = Model().double()
    for path in ("blocks.0.mlp.up", "blocks.0.mlp.down", "embed", "head"):
        parallel = fp.parallelize(copy.deepcopy(model), dist.group.WORLD, BLOCKS | ENDS)
        weight_norm(parallel.get_submodule(path))
        with pytest.raises(RuntimeError, match=r"no parameter 'weight' any more: .* Apply them before fastpar.parall"):
            parallel(ids())


def test_weight_norm_of_split_layers_is_refused() -> None:
    run_ranks(2, _normed)


def _encoder() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(HIDDEN, 2, 2 * HIDDEN, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    plan = {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}
    parallel = fp.parallelize(copy.deepcopy(model), dist.group.WORLD, plan)
    x = torch.randn(2, TOKENS, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), model(x), rtol=1e-5, atol=1e-5)


def test_encoder_of_torch_runs_in_eval_mode() -> None:
    run_ranks(2, _encoder)
