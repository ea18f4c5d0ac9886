"""Hugging Face transformers: fastpar's layers under names that its tensor-parallel plans accept.

    from fastpar.integrations import huggingface
    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(
        tp_size=4, tp_plan={"model.layers.*.mlp.down_proj": "fastpar_rowwise"}))

transformers then loads the weights as it does for its own styles, as DTensors with the same placements, and each
named module's forward is fastpar's, on plain local tensors. `fastpar.parallelize` does not need this: it works on a
model that has been loaded, and it can do more (sequence parallelism, shared key/value heads, the loss on split logits).

Also registered is the attention function "fastpar_eager" (`attn_implementation="fastpar_eager"`): attention with
dropout whose masks are those of the unsharded model, whichever heads this rank has; and `experts_implementation` and
`ep_implementation` "fastpar" for mixture-of-experts models: see `huggingface_moe`.

transformers moves fast. All of fastpar that touches it is in these two modules, behind the version guard below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fastpar.comm import Communicator, gather_from, scatter_to, shard_range, shard_sizes
from fastpar.integrations.huggingface_moe import register_experts
from fastpar.ops.dropout import sharded_dropout
from fastpar.ops.embedding import vocab_parallel_embedding
from fastpar.ops.parallel_linear.api import copy_to_linear, linear_all_reduce
from fastpar.tensor.dropout import draw_seed
from fastpar.tensor.parameter import ParameterLayout, unwrap

MIN_TRANSFORMERS = (5, 20)  # the first whose styles hold DTensor parameters (`TensorParallelLayer.install_forward`)


def _local(module: nn.Module, name: str, comm: Communicator) -> Any:
    """A parameter that transformers made, as a local tensor on the path of fastpar's own parameters."""
    param = module._parameters.get(name)
    if param is None:
        return None
    if not isinstance(param, DTensor):
        return param
    return unwrap(param, ParameterLayout.of_dtensor(param, comm))


def _column_forward(module: Any, comm: Communicator, gather_output: bool, x: Tensor) -> Tensor:
    out = copy_to_linear(x, _local(module, "weight", comm), _local(module, "bias", comm), group=comm)
    if gather_output:
        out = gather_from(out, comm, dim=-1, sizes=shard_sizes(module.out_features, comm.size))
    return out


def _row_forward(module: Any, comm: Communicator, split_input: bool, x: Tensor) -> Tensor:
    if split_input:
        x = scatter_to(x, comm, dim=-1, sizes=shard_sizes(module.in_features, comm.size))
    return linear_all_reduce(x, _local(module, "weight", comm), _local(module, "bias", comm), group=comm)


def _embedding_forward(module: Any, comm: Communicator, ids: Tensor) -> Tensor:
    total = module.num_embeddings
    return vocab_parallel_embedding(
        ids,
        _local(module, "weight", comm),
        group=comm,
        vocab_range=(*shard_range(total, comm.size, comm.rank), total),
        padding_idx=module.padding_idx,
    )


def _layout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scaling + mask) v with dropout by global head index.

    query [B, heads_r, S, D], key and value [B, kv_heads_r, S, D]; returns ([B, S, heads_r, D], probabilities).
    `module._fastpar_heads`, set by `fastpar.parallelize`, says which of how many heads these are.
    """
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.size(-1) ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.size(2)]
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    kept = probabilities
    if dropout > 0.0 and module.training:
        first, total, batch = getattr(module, "_fastpar_heads", (0, query.size(1), (0, 1)))
        shape = [batch[1] * query.size(0), total, *probabilities.shape[2:]]
        offset = [batch[0] * query.size(0), first, 0, 0]
        kept = sharded_dropout(probabilities, dropout, seed=draw_seed(), offset=offset, global_shape=shape)
    return (kept @ value).transpose(1, 2).contiguous(), probabilities


def register() -> None:
    """Register the parallel styles, the attention function and the experts; calling it again changes nothing.

    Styles: fastpar_colwise, fastpar_colwise_gather_output, fastpar_rowwise, fastpar_rowwise_split_input,
    fastpar_vocab (embedding). Attention: fastpar_eager. experts_implementation and ep_implementation: fastpar.
    ImportError when transformers is missing or older than the guard.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError(
            "fastpar.integrations.huggingface needs transformers: pip install 'transformers>=5.20'"
        ) from None
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < MIN_TRANSFORMERS:
        needed = ".".join(map(str, MIN_TRANSFORMERS))
        raise ImportError(f"fastpar needs transformers >= {needed}, found {transformers.__version__}")
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, style in _styles().items():
        ALL_PARALLEL_STYLES.register(name, style)
    ALL_ATTENTION_FUNCTIONS.register("fastpar_eager", _layout_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fastpar_eager", eager_mask)
    register_experts()


@functools.cache
def _styles() -> dict[str, Any]:
    """The style objects; they shard as transformers' own do, only the forward is fastpar's."""
    from torch.distributed.tensor import Replicate, Shard
    from transformers.distributed import tensor_parallel as hf

    def with_forward(base: type[Any], forward: Callable[..., Tensor], *options: Any, **keywords: Any) -> Any:
        class WithForward(base):
            def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
                module.forward = functools.partial(forward, module, Communicator.of(mesh), *options)
                return module

        WithForward.__name__ = WithForward.__qualname__ = f"Fastpar{base.__name__}"
        return WithForward(**keywords)

    split = {"input_layouts": Replicate(), "output_layouts": Shard(-1)}
    return {
        "fastpar_colwise": with_forward(hf.ColwiseParallel, _column_forward, False, **split),
        "fastpar_colwise_gather_output": with_forward(hf.ColwiseParallel, _column_forward, True, **split),
        "fastpar_rowwise": with_forward(hf.RowwiseParallel, _row_forward, False),
        "fastpar_rowwise_split_input": with_forward(hf.RowwiseParallel, _row_forward, True),
        "fastpar_vocab": with_forward(hf.EmbeddingParallel, _embedding_forward, shard_dim=0),
    }
