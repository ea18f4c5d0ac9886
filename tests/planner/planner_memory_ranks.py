"""A small Llama on the ranks of a pipeline with ZeRO: bytes of its tensors, beside what is predicted of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import transformers

import fastpar as fp
from fastpar.layouts import Layout
from fastpar.planner import Workload, find_machine, find_model
from fastpar.planner.refine import refine
from fastpar.planner.workload import BytesPerParameter
from tests.live_tensors import PeakBytes

SIZES = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
BATCH, SEQ = 8, 64


def measure_pipelines(words: Sequence[str]) -> list[tuple[int, int, int]]:
    return [_measure_layout(Layout.parse(each)) for each in words]


def _measure_layout(layout: Layout) -> tuple[int, int, int]:
    """Bytes at the peak of the second step; of its gradients, parameters and states between backward and the update,
    and what `expected_memory` says of these."""
    with PeakBytes() as meter:
        torch.manual_seed(0)  # every rank builds the same model
        config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
        mesh = fp.init_mesh(pp=layout.pp, dp_shard=layout.dp_shard)

        def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return fp.ops.vocab_parallel_cross_entropy(
                logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), group=mesh["tp"], inplace_backward=True
            )

        how = layout.pipeline
        pipe = fp.parallelize_pipeline(
            transformers.LlamaForCausalLM(config), mesh, how.schedule, num_microbatches=how.microbatches, loss=loss_of
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
        zero = fp.zero.shard(pipe, optimizer, group=mesh, stage=layout.zero.stage, overlap=False)
        meter.add(pipe.parameters())
        for step in range(2):
            generator = torch.Generator().manual_seed(2 * step + mesh.rank("dp"))
            ids = torch.randint(0, SIZES["vocab_size"], (BATCH // layout.dp, SEQ), generator=generator)
            if step == 1:
                meter.start()
            pipe.step(ids, target=ids)
            zero.reduce_gradients()
            between = meter.now()
            optimizer.step()
            optimizer.zero_grad()
    mesh.close()
    return meter.peak, between, sum(zero.expected_memory().values())


def predicted_bytes(words: str) -> list[float]:
    """Of each pipeline rank."""
    kept, machine = BytesPerParameter.of("fp32"), dataclasses.replace(find_machine("cpu"), gpus=4, per_node=4)
    work = Workload(find_model(SIZES), BATCH, SEQ, "fp32", kept, fused_kernels=False, copies_gradients=True)
    told = refine(machine, work, Layout.parse(words), float("inf"), as_given=True)
    assert told is not None
    return [sum(rank.values()) for rank in told.ranks]
