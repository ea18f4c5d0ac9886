"""accelerate over a mesh: data is dealt out by data-parallel rank, nothing is wrapped, norms are exact.

    mesh = fp.init_mesh(dp_shard=2, tp=2)
    model = fp.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=2)
    accelerator = MeshAccelerator(mesh=mesh, zero=zero)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)      # and the loop as ever

accelerate takes every process for one of data parallelism: it wraps the model in DistributedDataParallel, gives each
process other rows, and counts processes where it means batches. Here `num_processes` and `process_index` are those
of the mesh's dp; `is_main_process` and what goes with it stay those of the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from fastpar.clip import clip_grad_norm_
from fastpar.comm import Communicator
from fastpar.mesh import Mesh
from fastpar.zero import Zero


class MeshAccelerator(Accelerator):
    """An `accelerate.Accelerator` for a model that fastpar has split, sharded or both.

    mesh  of all ranks of the job; its dims pp and cp are 1
    zero  what `fastpar.zero.shard` returned; needed where the mesh has data parallelism

    `prepare` takes the model as well: it gets autocast, as `mixed_precision` says, and torch.compile. Ranks of one
    data-parallel coordinate get the same rows. `clip_grad_norm_` is `fastpar.clip_grad_norm_`, exact over all ranks.
    `gather`, `gather_for_metrics` and `reduce` go over data parallelism, so that every row counts once.

    ValueError for other dims, for data parallelism without `zero`, and for plugins that shard models by themselves.
    """

    mesh: Mesh
    zero: Zero | None
    _dp: Communicator

    def __init__(self, *, mesh: Mesh, zero: Zero | None = None, **options: Any):
        check_mesh(mesh)
        super().__init__(**options)
        self.use_mesh(mesh, zero)

    def use_mesh(self, mesh: Mesh, zero: Zero | None) -> None:
        """Go over this mesh from now on."""
        check_mesh(mesh)
        kind = str(self.distributed_type).rpartition(".")[2]
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ValueError(
                f"MeshAccelerator cannot go with accelerate's {kind}, which shards the model by itself: leave its "
                "plugin out, and the variables of its launcher"
            )
        self.mesh, self.zero, self._dp = mesh, zero, Communicator.of(mesh.group("dp"))

    @property
    def num_processes(self) -> int:
        """How many batches there are at once."""
        return self.mesh.size("dp") if hasattr(self, "mesh") else int(super().num_processes)

    @property
    def process_index(self) -> int:
        """Which of them is this rank's."""
        return self.mesh.rank("dp") if hasattr(self, "mesh") else int(super().process_index)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model with autocast and torch.compile, as asked for, and nothing around it. What is for evaluation alone,
        such as a reference model, needs nobody who reduces gradients."""
        if self.zero is None and not evaluation_mode and self.mesh.size("dp") > 1:
            raise ValueError(
                f"the mesh has {self.mesh.size('dp')} data-parallel ranks, and nobody reduces the gradients: pass "
                "zero=fastpar.zero.shard(model, optimizer, group=mesh, stage=...); stage 0 is DistributedDataParallel"
            )
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Backward passes in here add to local gradients."""
        return nullcontext() if self.zero is None else self.zero.no_sync()

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`fastpar.clip_grad_norm_`: over all ranks, each element once. 2.0 and inf are the norms that there are."""
        self.unscale_gradients()
        if self.zero is not None:
            self.zero.reduce_gradients()
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return clip_grad_norm_(parameters, float(max_norm), mesh=self.mesh, norm_type=float(norm_type))

    def gather(self, tensor: Any) -> Any:
        """The tensors of all data-parallel ranks, along dim 0; numbers become a tensor of one dim."""

        def gathered(x: Tensor) -> Tensor:
            return self._dp.all_gather(x.reshape(1) if x.dim() == 0 else x.contiguous())

        return recursively_apply(gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` without the rows that fill up the last batch; objects that are no tensors become one list."""
        if not use_gather_object and _are_tensors(input_data):
            return super().gather_for_metrics(input_data)
        # accelerate's own gathers objects over the job, so that those of tensor-parallel ranks would count twice.
        parts: list[Any] = [None] * self._dp.size
        if self._dp.size > 1:
            dist.all_gather_object(parts, input_data, group=self._dp.group)
        data = input_data if self._dp.size == 1 else [x for part in parts for x in part]
        left = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        return data[:left] if left > 0 and isinstance(data, (list, tuple, Tensor)) else data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over data-parallel ranks, times `scale`; or the tensor itself ("none")."""
        if reduction not in ("sum", "mean", "none"):
            raise ValueError(f"reduction must be 'sum', 'mean' or 'none', got {reduction!r}")
        factor = scale / self._dp.size if reduction == "mean" else scale

        def reduced(x: Tensor) -> Tensor:
            return (x.clone() if reduction == "none" else self._dp.all_reduce(x)) * factor

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors on the host, on every rank. Collective. `save_pretrained` needs less memory."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    def save_model(self, model: nn.Module, save_directory: Any, *_: Any, **options: Any) -> None:
        """`fastpar.save_pretrained`."""
        if options.get("max_shard_size") is not None:
            raise ValueError("save_model takes no max_shard_size here: fastpar.save_pretrained has max_file_bytes")
        from fastpar.pretrained import save_pretrained

        save_pretrained(self.unwrap_model(model), save_directory)

    def save_state(self, *_: Any, **__: Any) -> Any:
        """Refused: it would write one rank's shards as if they were all."""
        raise RuntimeError(_STATES)

    def load_state(self, *_: Any, **__: Any) -> Any:
        """Refused, as `save_state` is."""
        raise RuntimeError(_STATES)


_STATES = (
    "save_state and load_state of accelerate do not know shards: use torch.distributed.checkpoint.save({'training': "
    "zero}, checkpoint_id=folder), or get_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict "
    "without data parallelism"
)


def _are_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def check_mesh(mesh: Mesh) -> None:
    """TypeError for what is no `fastpar.Mesh`, ValueError for dims that loaders and loops of others do not know."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be what fastpar.init_mesh returned, got {type(mesh).__name__}")
    odd = {dim: mesh.size(dim) for dim in ("pp", "cp") if mesh.size(dim) > 1}
    if odd:
        raise ValueError(
            f"the mesh has {odd}: pipelines have a step of their own (Pipeline.step), and split sequences are cut by "
            "fastpar.context.shard, neither of which accelerate's loops call. Write the loop yourself"
        )


def as_mesh_accelerator(accelerator: Any, mesh: Mesh, zero: Zero | None) -> MeshAccelerator:
    """An `Accelerator` that somebody has made, over a mesh from now on."""
    if type(accelerator) is not Accelerator:
        raise TypeError(f"expected an accelerate.Accelerator, got {type(accelerator).__name__}")
    accelerator.__class__ = MeshAccelerator
    accelerator.use_mesh(mesh, zero)
    return accelerator
