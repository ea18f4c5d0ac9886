"""Functions of other libraries that the benches run beside fastpar where they are installed, and in the benches only.

    pip install --no-deps --target /tmp/peers megatron-core==0.19.2 liger-kernel==0.8.5 cut-cross-entropy==25.1.1
    PYTHONPATH=/tmp/peers fastpar bench cross_entropy

Torch is all that the functions taken from Megatron-Core need; those of the others need Triton and a GPU too. (The wheel
of megatron-core asks for Python 3.12; on older ones, `pip download --python-version 3.12 --only-binary=:all:` it and
unzip: its Python files run on 3.11.) Each loader imports on call, and `find` turns what goes wrong into a reason.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
PEER_DISTRIBUTIONS = (
    "megatron-core",
    "liger-kernel",
    "cut-cross-entropy",
    "flash-attn",
    "deepspeed",
    "transformers",
)  # versions go into rows


def find(load: Callable[[], T]) -> T | str:
    """What `load` gives, or why it cannot: one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing Megatron-Core warns about packages that it would also like
            return load()
    except Exception as error:  # a peer that breaks while it is imported is a peer that is not there
        return f"{type(error).__name__}: {error}".splitlines()[0]


def process_group(device: str) -> dist.ProcessGroup:
    """The default group; in a process without one, a new group of this rank alone, for peers that insist on one."""
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# Per-token losses from this rank's logits [tokens, vocab / ranks]: (logits, target, group) -> [tokens]. The two of
# Megatron-Core and Liger's take [sequence, batch, vocab]; the tokens are the sequence.


def megatron_unfused() -> Callable[..., torch.Tensor]:
    """Three all-reduces. A float32 input is overwritten: by exponentials in forward, by the gradient in backward."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    def loss(logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        per_token: torch.Tensor = vocab_parallel_cross_entropy(logits[:, None], target[:, None], tp_group=group)
        return per_token[:, 0]

    return loss


def megatron_fused() -> Callable[..., torch.Tensor]:
    """torch.compile around the same pieces, two all-reduces, and a gradient that is bfloat16 whatever the input is."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    def loss(logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        per_token: torch.Tensor = fused_vocab_parallel_cross_entropy(logits[:, None], target[:, None], group)
        return per_token[:, 0]

    return loss


def liger_vocab_parallel() -> Callable[..., torch.Tensor]:
    from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction

    def loss(logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        per_token: torch.Tensor = LigerVocabParallelCEFunction.apply(
            logits[:, None], target[:, None], group, -100, 0.0, "pytorch", "global"
        )
        return per_token[:, 0]

    return loss


def flash_attn_vocab_parallel() -> Callable[..., torch.Tensor]:
    """Statistics saved, gradient recomputed, written over the logits."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    def loss(logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        alone = group.size() == 1
        per_token: torch.Tensor = cross_entropy_loss(
            logits, target, inplace_backward=True, process_group=None if alone else group
        )[0]
        return per_token

    return loss


def liger_cross_entropy() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Mean loss over the whole vocabulary; forward writes the gradient over the logits."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = LigerCrossEntropyFunction.apply(
            logits, target, None, -100, 0.0, 0.0, "mean", None, False, False, False
        )[0]
        return mean

    return loss


# Mean losses from (hidden [tokens, hidden], weight [vocab, hidden], target): the logits are theirs to make.
LinearLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def liger_linear_cross_entropy() -> LinearLoss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]
        return mean

    return loss


def cut_linear_cross_entropy() -> LinearLoss:
    """Without its filter, which drops the gradient of improbable ids: with random weights that is nearly all of it."""
    from cut_cross_entropy import linear_cross_entropy

    def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = linear_cross_entropy(hidden, weight, target, filter_eps=None)
        return mean

    return loss


def torch_chunked_linear_cross_entropy() -> LinearLoss:
    """`F.linear_cross_entropy` with its default chunking; without `options` it is the plain version itself."""
    linear_cross_entropy: Any = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if linear_cross_entropy is None or options is None:
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")

    def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = linear_cross_entropy(hidden, weight, target, options=options())
        return mean

    return loss


# Experts from (x [T, H], gate and up [E, 2 I, H], down [E, H, I], indices int32 [T, K], weights [T, K]).


def liger_experts() -> Callable[..., torch.Tensor]:
    """Synchronises with the host once in forward, for the number of tiles."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    experts: Callable[..., torch.Tensor] = LigerFusedMoEFunction.apply
    return experts


# Collectives.


def deepspeed_all_reduce(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its shared-memory all_reduce, in place, compiled on first use. Its segments stay in /dev/shm when it ends."""
    from deepspeed.comm.torch import build_shm_op

    module = build_shm_op()
    if module is None:
        raise ImportError("deepspeed cannot build its shared-memory operator")
    # The name of its segments, which two lanes must not share; without LOCAL_SIZE it reduces nothing.
    name = torch.tensor([os.getpid()])
    dist.broadcast(name, 0, group=group)
    variables = {"LOCAL_SIZE": str(group.size()), "MASTER_ADDR": "fastpar_bench", "MASTER_PORT": str(int(name))}
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    module.initialize(group.size(), group.rank())
    for key, value in before.items():
        if value is None:
            del os.environ[key]
        else:
            os.environ[key] = value

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        torch.ops.deepspeed.inference_all_reduce_(x)
        return x

    return all_reduce
