"""fastpar's layers as `ParallelStyle`s, for `torch.distributed.tensor.parallel.parallelize_module`.

    from torch.distributed.tensor.parallel import parallelize_module
    from fastpar.integrations.torch_parallel import ColwiseParallel, RowwiseParallel

    parallelize_module(model, mesh["tp"], {"layers.*.mlp.up_proj": ColwiseParallel(),
                                           "layers.*.mlp.down_proj": RowwiseParallel()})

The keywords are those of torch's styles. Inputs and outputs are plain local tensors (`use_local_output=True`, torch's
default); parameters become DTensors with torch's placements.

Torch's styles broadcast rank 0's weights. These expect equal weights on all ranks, as `fastpar.parallelize` checks.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from fastpar.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, adopt, replicate


def _one_of(name: str, value: Placement | None, default: Placement, allowed: tuple[Placement, ...]) -> Placement:
    value = default if value is None else value
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value}")
    return value


def _check_local(use_local_output: bool) -> None:
    if not use_local_output:
        raise ValueError("use_local_output=False is not available: fastpar's layers return plain local tensors")


class ColwiseParallel(ParallelStyle):
    """`nn.Linear` to `ColumnParallelLinear`, in place; `nn.Embedding` is split by vocabulary with `RowwiseParallel`.

    output_layouts  Shard(-1): the output stays split; Replicate(): it is gathered
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        _one_of("input_layouts", input_layouts, Replicate(), (Replicate(),))
        output = _one_of("output_layouts", output_layouts, Shard(-1), (Shard(-1), Replicate()))
        _check_local(use_local_output)
        self.gather_output = output == Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        adopt(module, ColumnParallelLinear, device_mesh, gather_output=self.gather_output)
        return module


class RowwiseParallel(ParallelStyle):
    """`nn.Linear` to `RowParallelLinear`, `nn.Embedding` to `VocabParallelEmbedding`, in place.

    input_layouts  Shard(-1): the input arrives split by feature; Replicate(): it is split here (linears), or holds the
                   same token ids on every rank (embeddings, the only choice)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        self.input_layouts = _one_of("input_layouts", input_layouts, Shard(-1), (Shard(-1), Replicate()))
        _one_of("output_layouts", output_layouts, Replicate(), (Replicate(),))
        _check_local(use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding):
            adopt(module, VocabParallelEmbedding, device_mesh)
        else:
            adopt(module, RowParallelLinear, device_mesh, input_is_parallel=self.input_layouts == Shard(-1))
        return module


class ReplicateParallel(ParallelStyle):
    """Parameters whole on every rank; `sum_grad=True` for modules that see only this rank's heads or sequence part."""

    def __init__(self, *, sum_grad: bool = False):
        self.sum_grad = sum_grad

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate(module, device_mesh, sum_grad=self.sum_grad)
        return module
