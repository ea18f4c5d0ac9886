"""transformers' `Trainer` over a mesh.

    mesh = fp.init_mesh(dp_shard=2, tp=2)
    model = fp.parallelize(model, mesh)
    trainer = MeshTrainer(model=model, args=arguments, train_dataset=rows, mesh=mesh, stage=2)
    trainer.train()

What is the Trainer's stays its own: schedules, logging, callbacks, evaluation, accumulation. What is otherwise here:

* the model is wrapped in nothing; `fastpar.zero.shard` makes it data-parallel, and takes the optimizer
* batches are dealt out by data-parallel rank, counts of tokens and losses go over these ranks, the norm over all
* subclasses of others are mixed in, `class MeshSFTTrainer(MeshTrainer, trl.SFTTrainer)`, as far as they go by their
  accelerator: what gathers over all processes itself is refused where ranks of a mesh share rows
* `save_model` writes whole tensors, one after the other; checkpoints have the optimizer's shards of all ranks, in
  torch.distributed.checkpoint's form, so that another layout can resume from them
"""

from __future__ import annotations

import dis
import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import gather, reduce
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import Trainer

from fastpar.integrations.accelerate import as_mesh_accelerator, check_mesh
from fastpar.mesh import Mesh
from fastpar.parallel.model_methods import gathered
from fastpar.pretrained import save_pretrained
from fastpar.tensor import VocabParallelHead
from fastpar.zero import Zero, shard

_FOLDER, _SCHEDULER, _ARGUMENTS = "fastpar_state", "scheduler.pt", "training_args.bin"


class MeshTrainer(Trainer):
    """A `transformers.Trainer` for a model that fastpar has split, or is to make data-parallel, or both.

    model   plain or from `fastpar.parallelize`; not sharded by `fastpar.zero` yet, unless `zero` is given
    mesh    of all ranks of the job; its dims pp and cp are 1
    stage   of `fastpar.zero.shard`, which the trainer calls when it has made the optimizer. 0 is DDP
    zero    what `fastpar.zero.shard` has returned, in the place of `stage`; then `optimizers=(optimizer, scheduler)`
            has that optimizer

    Other arguments are the Trainer's. Under float16 and bfloat16 of the arguments (autocast) parameters stay float32;
    `zero` with a `precision` does it the other way.

    ValueError for a mesh with other dims, for both `stage` and `zero`, for a `zero` without its optimizer, for
    `push_to_hub`, `load_best_model_at_end`, `fsdp` and `deepspeed`, which would take a rank's shards for the model, and
    for a subclass that calls `gather` of accelerate.utils where tensor-parallel ranks have the same rows.
    """

    model: Any  # which the Trainer says may be absent
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        mesh: Mesh,
        stage: int | None = None,
        zero: Zero | None = None,
        **kwargs: Any,
    ):
        check_mesh(mesh)
        _check_gathers(type(self), mesh)
        if stage is not None and zero is not None:
            raise ValueError(f"stage={stage} and zero= are both given: the model is sharded by one of them")
        if zero is not None and (kwargs.get("optimizers") or (None, None))[0] not in zero.optimizers:
            raise ValueError("zero= needs its optimizer: pass optimizers=(optimizer, scheduler or None)")
        odd = [name for name in _REFUSED if getattr(args, name, None)]
        if odd:
            raise ValueError(f"args.{odd[0]} does not go with MeshTrainer: {_REFUSED[odd[0]]}")
        if kwargs.get("model_init") is not None:
            raise ValueError("MeshTrainer takes a model, not model_init: parallelize it first")
        self.mesh, self.stage, self.zero = mesh, 0 if stage is None else stage, zero
        super().__init__(model=model, args=args, **kwargs)  # by name: trl has other second arguments

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own, over the mesh."""
        super().create_accelerator_and_postprocess()
        as_mesh_accelerator(self.accelerator, self.mesh, self.zero)
        options = {"use_gather_object": True} if self.args.eval_use_gather_object else {}
        self.gather_function = _Gather(self.accelerator, options)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self.zero is None:  # else its shards are where the optimizer has them
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own; with data parallelism sharded as `stage` says."""
        optimizer: Any = super().create_optimizer() if model is None else super().create_optimizer(model)
        if self.zero is None and self.mesh.size("dp") > 1:
            self.zero = shard(self.model, optimizer, group=self.mesh, stage=self.stage)
            self.accelerator.zero = self.zero
        return optimizer

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of a step."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.mesh.size("dp"))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's own, whose terms are averaged over data-parallel ranks whether they divide by the number of
        items or are means of this rank's, as the losses of classifiers and of routers are."""
        own: Any = super().compute_loss
        ranks = self.mesh.size("dp")
        counted = num_items_in_batch is not None and self.args.average_tokens_across_devices
        if ranks == 1 or not counted or own.__func__ is not Trainer.compute_loss:
            return own(model, inputs, return_outputs, num_items_in_batch)
        # The Trainer divides by the items of all ranks and multiplies what comes out by the number of ranks.
        found = own(model, inputs, return_outputs, num_items_in_batch / ranks)
        return (found[0] / ranks, *found[1:]) if return_outputs else found / ranks

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with all logits on every rank."""
        with gathered([m for m in self.model.modules() if isinstance(m, VocabParallelHead)]):
            return super().prediction_step(model, *args, **kwargs)

    # ---- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir if output_dir is not None else str(self.args.output_dir))
        save_pretrained(self.accelerator.unwrap_model(self.model), folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        dcp.save(self._state(), checkpoint_id=str(Path(output_dir) / _FOLDER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _state(self) -> dict[str, Any]:
        if self.zero is not None:
            return {"training": self.zero}
        model, optimizer = get_state_dict(self.model, self._plain_optimizer())
        return {"model": model, "optimizer": optimizer}

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not (Path(resume_from_checkpoint) / _FOLDER).is_dir():
            raise ValueError(
                f"{resume_from_checkpoint} has no {_FOLDER}: it was not saved by MeshTrainer. To go on from weights "
                "alone, load them into the model (fastpar.load_pretrained) and train without resume_from_checkpoint"
            )  # else weights are read with the optimizer's states

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = self._state()
        dcp.load(state, checkpoint_id=str(Path(checkpoint) / _FOLDER))
        if self.zero is None:
            set_state_dict(
                self.model,
                self._plain_optimizer(),
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))


def _check_gathers(cls: type, mesh: Mesh) -> None:
    """ValueError where the code of a subclass calls functions that go over all processes, and ranks share rows."""
    if not dist.is_initialized() or dist.get_world_size() == mesh.size("dp"):
        return
    for each in cls.__mro__:
        for name, member in vars(each).items() if issubclass(each, Trainer) else ():
            function = inspect.unwrap(member) if inspect.isfunction(member) else None
            if not inspect.isfunction(function):
                continue
            loaded = {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}
            known = [*map(function.__globals__.get, loaded), *inspect.getclosurevars(function).nonlocals.values()]
            used = [x.__name__ for x in (gather, reduce) if any(value is x for value in known)]
            if used:
                raise ValueError(
                    f"{each.__name__}.{name} calls {used[0]} of accelerate.utils, which goes over all "
                    f"{dist.get_world_size()} processes, where {mesh.size('dp')} have rows of their own: take a mesh "
                    f"of data parallelism alone, or self.accelerator.{used[0]} in a subclass of it"
                )


class _Gather:
    """What evaluation gathers with; a class, as the Trainer looks at nothing but the call."""

    def __init__(self, accelerator: Any, options: dict[str, Any]):
        self.accelerator, self.options = accelerator, options

    def __call__(self, data: Any) -> Any:
        return self.accelerator.gather_for_metrics(data, **self.options)


_REFUSED = {
    "push_to_hub": "save_model(folder), and upload the folder",
    "load_best_model_at_end": "load the best checkpoint's folder with fastpar.load_pretrained after training",
    "fsdp": "stage= shards",
    "deepspeed": "stage= shards",
    "auto_find_batch_size": "ranks would find other sizes",
}
