"""What ranks do in the tests of the memory of context parallelism: the bytes that a layer saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.context import layout as layouts
from fastpar.contracts.attention import AttentionMask, positions
from tests.tensor.family_models import tiny_config

TOKENS = 512
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def saved_bytes(forward: Callable[[], object], parameters: Iterable[Tensor] = ()) -> int:
    """Bytes of the memory that backward of `forward` holds on to: each storage once, weights left out."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor  # which keeps the storage, and so its address, its own

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward()
    del kept
    local = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    weights = {parameter.untyped_storage().data_ptr() for parameter in local}
    return sum(size for address, size in held.items() if address not in weights)


def bytes_of_op(methods: list[str], size: int) -> list[int]:
    """What `fp.ops.context_attention` saves on this rank, by method."""
    group = fp.Communicator(fp.init_mesh(cp=size, device="cpu").group("cp"))
    found = []
    for method in methods:
        layout = layouts.zigzag(TOKENS, size)
        own = len(positions(layout[group.rank]))
        q, k, v = (torch.randn(1, heads, own, WIDTH).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        options = {"group": group, "layout": layout, "mask": AttentionMask(causal=True), "method": method}
        found.append(saved_bytes(lambda q=q, k=k, v=v, o=options: fp.ops.context_attention(q, k, v, **o)))
    return found


def bytes_of_layer(methods: list[str], size: int) -> list[int]:
    """What a layer of Hugging Face's Llama saves on this rank, by method: three layers less one, halved."""
    mesh = fp.init_mesh(cp=size, device="cpu")
    ids = torch.randint(1, 61, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return [(bytes_of_llama(mesh, 3, m, ids) - bytes_of_llama(mesh, 1, m, ids)) // 2 for m in methods]


def bytes_of_llama(mesh: fp.Mesh, layers: int, method: str, ids: Tensor) -> int:
    import transformers

    config = tiny_config("llama")
    config.use_cache, config.num_hidden_layers = False, layers
    model: nn.Module = fp.parallelize(
        transformers.LlamaForCausalLM(config), mesh, context=fp.Context(method=method, layout="zigzag")
    )
    batch = fp.context.shard(model, {"input_ids": ids})
    return saved_bytes(lambda: model(**batch).logits, model.parameters())
