"""`fp.assemble`: every layout trains as one process does, and what is wrong is said on all ranks."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

import fastpar as fp
from examples.model import PLAN
from fastpar.assembly import Assembled
from fastpar.assembly.objective import Objective
from fastpar.layouts import LayoutError
from tests.assembly.assembly_cells import ROWS, STEPS, VOCAB, Cell, batch, build, make_optimizer, reference
from tests.assembly.assembly_matrix import covering_array, pairs_of, shape
from tests.assembly.assembly_ranks import assembled, cells_match, fed
from tests.dist import run_ranks
from tests.models import norms_in_their_own_dtype

# What others got wrong, and what no pair of factors has.
NAMED = (
    Cell("pp2 mb2 acc2 shard_head"),
    Cell("pp2 dp2 mb2 interleaved_1f1b stages2 shard_head zero1", optimizer="two"),
    Cell("pp2 tp2 mb2 cut1/3 zero1", tied=True),
    Cell("pp2 replicas2 mb4 dualpipev zero2", tied=True),
    Cell("pp2 dp2 mb4 dualpipe zero1", "huggingface"),
    Cell("pp4 mb4 zb_h1 recompute:full/none/selective/none", frozen=True),
    Cell("tp2 sp dp2 ep4 zero3 full", "experts"),
    Cell("tp2 sp dp2 ep2 zero1 acc2", "experts", optimizer="fused", precision="fp32"),
    Cell("pp2 dp2 mb2 zero1 acc2", precision="bf16"),
    Cell("dp2 zero3", precision="fp16"),
    Cell("cp2 dp2 zero3 acc2", "huggingface", tied=True),
    Cell("cp2 tp2 sp zero1 selective", "huggingface"),
    Cell("pp2 dp2 mb2 zero3 zbv acc2", tied=True),
    Cell("pp2 dp2 mb2 zero3 cpu", tied=True),
    Cell("pp2 dp2 ep2 mb2 zero3 full", "experts"),
    Cell("pp2 dp2 mb2 zero3 acc2 shard_head"),
    Cell("pp2 cp2 mb2 zbv acc2 zero3", "huggingface", tied=True),
    Cell("pp2 cp2 mb2 interleaved_1f1b stages2 zero2 full ulysses", "huggingface"),
    Cell("pp2 cp2 dualpipe mb4 selective zero1 dealt"),
    Cell("pp2 cp2 mb2 acc2 shard_head striped", frozen=True),
    Cell("cp2 tp2 sp acc2 gather"),
    Cell("dp2 tp2 ep2 etp2 zero3 acc2", "experts", tied=True),
    Cell("pp2 dp2 etp2 mb2 zero2 full", "experts"),
    Cell("tp4 grid2x1x2 full", tied=True),
    Cell("dp2 tp2 grid1x1x2:copy zero3 acc2", "huggingface"),
    Cell("pp2 tp2 mb2 grid1x1x2 zbv zero1", "huggingface", tied=True),
    Cell("pp2 tp2 mb2 grid2x1x1 acc2"),
    Cell("pp2 tp2 mb2 grid1x2x1:features interleaved_1f1b stages2 full zero3"),
)
EVERYTHING = (
    Cell("pp2 tp2 sp dp2 ep2 zbv mb2 acc2 zero1 full", "experts"),
    Cell("pp2 cp2 tp2 sp zbv mb2 acc2 zero3 full", "huggingface"),
    Cell("pp2 tp4 mb2 grid1x2x2:stream zero1 full"),
)


def check(cells: Sequence[Cell], steps: int = 2, timeout: float = 240.0) -> None:
    """All cells against one process, those of one number of ranks in one launch.

    What a step leaves behind shows in the second; the triples, which are slow, take one more. Four layers are for
    parts of pipelines; others show in two what they do with one after the other.
    """
    cells = [cell if cell.layout.pp > 1 else dataclasses.replace(cell, layers=2) for cell in cells]
    sizes = sorted({cell.layout.world_size for cell in cells})
    for size in sizes:
        some = [cell for cell in cells if cell.layout.world_size == size]
        for problems in run_ranks(size, cells_match, some, [reference(cell, steps) for cell in some], timeout=timeout):
            assert not problems, "\n\n".join(f"{cell}: {what}" for cell, what in problems.items())


@pytest.mark.expensive
def test_every_pair_of_factors_trains_as_one_process() -> None:
    check(covering_array(2, most_ranks=4, given=NAMED + EVERYTHING))


@pytest.mark.expensive
def test_cells_that_others_got_wrong_train_as_one_process() -> None:
    check(NAMED)


@pytest.mark.expensive
def test_everything_at_once_on_eight_ranks_trains_as_one_process() -> None:
    check(EVERYTHING)


@pytest.mark.slow
def test_every_triple_of_factors_trains_as_one_process() -> None:
    check(covering_array(3, most_ranks=8, given=NAMED + EVERYTHING), STEPS, timeout=3000.0)


def test_what_a_legal_cell_combines_one_that_is_trained_does() -> None:
    named = NAMED + EVERYTHING
    trained = named + covering_array(2, most_ranks=4, given=named)
    assert len(trained) <= 45
    assert pairs_of(covering_array(2, most_ranks=4)) <= pairs_of(trained)


# ---- one process


_MADE: list[Assembled] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """What a test has assembled is closed when it ends, and leaves no group: also what could not be assembled."""
    yield
    while _MADE:
        _MADE.pop().close()
    assert not dist.is_initialized()


def one(words: str = "one rank", model: nn.Module | None = None, **options: Any) -> Assembled:
    made = options.pop("optimizer", lambda params: torch.optim.SGD(params, lr=0.1))
    _MADE.append(fp.assemble(build(Cell(words)) if model is None else model, words, made, **options))
    return _MADE[-1]


def test_an_assembled_model_has_twelve_public_members() -> None:
    trained = one()
    members = {name for name in dir(trained) if not name.startswith("_")}
    assert members == {
        "layout", "mesh", "parts", "optimizer", "zero", "samples", "step", "evaluate", "state", "load_state",
        "explain", "close",
    }  # fmt: skip
    trained.close()
    trained.close()


def test_the_users_own_loop_goes_on_beside_step() -> None:
    model, twin = build(Cell("one rank")), build(Cell("one rank"))
    trained, other = one(model=model), one(model=twin)
    for step in range(2):
        ids, target = batch(step)
        result = trained.step((ids, target))
        loss = F.cross_entropy(twin(ids).flatten(0, 1), target.flatten())
        loss.backward()
        other.optimizer.step()
        other.optimizer.zero_grad()
        assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_loss_of_tokens_or_their_sum_is_taken_and_a_mean_refused() -> None:
    def of(reduction: str) -> Any:
        return lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction=reduction)

    wanted = one().step(batch(0)).loss
    assert one(loss=of("sum")).step(batch(0)).loss == pytest.approx(wanted, rel=1e-12)
    assert one(loss=of("none")).step(batch(0)).loss == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(ValueError, match='take reduction="sum"'):
        one(loss=of("mean")).step(batch(0))


def test_scheduler_moves_with_updates_and_not_with_skipped_steps() -> None:
    trained = one(scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    weight = next(trained.parts[0].parameters())
    weight.register_hook(lambda grad: grad * math.nan if trained._steps == 1 else grad)
    rates, skipped, before = [], [], None
    for step in range(3):
        if step == 1:
            before = weight.detach().clone()
        skipped.append(trained.step(batch(step)).skipped)
        rates.append(trained.optimizer.param_groups[0]["lr"])
        if step == 1:
            assert torch.equal(weight, before)
    assert skipped == [False, True, False]
    assert rates == [0.05, 0.05, 0.025]


def test_a_step_that_raises_leaves_no_gradients_to_the_next_one() -> None:
    ids, target = batch(0)
    wrong = ids.clone()
    wrong[-1, 0] = 1000  # in the second pass
    trained, other = one("acc2", max_norm=1.0), one("acc2", max_norm=1.0)
    with pytest.raises(IndexError):
        trained.step((wrong, target))
    assert trained.step((ids, target)).norm == other.step((ids, target)).norm


def test_a_skipped_step_has_no_norm_of_the_step_before() -> None:
    trained = one(model=build(Cell("one rank", precision="fp32")), precision="fp16", max_norm=1.0)
    weight, step = next(trained.parts[0].parameters()), 0
    weight.register_hook(lambda grad: grad * math.inf if step == 1 else grad)
    first = trained.step(batch(0))
    step = 1
    second = trained.step(batch(1))
    assert (first.skipped, second.skipped) == (False, True)
    assert math.isfinite(first.norm)
    assert math.isnan(second.norm)


def test_optimizers_share_one_norm_and_one_decision_in_float16() -> None:
    cell = Cell("one rank", optimizer="two", precision="fp32")
    model = build(cell)
    options: dict[str, Any] = {"optimizer": lambda params: make_optimizer(cell, params), "max_norm": 1.0}
    wanted = one(model=build(cell), **options).step(batch(0))
    trained = one(model=model, precision="fp16", **options)
    assert trained.step(batch(0)).norm == pytest.approx(wanted.norm, rel=1e-2)
    wide = next(p for p in model.parameters() if p.dim() == 2)  # of the second optimizer
    wide.register_hook(lambda grad: grad * math.inf)
    before = [p.detach().clone() for p in model.parameters()]
    assert trained.step(batch(1)).skipped
    assert all(map(torch.equal, model.parameters(), before))


def test_routers_are_as_before_where_assemble_fails() -> None:
    model = build(Cell("one rank", "experts"))
    before = [(router.comm, router.batch_comms) for router in fp.expert.routers_of(model).values()]
    with pytest.raises(TypeError, match="optimizer must return"):
        one(model=model, optimizer=lambda params: params)
    assert [(router.comm, router.batch_comms) for router in fp.expert.routers_of(model).values()] == before


def test_results_are_plain_numbers_and_count_flops() -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=51, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    trained = one(model=model, peak_flops=1e12)
    ids, _ = batch(0)
    result = trained.step({"input_ids": ids, "labels": ids})
    numbers = dataclasses.asdict(result)
    assert all(isinstance(value, int | float) for value in numbers.values())
    assert result.tokens == ROWS * (ids.shape[1] - 1)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    shape = fp.planner.find_model(model)
    flops = fp.assembly.model_flops(shape, ROWS, ids.shape[1])
    assert flops == ids.numel() * (6 * matrices + 12 * 2 * ids.shape[1] * 32)
    assert result.mfu == pytest.approx(flops / result.seconds / 1e12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layout": "dp2"}, LayoutError, "there are 1 ranks"),
        ({"layout": 3}, TypeError, "layout must be an fp.Layout or its words"),
        ({"layout": "sp"}, LayoutError, "needs tp above 1"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be a function"),
        ({"optimizer": lambda params: params}, TypeError, "optimizer must return"),
        ({"precision": "fp7"}, ValueError, "fp7"),
        ({"loss": 3}, TypeError, "loss"),
        ({"max_norm": -1.0}, ValueError, "max_norm must be positive"),
        ({"zero_options": {"stage": 3}}, ValueError, "must not have 'stage', which layout= says"),
        (
            {"zero_options": {"bucket": 3}},
            TypeError,
            r"zero_options has \['bucket'\]; fp.zero.shard takes bucket_bytes",
        ),
    ],
)
def test_wrong_arguments_are_refused_and_the_model_is_as_before(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = build(Cell("one rank"))
    before = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    arguments: dict[str, Any] = {"model": model, "layout": "full", "optimizer": torch.optim.SGD, **change}
    with pytest.raises(error, match=message):
        fp.assemble(**arguments)
    assert {name: (id(p), p.dtype) for name, p in model.named_parameters()} == before
    assert all("_fastpar" not in key for module in model.modules() for key in vars(module))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda ids, target: (ids,), "a pair"),
        (lambda ids, target: {"input_ids": ids, "labels": target}, "no 'target'"),
        (lambda ids, target: (ids[:3], target), "as many rows"),
        (lambda ids, target: (ids, target.fill_(-100)), "all are -100"),
        (lambda ids, target: (ids[:1], target[:1]), "too few for 2 microbatches"),
        (lambda ids, target: (ids[:3], target[:3]), "cannot be dealt"),
    ],
)
def test_wrong_batches_are_refused(wrong: Any, message: str) -> None:
    trained = one("acc2")
    with pytest.raises(ValueError, match=message):
        trained.step(wrong(*batch(0)))


def test_a_models_own_unknown_loss_and_balance_losses_in_it_are_refused() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (x - labels).square().mean()

    with pytest.raises(ValueError, match="not known what it is the mean of"):
        Objective.of(Own(), None)
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=51, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="output_router_logits"):
        Objective.of(transformers.MixtralForCausalLM(config), None)


# ---- ranks


def _saved_and_loaded(folder: str, cells: list[Cell]) -> dict[str, list[float]]:
    """Train, save after a step, train on; and the same from the file, in each layout."""
    found: dict[str, list[float]] = {}
    first = assembled(cells[0], scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    first.step(fed(first, cells[0], 0))
    first.parts[0].register_buffer("seen", torch.ones(2))
    dcp.save(first.state(), checkpoint_id=folder)
    found["saved"] = [first.step(fed(first, cells[0], step)).loss for step in (1, 2)]
    first.close()
    for cell in cells:
        trained = assembled(cell, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
        trained.step(fed(trained, cell, 2))
        trained.parts[0].register_buffer("seen", torch.zeros(2))
        state = trained.state()
        dcp.load(state, checkpoint_id=folder)
        trained.load_state(state)
        assert (trained._steps, trained._samples) == (1, ROWS)
        assert torch.equal(trained.parts[0].seen, torch.ones(2))
        found[str(cell)] = [trained.step(fed(trained, cell, step)).loss for step in (1, 2)]
        trained.close()
    return found


def test_a_run_goes_on_from_its_state_with_the_same_bits_and_in_other_layouts(tmp_path: Path) -> None:
    cells = [Cell(words, tied=True) for words in ("pp2 dp2 mb2 zero1", "tp2 sp dp2 zero3", "pp2 dp2 mb2 zero3")]
    cells.append(Cell("pp2 tp2 mb2 grid1x1x2 zero1", tied=True))
    for found in run_ranks(4, _saved_and_loaded, str(tmp_path), cells):
        assert found[str(cells[0])] == found["saved"]
        for cell in cells[1:]:
            assert found[str(cell)] == pytest.approx(found["saved"], rel=1e-9)


def _wrong_on_one_rank() -> list[str]:
    rank = torch.distributed.get_rank()
    found = []
    cell = Cell("pp2 dp2 mb2 zero1")
    try:
        fp.assemble(build(cell), cell.layout, lambda params: torch.optim.SGD(params[: 0 if rank == 1 else None]))
    except ValueError as error:
        found.append(str(error))
    trained = assembled(cell)
    good = fed(trained, Cell("one rank"), 0)
    other = tuple(x.roll(1, 0) for x in good)
    for wrong in (other if rank == 1 else good, good if rank else (good[0],)):
        try:
            trained.step(wrong)
        except ValueError as error:
            found.append(str(error))
    found.append(str(trained.step(good).tokens))  # and it goes on
    found.append(str(trained.evaluate(good)))
    trained.close()
    return found


def test_what_is_wrong_with_one_ranks_optimizer_or_batch_is_raised_on_all_and_the_run_goes_on() -> None:
    everyone = run_ranks(4, _wrong_on_one_rank)
    tokens = str(int((batch(0)[1] != -100).sum()))
    for rank, (made, mixed, broken, counted, loss) in enumerate(everyone):
        assert ("empty parameter list" if rank == 1 else "no optimizer on another rank") in made
        # Ranks 1 and 3 are of one pipeline.
        assert ("pp ranks 0 and 1 were fed different samples" if rank % 2 else "batch of 2 ranks is wrong") in mixed
        assert ("a pair" in broken) if rank == 0 else ("the batch of rank 0 is wrong" in broken)
        assert counted == tokens
        assert loss == everyone[0][4]


def _uneven_optimizers() -> tuple[list[float], list[float], list[bool]]:
    """Two optimizers on one stage and one on the other in float16, with a step that is skipped; and one on each."""
    cell = Cell("pp2 mb2 acc2", precision="fp16")
    rank, found = dist.get_rank(), []
    for uneven in (True, False):

        def several(params: list[nn.Parameter], uneven: bool = uneven) -> Any:
            made = torch.optim.SGD(params[:1], lr=0.1), torch.optim.SGD(params[1:], lr=0.1, fused=True)
            return made if uneven and rank == 1 else torch.optim.SGD(params, lr=0.1)

        trained = fp.assemble(build(cell), cell.layout, several, precision="fp16", max_norm=0.5)
        weight = next(trained.parts[0].parameters())
        weight.register_hook(lambda grad, t=trained: grad * math.inf if rank and t._steps == 1 else grad)
        results = [trained.step(fed(trained, cell, step)) for step in range(STEPS)]
        found.append(([r.loss for r in results], [r.norm for r in results], [r.skipped for r in results]))
        trained.close()
    assert str(found[0]) == str(found[1])
    return found[0]


def test_stages_may_have_different_numbers_of_optimizers_in_float16() -> None:
    for _, norms, skipped in run_ranks(2, _uneven_optimizers):
        assert skipped == [False, True, False]
        assert [math.isfinite(norm) for norm in norms] == [True, False, True]


def _twice(cells: list[Cell]) -> list[bool]:
    found = []
    for cell in cells:
        runs = []
        for _ in range(2):
            trained = assembled(cell)
            losses = [trained.step(fed(trained, cell, step)) for step in range(2)]
            runs.append([(each.loss, each.norm) for each in losses])
            trained.close()
        found.append(runs[0] == runs[1])
    return found


def test_a_cell_has_the_same_bits_twice() -> None:
    cells = [Cell("pp2 tp2 sp mb2 zbv acc2", "experts"), Cell("tp2 dp2 ep4 zero3", "experts")]
    for same in run_ranks(4, _twice, cells):
        assert all(same)


def _explained(folder: str) -> tuple[str, str]:
    trained = assembled(Cell("pp2 dp2 mb2 zero1 full", tied=True))
    report = trained.explain()
    text = report.svg(Path(folder) / "layout.svg") if torch.distributed.get_rank() == 0 else report.svg()
    trained.close()
    return str(report), text


def test_explain_says_who_holds_and_sends_what_in_words_and_as_a_picture(tmp_path: Path) -> None:
    everyone = run_ranks(4, _explained, str(tmp_path))
    assert len(set(everyone)) == 1
    table, picture = everyone[0]
    assert picture == (tmp_path / "layout.svg").read_text()
    assert picture.count("rank ") == 4 + picture.count("pipeline rank ")
    calls = "fp.parallelize_pipeline(model, mesh, '1f1b'", "fp.zero.shard(pipe, optimizer, group=mesh, stage=1"
    for words in ("pp2 dp2 zero1 mb2 full", "dp_shard  2", "rows gathered", *calls):
        assert words in table, table


def _split_sequences() -> tuple[float, float, list[str]]:
    """Over cp: the loss of packed documents, that of each by itself in one process, and what is refused."""
    cell = Cell("cp2 acc2", "huggingface")
    ids, labels = batch(0, huggingface=True)
    rows = [[2, 4] if row % 2 else [6] for row in range(ROWS)]
    plain: Any = build(cell).eval()
    trained, said = assembled(cell), []
    with norms_in_their_own_dtype(plain), norms_in_their_own_dtype(trained.parts[0]):
        found = trained.evaluate({"input_ids": ids, "labels": labels, "documents": rows})
        total, count = 0.0, 0
        for row, sizes in enumerate(rows):
            for own, wanted in zip(ids[row].split(sizes), labels[row].split(sizes), strict=True):
                target = wanted[1:]
                total += float(F.cross_entropy(plain(own[None]).logits[0, :-1], target, reduction="sum").detach())
                count += int((target != -100).sum())

    def refused(action: Any) -> None:
        try:
            action()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("accepted")

    is_first = torch.distributed.get_rank() == 0
    documents = [[2, 4] if is_first else [6, 1]] * ROWS
    refused(lambda: trained.evaluate({"input_ids": ids, "labels": labels, "documents": documents}))
    trained.close()
    own = assembled(Cell("cp2"))
    refused(lambda: own.step((ids, labels[:, :-1] if is_first else labels)))
    own.close()
    refused(lambda: assembled(Cell("cp2"), loss=F.cross_entropy))
    refused(lambda: assembled(Cell("cp2", "experts")))
    refused(lambda: fp.assemble(nn.Sequential(nn.Embedding(VOCAB, 4)), "cp2", torch.optim.SGD))
    return found, total / count, said


def test_split_sequences_have_the_loss_of_their_documents_and_wrong_ones_are_refused_on_all_ranks() -> None:
    for rank, (found, wanted, said) in enumerate(run_ranks(2, _split_sequences)):
        assert found == pytest.approx(wanted, rel=1e-9)
        expected = [
            "the batch of rank 1 is wrong" if rank == 0 else "documents add up to 7 tokens",
            "'target' must have one for each of [16, 6], got [16, 5]" if rank == 0 else "the batch of rank 0 is wrong",
            "loss= would see this rank's tokens alone",
            "balance losses",
            "must take position_ids",
        ]
        for text, message in zip(said, expected, strict=True):
            assert message in text


def _refused_grids() -> dict[str, str]:
    """What the calls say that `assemble` would make of layouts with a grid."""
    found = {}
    for dim in ("cp", "ep", "none"):
        sizes = {"dp_shard" if dim in ("ep", "none") else dim: 2} | ({"ep": 2} if dim == "ep" else {})
        mesh = fp.init_mesh(tp=2, tp_grid=(1, 1, 2), device="cpu", **sizes)
        try:
            model = build(Cell("one rank", "experts" if dim in ("ep", "none") else "dense"))
            fp.parallelize(model, mesh, PLAN if dim == "cp" else "auto")
        except ValueError as error:
            found[dim] = str(error)
        mesh.close()
    try:
        mesh = fp.init_mesh(dp_shard=2, tp=2, device="cpu")
        fp.assemble(build(Cell("one rank")), "dp2 tp2 grid1x1x2", torch.optim.SGD, mesh=mesh)
    except ValueError as error:
        found["mesh"] = str(error)
    return found


def test_rules_refuse_the_grids_that_calls_refuse() -> None:
    for said in run_ranks(4, _refused_grids):
        assert list(said) == ["cp", "ep", "none", "mesh"]
        assert "mesh has tp_grid=None" in said["mesh"]
    for words in ("cp2 tp2 grid1x1x2", "dp2 tp2 ep2 grid1x1x2", "dp2 tp2 grid1x1x2"):
        broken = fp.layouts.broken_rules(fp.Layout.parse(words), shape("experts", tied=False))
        assert [rule.name for rule in broken] == ["grid dims"]


def test_only_public_names_are_used() -> None:
    """What `assemble` does, users can do with the same calls."""
    import fastpar.assembly.api as api

    for name in ("parallelize", "parallelize_pipeline", "init_mesh"):
        assert getattr(api, name) is getattr(fp, name)
    assert list(inspect.signature(fp.assemble).parameters)[:3] == ["model", "layout", "optimizer"]
