"""`fp.assemble(..., weights=folder)`: each rank reads what it holds, in every layout, and what does not fit is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastpar as fp
from examples.model import Llama, LlamaConfig
from fastpar.assembly import Assembled
from tests.assembly.assembly_cells import Cell, batch, build, reference
from tests.assembly.weights_ranks import Counted, cells_load, loaded, on_meta, peak_of_loading, wrong_values
from tests.dist import run_ranks

TWO = (Cell("tp2 sp"), Cell("pp2 mb2 interleaved_1f1b stages2", tied=True))
FOUR = (
    Cell("pp2 dp2 mb2 interleaved_1f1b stages2 zero3", tied=True, frozen=True),
    Cell("tp4 grid2x1x2 full"),
    Cell("tp2 dp2 ep2 etp2 zero3", "experts"),
    Cell("dp2 tp2 sp ep4 zero1", "experts", frozen=True),
    Cell("pp2 tp2 mb2 zero2 acc2", "huggingface", tied=True),
    Cell("tp2 dp2 zero3 cpu", frozen=True),
    Cell("dp2 tp2 zero1", "huggingface", precision="bf16"),
    Cell("pp2 dp2 mb2 shard_head zero1"),
    Cell("cp2 tp2 zero3", "huggingface"),
    Cell("replicas2 dp2 zero3", optimizer="two"),
)


def saved(cell: Cell, folder: Path, **options: Any) -> Path:
    model: Any = build(cell)
    save = model.save_pretrained if cell.model == "huggingface" else lambda *a, **o: fp.save_pretrained(model, *a, **o)
    save(folder, **options)
    return folder


def headers(folder: Path) -> int:
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("cells", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_each_rank_reads_what_it_holds_and_trains_as_one_process(tmp_path: Path, cells: tuple[Cell, ...]) -> None:
    sharded = {"max_shard_size": "40KB"}  # several files and an index
    folders = [
        saved(cell, tmp_path / str(i), **(sharded if cell.model == "huggingface" else {}))
        for i, cell in enumerate(cells)
    ]
    ranks = run_ranks(cells[0].layout.world_size, cells_load, cells, [str(f) for f in folders], timeout=240)
    for cell, folder in zip(cells, folders, strict=True):
        itemsize = 8 if cell.precision == "fp64" else 4
        wanted = reference(cell).losses
        for found in ranks:
            wrong, held, read, losses = found[str(cell)]
            assert not wrong, cell
            assert read - headers(folder) == held * itemsize, cell
            assert losses == pytest.approx(wanted[:2], rel=1e-3 if cell.precision != "fp64" else 1e-8), cell


def _mixtral() -> Any:
    import transformers

    sizes = {"vocab_size": 51, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def _stacked(folder: str) -> tuple[list[str], int]:
    with torch.device("meta"):
        model = _mixtral()
    with Counted() as counted:
        trained = fp.assemble(model, "dp2 ep2 zero3", torch.optim.SGD, weights=folder)
    wrong, _ = wrong_values(trained, _mixtral())
    trained.close()
    return wrong, counted.bytes


def test_experts_that_transformers_stacks_are_read_by_the_rank_that_has_them(tmp_path: Path) -> None:
    model = _mixtral()
    model.save_pretrained(tmp_path)
    total = sum(x.nbytes for x in model.parameters())
    for wrong, read in run_ranks(2, _stacked, str(tmp_path)):
        assert not wrong
        assert read - headers(tmp_path) < 0.52 * total  # halves, but for the smallest, which stay whole


def test_memory_of_a_rank_is_its_own_share(tmp_path: Path) -> None:
    config = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 24}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = Llama(LlamaConfig(**config))
    total = sum(x.nbytes for x in model.parameters())
    fp.save_pretrained(model, tmp_path / "large")
    saved(Cell("one rank", precision="fp32"), tmp_path / "small")
    for peak in run_ranks(4, peak_of_loading, "pp2 dp2 mb2 zero3", str(tmp_path), config):
        assert peak < 0.5 * total, (peak, total)  # a quarter, and a layer and the embeddings


# ---- one process


_MADE: list[Assembled] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _MADE:
        _MADE.pop().close()


def one(folder: Path, model: Any = None, cell: Cell | None = None, **options: Any) -> Assembled:
    cell = cell or Cell("one rank")
    _MADE.append(loaded(cell, folder, model, **options))
    return _MADE[-1]


def test_masters_are_the_values_of_the_file_before_they_are_rounded(tmp_path: Path) -> None:
    cell = Cell("one rank", precision="bf16")
    saved(Cell("one rank", precision="fp32"), tmp_path)
    trained = one(tmp_path, on_meta(cell).bfloat16(), cell)
    assert {p.dtype for p in trained.parts[0].parameters()} == {torch.bfloat16}
    whole = build(Cell("one rank", precision="fp32"))
    assert wrong_values(trained, whole)[0] == []
    assert trained.zero.params[0].optim_param.dtype == torch.float32


def test_a_model_that_has_values_gets_those_of_the_folder(tmp_path: Path) -> None:
    saved(Cell("one rank"), tmp_path)
    model = build(Cell("one rank"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    trained = one(tmp_path, model)
    assert trained.parts[0] is model
    assert trained.step(batch(0)).loss == pytest.approx(reference(Cell("one rank")).losses[0], rel=1e-12)


def test_what_builds_a_model_is_taken_and_trains(tmp_path: Path) -> None:
    import transformers

    cell = Cell("one rank", "huggingface", precision="fp32")
    plain = build(cell).eval()
    saved(cell, tmp_path)
    ids, labels = batch(0, huggingface=True)
    wanted = one(tmp_path, cell=cell).evaluate({"input_ids": ids, "labels": labels})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for made in (transformers.AutoModelForCausalLM, config, lambda: transformers.LlamaForCausalLM(plain.config)):
        trained = one(tmp_path, made, cell)
        assert trained.parts[0].training
        assert trained.evaluate({"input_ids": ids, "labels": labels}) == wanted
    for name, buffer in plain.named_buffers():  # which no file has
        assert torch.equal(_MADE[0].parts[0].get_buffer(name), buffer)


class Tables(nn.Module):
    """A model with buffers that no folder has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed = kind, nn.Embedding(51, 8)
        self.register_buffer("table", torch.empty(5), persistent=False)
        if kind == "attribute":
            self.scale = torch.ones(3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        rows = {"some": 4, "computed": 5, "drawn": 5, "attribute": 5, "none": 0}[self.kind]
        with torch.no_grad():
            self.table[:rows] = torch.rand(rows) if self.kind == "drawn" else torch.arange(5.0)[:rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x) @ self.embed.weight.T + self.table.sum()


def _tables(kind: str) -> nn.Module:
    with torch.device("meta"):
        return Tables(kind)


def test_buffers_that_no_folder_has_are_computed_or_refused(tmp_path: Path) -> None:
    fp.save_pretrained(Tables("computed"), tmp_path)
    model = _tables("computed")
    one(tmp_path, model)
    assert torch.equal(model.get_buffer("table"), torch.arange(5.0))
    for kind in ("some", "drawn", "none", "attribute"):
        with pytest.raises(ValueError, match="scale is on the meta" if kind == "attribute" else "table is a buffer"):
            one(tmp_path, _tables(kind))
    one(tmp_path, lambda: Tables("drawn"))  # which has them when it is built


def test_what_does_not_fit_is_said_and_the_model_is_as_before(tmp_path: Path) -> None:
    saved(Cell("one rank"), tmp_path)
    good = json.loads((tmp_path / "model.safetensors").read_bytes()[8:][: headers(tmp_path) - 8])
    assert "norm.weight" in good
    model = on_meta(Cell("one rank"))
    before = {name: id(x) for name, x in model.named_parameters()}
    model.more = nn.Linear(3, 3, device="meta")
    with pytest.raises(ValueError, match=r"folder lacks more.bias, more.weight"):
        one(tmp_path, model)
    del model.more
    norm, model.norm = model.norm, nn.Identity()
    with pytest.raises(ValueError, match=r"folder has norm.weight, for which the model has no place"):
        one(tmp_path, model)
    model.norm = norm

    class Averaging(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["average"] = parameter.detach().clone()

    with pytest.raises(ValueError, match="makes its state 'average' when it is built"):
        fp.assemble(model, "full", Averaging, weights=tmp_path)
    assert {name: id(x) for name, x in model.named_parameters()} == before
    assert all(x.is_meta for x in model.parameters())
    with pytest.raises(FileNotFoundError, match=r"has neither model.safetensors"):
        one(tmp_path / "nowhere", model)
    with pytest.raises(ValueError, match=r"on the meta device: give a folder"):
        fp.assemble(model, "full", torch.optim.SGD)
    fp.save_pretrained(nn.ParameterDict({"x": nn.Parameter(torch.ones(3, dtype=torch.int8), False)}), tmp_path / "int8")
    with pytest.raises(ValueError, match=r"x in .* is torch.int8, and x of the model torch.float32"):
        one(tmp_path / "int8", nn.ParameterDict({"x": torch.ones(3, device="meta")}))
    trained = one(tmp_path, model, Cell("full"))  # and after all of these
    assert trained.step(batch(0)).loss == pytest.approx(reference(Cell("one rank")).losses[0], rel=1e-12)


def _lacking(folder: str) -> list[str]:
    rank, said = torch.distributed.get_rank(), []
    cell = Cell("tp2")
    for wrong in (f"{folder}/nowhere" if rank == 1 else folder, folder):
        try:
            trained = loaded(cell, wrong)
            trained.close()
            said.append("")
        except (ValueError, FileNotFoundError) as error:
            said.append(str(error))
    return said


def test_a_folder_that_one_rank_lacks_is_raised_on_all_and_the_next_call_goes_well(tmp_path: Path) -> None:
    saved(Cell("tp2"), tmp_path)
    first, second = run_ranks(2, _lacking, str(tmp_path))
    assert "load_pretrained failed on rank 1" in first[0]
    assert "has neither model.safetensors" in second[0]
    assert (first[1], second[1]) == ("", "")
