"""transformers' Trainer and accelerate over a mesh train as in one process, and save and resume whole models."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastpar as fp
from tests.dist import run_ranks
from tests.models import VOCAB, build_model

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

LAYOUTS = {
    "tp2": ({"tp": 2}, None),
    "dp2 zero2": ({"dp_shard": 2}, 2),
    "tp2 dp2 zero3": ({"tp": 2, "dp_shard": 2}, 3),
}
ROWS = 13  # that are evaluated, in batches of 4; a short batch of training is filled up by accelerate, so 12 train


def _rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (ROWS, 9), generator=generator)
    found = []
    for n, row in enumerate(ids):
        labels = row.clone()
        labels[: n % 5] = -100  # so that ranks have other numbers of tokens
        found.append({"input_ids": row, "labels": labels})
    return found


def _arguments(folder: str, per_device: int, **more: Any) -> Any:
    from transformers import TrainingArguments

    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    options |= {"max_steps": 4, "learning_rate": 1e-2, "max_grad_norm": 0.3, "logging_steps": 1, "seed": 3}
    options |= {
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "linear",
        "per_device_eval_batch_size": per_device,
    }
    return TrainingArguments(output_dir=folder, per_device_train_batch_size=per_device, **(options | more))


def _accuracy(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    assert prediction.predictions.shape == (len(labels), 9, VOCAB)
    return {"hits": float((guesses == labels)[labels != -100].sum())}


def _evaluated(trainer: Any) -> tuple[float, float]:
    """The loss of rows of one length, since transformers takes the mean of batches' means; and hits among all rows,
    whose last batch is short."""
    full = [{**row, "labels": row["input_ids"]} for row in _rows()[:12]]
    return trainer.evaluate(full)["eval_loss"], trainer.evaluate()["eval_hits"]


def _history(trainer: Any) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]


def _in_one_process(folder: str) -> dict[str, Any]:
    from transformers import Trainer

    _quiet()
    model = build_model("llama", torch.float32)
    trainer = Trainer(
        model=model,
        args=_arguments(folder, 4),
        train_dataset=_rows()[:12],
        eval_dataset=_rows(),
        compute_metrics=_accuracy,
    )
    trainer.train()
    return {
        "history": _history(trainer),
        "eval": _evaluated(trainer),
        "weights": {name: x.detach().clone() for name, x in model.state_dict().items()},
    }


def _quiet() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else accelerate sets it, and warns
    warnings.simplefilter("ignore")


def _over_a_mesh(folder: str, layout: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from fastpar.integrations.trainer import MeshTrainer

    _quiet()
    sizes, stage = LAYOUTS[layout]

    def trainer(where: str, **more: Any) -> Any:
        model = build_model("llama", torch.float32)
        if mesh.size("tp") > 1:
            fp.parallelize(model, mesh)
        return MeshTrainer(
            model=model,
            args=_arguments(where, 4 // mesh.size("dp"), **more),
            train_dataset=_rows()[:12],
            eval_dataset=_rows(),
            compute_metrics=_accuracy,
            mesh=mesh,
            stage=stage,
        )

    mesh = fp.init_mesh(**sizes, device="cpu")
    first = trainer(folder, save_strategy="steps", save_steps=2)
    first.train()
    evaluated = _evaluated(first)
    first.save_model(f"{folder}/last")
    second = trainer(folder)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    resumed = _history(second)[2:]
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/last").state_dict()
    if first.zero is not None:
        first.zero.detach()
        second.zero.detach()
    return {
        "rows": first.get_total_train_batch_size(first.args),
        "history": _history(first),
        "resumed": resumed,
        "eval": evaluated,
        "weights": saved,
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, _in_one_process, str(tmp_path_factory.mktemp("plain")))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_over_a_mesh_trains_evaluates_saves_and_resumes_as_in_one_process(
    layout: str, plain: dict[str, Any], tmp_path: Path
) -> None:
    size = 4 if "tp2 dp2" in layout else 2
    for found in run_ranks(size, _over_a_mesh, str(tmp_path), layout):
        assert len(found["history"]) == 4
        assert found["rows"] == 8
        torch.testing.assert_close(torch.tensor(found["history"]), torch.tensor(plain["history"]), rtol=2e-3, atol=1e-5)
        assert found["resumed"] == found["history"][2:], "the same bits after a checkpoint"
        assert found["eval"][0] == pytest.approx(plain["eval"][0], rel=1e-3)
        assert abs(found["eval"][1] - plain["eval"][1]) <= 1
        for name, value in plain["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-2, atol=2e-3, msg=name)


def _classifier(folder: str, stage: int | None) -> list[tuple[float, float]]:
    """Its loss is a mean of the batch's rows, whatever number of items the Trainer gives it."""
    from transformers import LlamaForSequenceClassification, Trainer

    from fastpar.integrations.trainer import MeshTrainer

    _quiet()
    config = build_model("llama", torch.float32).config
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(config)
    rows = [{"input_ids": row["input_ids"], "labels": n % 3} for n, row in enumerate(_rows()[:8])]
    mesh = fp.init_mesh(device="cpu") if stage is None else fp.init_mesh(dp_shard=2, device="cpu")
    options = {"model": model, "args": _arguments(folder, 4 // mesh.size("dp"), max_steps=2), "train_dataset": rows}
    trainer = Trainer(**options) if stage is None else MeshTrainer(**options, mesh=mesh, stage=stage)
    trainer.train()
    return _history(trainer)


def test_a_loss_that_is_a_mean_is_averaged_over_the_ranks_of_a_mesh(tmp_path: Path) -> None:
    plain = torch.tensor(run_ranks(1, _classifier, str(tmp_path), None)[0])
    for found in run_ranks(2, _classifier, str(tmp_path), 2):
        torch.testing.assert_close(torch.tensor(found), plain, rtol=2e-3, atol=1e-5)


def _loop_of_accelerate() -> None:
    from torch.utils.data import DataLoader

    from fastpar.integrations.accelerate import MeshAccelerator

    _quiet()
    plain: Any = build_model("llama", torch.float32)
    model: Any = copy.deepcopy(plain)
    mesh = fp.init_mesh(dp_shard=2, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(ValueError, match=r"2 data-parallel ranks, and nobody reduces .*zero=fastpar.zero.shard"):
        MeshAccelerator(mesh=mesh, cpu=True).prepare(model)
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=1)
    accelerator = MeshAccelerator(mesh=mesh, zero=zero, cpu=True)
    rows = [{**row, "labels": row["input_ids"]} for row in _rows()[:8]]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for batch, wanted in zip(loader, DataLoader(rows, batch_size=4), strict=True):
        mine = slice(2 * mesh.rank("dp"), 2 * mesh.rank("dp") + 2)
        assert torch.equal(batch["input_ids"], wanted["input_ids"][mine])
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        total = plain(**wanted).loss
        total.backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(accelerator.reduce(loss.detach(), "mean"), total.detach(), rtol=1e-4, atol=1e-5)
        gathered = accelerator.gather_for_metrics(batch["input_ids"])
        assert torch.equal(gathered, wanted["input_ids"])
        assert accelerator.gather_for_metrics([f"rank {mesh.rank('dp')}"]) == ["rank 0", "rank 1"]
    alike = MeshAccelerator(mesh=fp.init_mesh(tp=2, device="cpu"), cpu=True)
    assert alike.gather_for_metrics(["a row"]) == ["a row"], "ranks of tp have the same rows"
    with pytest.raises(RuntimeError, match=r"do not know shards: use torch.distributed.checkpoint.save"):
        accelerator.save_state("x")
    with pytest.raises(ValueError, match=r"the mesh has \{'cp': 2\}: pipelines have a step"):
        MeshAccelerator(mesh=fp.init_mesh(cp=2, device="cpu"), cpu=True)
    zero.detach()


def test_a_loop_of_accelerate_over_a_mesh_is_that_of_one_process() -> None:
    run_ranks(2, _loop_of_accelerate)


def _mixed_in(folder: str) -> None:
    """Over trainers of others, as trl has them."""
    from accelerate.utils import gather
    from transformers import Trainer

    from fastpar.integrations.trainer import MeshTrainer

    class Preferring(Trainer):
        def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **options: Any) -> None:
            super().__init__(model, args, **options)
            self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

    class Rewarding(Preferring):
        @torch.no_grad()
        def rewards(self, mine: Any) -> Any:
            return gather(mine)

    def mixed(kind: type, **sizes: int) -> Any:
        options: dict[str, Any] = {"ref_model": reference, "mesh": fp.init_mesh(**sizes, device="cpu")}
        return type("Mixed", (MeshTrainer, kind), {})(model=reference, args=_arguments(folder, 2), **options)

    _quiet()
    reference = build_model("llama", torch.float32)
    assert mixed(Preferring, dp_shard=2).ref_model is reference
    assert mixed(Preferring, tp=2).ref_model is reference
    assert mixed(Rewarding, dp_shard=2).ref_model is reference
    with pytest.raises(ValueError, match=r"Rewarding.rewards calls gather of accelerate.utils, which goes over all 2 "):
        mixed(Rewarding, tp=2)


def test_trainers_of_others_take_a_mesh_unless_they_gather_over_all_processes(tmp_path: Path) -> None:
    run_ranks(2, _mixed_in, str(tmp_path))


def test_what_the_trainer_cannot_do_is_refused(tmp_path: Path) -> None:
    run_ranks(1, _refused, str(tmp_path))


def _refused(folder: str) -> None:
    from fastpar.integrations.trainer import MeshTrainer

    _quiet()
    mesh = fp.init_mesh(device="cpu")
    model = build_model("llama", torch.float32)
    better: dict[str, Any] = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 1}
    arguments = _arguments(folder, 2, load_best_model_at_end=True, **better)
    with pytest.raises(ValueError, match=r"args.load_best_model_at_end does not go with MeshTrainer: load the best"):
        MeshTrainer(model=model, args=arguments, mesh=mesh)
    with pytest.raises(TypeError, match=r"mesh must be what fastpar.init_mesh returned, got NoneType"):
        MeshTrainer(model=model, args=_arguments(folder, 2), mesh=None)  # type: ignore[arg-type]
    trainer = MeshTrainer(model=model, args=_arguments(folder, 2), mesh=mesh, train_dataset=_rows())
    Path(folder, "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match=r"has no fastpar_state: it was not saved by MeshTrainer"):
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
