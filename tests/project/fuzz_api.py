"""Good calls of what is public beside fastpar.ops, by name, for `tests/project/fuzz_calls.py` to make bad.

Everything is of one rank here; tests/fuzz_ranks.py has what two ranks do.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastpar as fp
from fastpar import comm, expert, ops, optim, pipeline, precision, recompute, storage, tensor, zero
from fastpar.comm.symmetric import buffer as symmetric
from fastpar.context import layout
from fastpar.parallel.plan import match_plan, parse_style
from fastpar.pipeline import ActionType
from fastpar.recompute.plan import Keep
from fastpar.tensor import binding  # noqa: F401

Case = tuple[Callable[..., Any], dict[str, Any]]
FOLDER = Path(tempfile.mkdtemp(prefix="fastpar-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def floats(*shape: int) -> Tensor:
    return torch.linspace(-2.0, 3.0, max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].view(shape)


def linears(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))


def gated() -> nn.Module:
    return nn.Sequential(nn.RMSNorm(4, eps=1e-5))


@functools.cache
def saved_folder() -> Path:
    fp.save_pretrained(linears(), FOLDER / "model")
    return FOLDER / "model"


@functools.cache
def alone() -> comm.Communicator:
    return comm.Communicator(None)


@functools.cache
def mesh() -> fp.Mesh:
    return fp.init_mesh(device="cpu")


def shape() -> fp.layouts.ModelShape:
    return fp.layouts.ModelShape("m", layers=2, hidden=64, ffn=128, vocab=100, heads=4)


@functools.cache
def schedule() -> pipeline.Schedule:
    return pipeline.one_f_one_b(2, 3)


def one_stage() -> pipeline.Pipeline:
    return pipeline.Pipeline([nn.Linear(3, 3)], pipeline.gpipe(1, 2), None, loss=nn.functional.mse_loss)


def with_grads(count: int = 2) -> list[nn.Parameter]:
    found = [nn.Parameter(floats(3)) for _ in range(count)]
    for parameter in found:
        parameter.grad = floats(3)
    return found


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(with_grads(), lr=0.1)


def sharded(stage: int = 1) -> zero.Zero:
    model = linears()
    return zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)


def store() -> storage.TensorStore:
    made = storage.TensorStore(FOLDER)
    made.write("a", floats(3)).wait()
    return made


@functools.cache
def kept_store() -> storage.TensorStore:
    return store()


def router() -> expert.Router:
    return expert.Router(3, 4, ops.RouteRule(top_k=2))


def layer() -> expert.MoELayer:
    return expert.MoELayer(router(), expert.Experts(3, 4, 4))


def region() -> tensor.SequenceRegion:
    return tensor.SequenceRegion(alone(), 1)


def scores() -> dict[str, Any]:
    return {"scores": floats(4, 3).softmax(1), "indices": torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]])}


def costs() -> list[recompute.LayerCost]:
    return [recompute.LayerCost(1.0, 2.0, 4, 8)] * 3


@functools.wraps(fp.assemble)
def assemble(*args: Any, **options: Any) -> None:
    fp.assemble(*args, **options).close()


@functools.cache
def trained() -> Any:
    return fp.assemble(linears(), "one rank", functools.partial(torch.optim.SGD, lr=0.1))


@functools.wraps(zero.shard)
def shard_and_detach(*args: Any, **options: Any) -> None:
    zero.shard(*args, **options).detach()


def measure(layers: Any, x: Any, repeats: Any) -> None:
    recompute.measure_layers(layers, x, repeats=repeats)


def step_once(x: Any, target: Any) -> None:
    one_stage().step(x, target=target)


# ---- by part ---------------------------------------------------------------------------------------------------------


COMM: dict[str, Callable[[], Case]] = {
    "Communicator": lambda: (comm.Communicator, {"group": None}),
    "Communicator.of": lambda: (comm.Communicator.of, {"group": None}),
    "world": lambda: (comm.world, {}),
    **{
        f"Communicator.{name}": functools.partial(lambda name: (getattr(alone(), name), {"x": floats(2, 3)}), name)
        for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "scatter")
    },
    "Communicator.gather": lambda: (alone().gather, {"x": floats(2, 3)}),
    "Communicator.share_sizes": lambda: (alone().share_sizes, {"rows": 3}),
    "Communicator.exchange_sizes": lambda: (alone().exchange_sizes, {"input_sizes": [3]}),
    "Communicator.all_to_all_sizes": lambda: (
        alone().all_to_all_sizes,
        {"x": floats(2, 3), "split_dim": 0, "concat_dim": 1},
    ),
    "Pending.wait": lambda: (alone().all_reduce_async(floats(3)).wait, {}),
    "Pending.then": lambda: (alone().all_reduce_async(floats(3)).then, {"step": lambda x: x}),
    "BlockWire": lambda: (comm.BlockWire, {}),
    "BlockWire.all_reduce": lambda: (comm.BlockWire().all_reduce, {"comm": alone(), "x": floats(4)}),
    "BlockWire.reduce_scatter": lambda: (comm.BlockWire().reduce_scatter, {"comm": alone(), "x": floats(4)}),
    "CastWire": lambda: (comm.CastWire, {"dtype": torch.bfloat16}),
    "CastWire.all_reduce": lambda: (comm.CastWire(torch.bfloat16).all_reduce, {"comm": alone(), "x": floats(4)}),
    "CastWire.reduce_scatter": lambda: (
        comm.CastWire(torch.bfloat16).reduce_scatter,
        {"comm": alone(), "x": floats(4)},
    ),
    "PlainWire.all_reduce": lambda: (comm.PlainWire().all_reduce, {"comm": alone(), "x": floats(4)}),
    "PlainWire.reduce_scatter": lambda: (comm.PlainWire().reduce_scatter, {"comm": alone(), "x": floats(4)}),
    "PointToPoint": lambda: (comm.PointToPoint, {"group": None}),
    "PointToPoint.abort": lambda: (comm.PointToPoint(None).abort, {"reason": "why"}),
    "SymmetricBuffer.create": lambda: (comm.SymmetricBuffer.create, {"comm": None, "nbytes": 256}),
    "SymmetricBuffer.tensor": lambda: (
        comm.SymmetricBuffer.create(None, 256, signal_words=64).tensor,
        {"shape": (2, 3), "dtype": torch.float32},
    ),
    "SymmetricBuffer.signal_pad": lambda: (comm.SymmetricBuffer.create(None, 256, signal_words=64).signal_pad, {}),
    "virtual_ranks": lambda: (symmetric.virtual_ranks, {"size": 2, "nbytes": 256}),
    "Calibration": lambda: (comm.Calibration, {"ratios": {}}),
    "calibrate": lambda: (comm.calibrate, {"group": None}),
    "all_reduce_coalesced": lambda: (comm.all_reduce_coalesced, {"tensors": [floats(3)], "comm": None}),
    "all_to_all": lambda: (comm.all_to_all, {"x": floats(2, 3), "comm": None}),
    "copy_to": lambda: (comm.copy_to, {"x": floats(2, 3), "comm": None}),
    "reduce_from": lambda: (comm.reduce_from, {"x": floats(2, 3), "comm": None}),
    "gather_from": lambda: (comm.gather_from, {"x": floats(2, 3), "comm": None}),
    "scatter_to": lambda: (comm.scatter_to, {"x": floats(2, 3), "comm": None}),
    "gather_sequence": lambda: (comm.gather_sequence, {"x": floats(2, 3), "comm": None, "dim": 0}),
    "reduce_scatter_sequence": lambda: (comm.reduce_scatter_sequence, {"x": floats(2, 3), "comm": None, "dim": 0}),
    "shard_sizes": lambda: (comm.shard_sizes, {"total": 5, "parts": 2}),
    "shard_range": lambda: (comm.shard_range, {"total": 5, "parts": 2, "rank": 1}),
    "CommTrace.to_chrome_trace": lambda: (comm.CommTrace().to_chrome_trace, {"path": FOLDER / "trace.json"}),
    "CommTrace.waited": lambda: (comm.CommTrace().waited, {}),
}

MODELS: dict[str, Callable[[], Case]] = {
    "init_mesh": lambda: (fp.init_mesh, {"device": "cpu"}),
    "Mesh.size": lambda: (mesh().size, {"name": "tp"}),
    "Mesh.rank": lambda: (mesh().rank, {"name": "tp"}),
    "Mesh.group": lambda: (mesh().group, {"name": "tp"}),
    "Context": lambda: (fp.Context, {"method": "ring", "layout": "zigzag", "block": 4}),
    "AttentionMask": lambda: (fp.AttentionMask, {"causal": True, "window": (1, 0), "documents": ((2, 1),)}),
    "AttentionMask.visible_keys": lambda: (fp.AttentionMask(causal=True).visible_keys, {"num_tokens": 5}),
    "TokenRange": lambda: (ops.TokenRange, {"start": 0, "stop": 5, "step": 2}),
    "AttentionDropout": lambda: (ops.AttentionDropout, {"p": 0.5, "seed": 3}),
    "zigzag": lambda: (layout.zigzag, {"num_tokens": 9, "size": 2}),
    "dealt": lambda: (layout.dealt, {"num_tokens": 9, "size": 2, "mask": fp.AttentionMask(), "block": 2}),
    "ContextRegion": lambda: (fp.context.ContextRegion, {"group": alone(), "options": fp.Context()}),
    "ContextAttention": lambda: (fp.context.ContextAttention, {"region": fp.context.ContextRegion(alone())}),
    "AttentionStyle": lambda: (fp.parallel.AttentionStyle, {"causal": True, "window": (3, 0), "chunk": 8}),
    "ColwiseStyle": lambda: (fp.parallel.ColwiseStyle, {"sections": 2}),
    "parse_style": lambda: (parse_style, {"pattern": "0", "style": "colwise"}),
    "match_plan": lambda: (match_plan, {"model": linears(), "plan": {"0": "colwise"}}),
    "parallelize": lambda: (fp.parallelize, {"model": linears(), "mesh": mesh(), "plan": {"0": "colwise"}}),
    "apply_kernels": lambda: (fp.apply_kernels, {"model": gated()}),
    "remove_kernels": lambda: (fp.remove_kernels, {"model": fp.apply_kernels(gated())}),
    "load_pretrained": lambda: (fp.load_pretrained, {"model": linears, "folder": saved_folder()}),
    "save_pretrained": lambda: (fp.save_pretrained, {"model": linears(), "folder": FOLDER / "saved"}),
    "unparallelize": lambda: (
        fp.unparallelize,
        {"model": fp.parallelize(linears(), mesh(), {"0": "colwise", "1": "rowwise"})},
    ),
    "explain": lambda: (fp.explain, {"model": fp.parallelize(linears(), mesh(), {"0": "colwise", "1": "rowwise"})}),
    "parallelize_pipeline": lambda: (
        fp.parallelize_pipeline,
        {
            "model": [nn.Linear(3, 3)],
            "mesh": mesh(),
            "num_microbatches": 2,
            "plan": None,
            "loss": nn.functional.mse_loss,
        },
    ),
    "VerifyLayout": lambda: (fp.VerifyLayout, {"mesh": mesh()}),
    "verify": lambda: (
        fp.verify,
        {
            "build": linears,
            "layout": fp.VerifyLayout(mesh(), plan={"0": "colwise", "1": "rowwise"}),
            "batch": floats(2, 3),
            "loss": lambda out, target: out.square().mean(),
        },
    ),
    "ColumnParallelLinear": lambda: (tensor.ColumnParallelLinear, {"in_features": 3, "out_features": 4}),
    "ColumnParallelLinear.from_linear": lambda: (tensor.ColumnParallelLinear.from_linear, {"linear": nn.Linear(3, 4)}),
    "ColumnParallelLinear.forward": lambda: (tensor.ColumnParallelLinear(3, 4).forward, {"x": floats(2, 3)}),
    "RowParallelLinear": lambda: (tensor.RowParallelLinear, {"in_features": 3, "out_features": 4}),
    "RowParallelLinear.from_linear": lambda: (tensor.RowParallelLinear.from_linear, {"linear": nn.Linear(3, 4)}),
    "RowParallelLinear.forward": lambda: (tensor.RowParallelLinear(3, 4).forward, {"x": floats(2, 3)}),
    "VocabParallelEmbedding": lambda: (tensor.VocabParallelEmbedding, {"num_embeddings": 6, "embedding_dim": 4}),
    "VocabParallelEmbedding.from_embedding": lambda: (
        tensor.VocabParallelEmbedding.from_embedding,
        {"embedding": nn.Embedding(6, 4)},
    ),
    "VocabParallelEmbedding.forward": lambda: (
        tensor.VocabParallelEmbedding(6, 4).forward,
        {"ids": torch.arange(3)},
    ),
    "VocabParallelHead": lambda: (tensor.VocabParallelHead, {"in_features": 3, "out_features": 6}),
    "VocabParallelHead.loss": lambda: (
        tensor.VocabParallelHead(3, 6).loss,
        {"hidden": floats(2, 3), "labels": torch.arange(2)},
    ),
    "LayoutDropout": lambda: (tensor.LayoutDropout, {}),
    "LayoutDropout.forward": lambda: (tensor.LayoutDropout(0.5).forward, {"x": floats(2, 3)}),
    "SequenceRegion": lambda: (tensor.SequenceRegion, {"comm": alone()}),
    "SequenceRegion.enter": lambda: (region().enter, {"x": floats(2, 3, 4)}),
    "SequenceRegion.set_total": lambda: (region().set_total, {"total": 3}),
    "RowMap.chunk": lambda: (tensor.RowMap.chunk, {"total": 5, "parts": 2}),
    "RowMap.packed": lambda: (tensor.RowMap.packed, {"sections": [4, 2], "parts": 2}),
    "RowMap.concat": lambda: (tensor.RowMap.concat, {"maps": [tensor.RowMap.chunk(4, 2)]}),
    "RowMap.take": lambda: (tensor.RowMap.chunk(4, 2).take, {"full": floats(4), "dim": 0, "rank": 1}),
    "RowMap.size": lambda: (tensor.RowMap.chunk(4, 2).size, {"rank": 1}),
    "adopt": lambda: (tensor.adopt, {"module": nn.Linear(3, 4), "cls": tensor.ColumnParallelLinear, "group": None}),
    "replicate": lambda: (tensor.replicate, {"module": nn.LayerNorm(3)}),
    "full_parameter": lambda: (tensor.full_parameter, {"param": nn.Parameter(floats(3))}),
    "layout_of": lambda: (tensor.layout_of, {"param": nn.Parameter(floats(3))}),
    "local_tensor": lambda: (tensor.local_tensor, {"x": floats(3)}),
    "gather_vocab": lambda: (tensor.gather_vocab, {"logits": floats(2, 6), "vocab_size": 6, "group": None}),
    "causal_lm_loss": lambda: (
        tensor.causal_lm_loss,
        {"logits": floats(1, 3, 6), "labels": torch.tensor([[0, 1, 2]]), "head": tensor.VocabParallelHead(3, 6)},
    ),
    "masked_lm_loss": lambda: (
        tensor.masked_lm_loss,
        {"logits": floats(1, 3, 6), "labels": torch.tensor([[0, 1, 2]]), "head": tensor.VocabParallelHead(3, 6)},
    ),
}

TRAINING: dict[str, Callable[[], Case]] = {
    "SGD": lambda: (optim.SGD, {"params": with_grads()}),
    "AdamW": lambda: (optim.AdamW, {"params": with_grads()}),
    "Lion": lambda: (optim.Lion, {"params": with_grads()}),
    "Muon": lambda: (optim.Muon, {"params": [nn.Parameter(floats(3, 4))]}),
    "AdamW.step": lambda: (optim.AdamW(with_grads()).step, {}),
    "Muon.step": lambda: (optim.Muon([nn.Parameter(floats(3, 4))]).step, {}),
    "Muon.add_param_group": lambda: (
        optim.Muon([nn.Parameter(floats(3, 4))]).add_param_group,
        {"param_group": {"params": [nn.Parameter(floats(3, 4))]}},
    ),
    "clip_grad_norm_": lambda: (fp.clip_grad_norm_, {"params_or_optimizer": with_grads(), "max_norm": 1.0}),
    "grad_norm": lambda: (fp.grad_norm, {"params": with_grads()}),
    "GradSum": lambda: (fp.GradSum, {}),
    "GradSum.of": lambda: (fp.GradSum.of, {"params": with_grads()}),
    "GradSum.add": lambda: (fp.GradSum().add, {"tensors": [floats(3)]}),
    "GradSum.norm": lambda: (fp.GradSum().norm, {}),
    "GradSum.clip_factor": lambda: (fp.GradSum().clip_factor, {"max_norm": 1.0}),
    "Precision": lambda: (precision.Precision, {"param": torch.bfloat16}),
    "Precision.of": lambda: (precision.Precision.of, {"value": "bf16"}),
    "Precision.bf16": lambda: (precision.Precision.bf16, {"full": ("a",)}),
    "Precision.fp16": lambda: (precision.Precision.fp16, {"full": ("a",)}),
    "Precision.is_full": lambda: (precision.Precision.bf16(("a",)).is_full, {"name": "a"}),
    "Precision.param_dtype": lambda: (precision.Precision.bf16().param_dtype, {"name": "a", "own": torch.float32}),
    "Precision.check_names": lambda: (precision.Precision.bf16(("a",)).check_names, {"names": ["a"]}),
    "Precision.autocast": lambda: (precision.Precision(compute=torch.bfloat16).autocast, {"device_type": "cpu"}),
    "LossScaler": lambda: (precision.LossScaler, {}),
    "LossScaler.scale": lambda: (precision.LossScaler().scale, {"outputs": floats()}),
    "LossScaler.unscale_": lambda: (precision.LossScaler().unscale_, {"optimizer": sgd()}),
    "LossScaler.step": lambda: (precision.LossScaler().step, {"optimizer": sgd()}),
    "LossScaler.update": lambda: (precision.LossScaler().update, {"new_scale": 2.0}),
    "LossScaler.load_state_dict": lambda: (
        precision.LossScaler().load_state_dict,
        {"state_dict": precision.LossScaler().state_dict()},
    ),
    "apply_recompute": lambda: (recompute.apply_recompute, {"model": linears()}),
    "remove_recompute": lambda: (recompute.remove_recompute, {"model": recompute.apply_recompute(linears())}),
    "checkpoint": lambda: (recompute.checkpoint, {"function": nn.Linear(3, 3), "input": floats(2, 3)}),
    "Segments": lambda: (recompute.Segments, {"count": 2}),
    "Segments.plan": lambda: (recompute.Segments(2).plan, {"num_layers": 4}),
    "Binomial": lambda: (recompute.Binomial, {"slots": 2}),
    "Binomial.plan": lambda: (recompute.Binomial(2).plan, {"num_layers": 4}),
    "Budget": lambda: (recompute.Budget, {"bytes": 100, "costs": tuple(costs())}),
    "Selective": lambda: (recompute.Selective, {}),
    "LayerCost": lambda: (recompute.LayerCost, {"forward": 1.0, "backward": 2.0, "output": 4, "saved": 8}),
    "RecomputePlan": lambda: (recompute.RecomputePlan, {"num_layers": 1, "steps": (Keep(0),)}),
    "RecomputePlan.step_of": lambda: (recompute.RecomputePlan(1, (Keep(0),)).step_of, {"layer": 0}),
    "RecomputePlan.time": lambda: (recompute.RecomputePlan(1, (Keep(0),)).time, {"costs": costs()[:1]}),
    "RecomputePlan.peak_bytes": lambda: (recompute.RecomputePlan(1, (Keep(0),)).peak_bytes, {"costs": costs()[:1]}),
    "least_memory_plan": lambda: (recompute.least_memory_plan, {"costs": costs()}),
    "optimal_plan": lambda: (recompute.optimal_plan, {"costs": costs(), "budget": 100}),
    "measure_layers": lambda: (measure, {"layers": linears(), "x": floats(2, 3), "repeats": 1}),
    "TensorStore": lambda: (storage.TensorStore, {"path": FOLDER}),
    "TensorStore.write": lambda: (kept_store().write, {"name": "b", "tensor": floats(3)}),
    "TensorStore.read": lambda: (kept_store().read, {"name": "a"}),
    "TensorStore.delete": lambda: (store().delete, {"name": "a"}),
    "TensorStore.discard": lambda: (kept_store().discard, {"name": "x"}),
    "TensorStore.spec": lambda: (kept_store().spec, {"name": "a"}),
    "TensorStore.empty": lambda: (kept_store().empty, {"shape": (2, 3), "dtype": torch.float32}),
    "TensorStore.buffers": lambda: (store().buffers, {"count": 2, "num_bytes": 100}),
    "TensorStore.keep": lambda: (store().keep, {"path": Path(tempfile.mkdtemp(dir=FOLDER)) / "kept"}),
    "Transfer.wait": lambda: (kept_store().read("a").wait, {}),
    "stream": lambda: (storage.stream, {"store": kept_store(), "items": ["a"], "work": lambda i, read: None}),
    "shard": lambda: (
        shard_and_detach,
        {"model": (model := linears()), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)},
    ),
    "Zero.load_state_dict": lambda: ((made := sharded()).load_state_dict, {"loaded": made.state_dict()}),
    "Zero.expected_memory": lambda: (sharded().expected_memory, {"state_bytes": 8.0}),
    "Offload": lambda: (zero.Offload, {}),
    "Offload.of": lambda: (zero.Offload.of, {"value": "cpu"}),
    "offload_activations": lambda: (zero.offload_activations, {}),
    "full_optimizer_state": lambda: (zero.full_optimizer_state, {"zero": sharded()}),
    "load_full_optimizer_state": lambda: (
        zero.load_full_optimizer_state,
        {"zero": (made := sharded()), "states": zero.full_optimizer_state(made)},
    ),
    "Experts": lambda: (expert.Experts, {"hidden": 3, "inner": 4, "num_experts": 2}),
    "Experts.place": lambda: (expert.Experts(3, 4, 2, replicas=1).place, {"placement": None}),
    "Experts.forward": lambda: (
        expert.Experts(3, 4, 3).forward,
        {"x": floats(4, 3), "indices": scores()["indices"], "weights": torch.full((4, 2), 0.5)},
    ),
    "Router": lambda: (expert.Router, {"hidden": 3, "num_experts": 4, "rule": ops.RouteRule(top_k=2)}),
    "Router.forward": lambda: (router().forward, {"x": floats(4, 3)}),
    "MoELayer": lambda: (expert.MoELayer, {"router": router(), "experts": expert.Experts(3, 4, 4)}),
    "MoELayer.from_preset": lambda: (
        expert.MoELayer.from_preset,
        {"preset": "mixtral", "hidden": 3, "inner": 4, "num_experts": 4},
    ),
    "MoELayer.forward": lambda: (layer().forward, {"x": floats(4, 3)}),
    "SharedExpert": lambda: (expert.SharedExpert, {"hidden": 3, "inner": 4}),
    "SharedExpert.forward": lambda: (expert.SharedExpert(3, 4).forward, {"x": floats(2, 3)}),
    "BiasRule": lambda: (expert.BiasRule, {"rate": 0.1}),
    "Capacity": lambda: (expert.Capacity, {"factor": 1.5}),
    "LossRule": lambda: (expert.LossRule, {"balance": "switch", "coeff": 0.1}),
    "Placement": lambda: (expert.Placement, {"ep": 1, "shares": (((0, 1.0),), ((0, 1.0),))}),
    "Placement.even": lambda: (expert.Placement.even, {"num_experts": 4, "copies": [[2], [0]]}),
    "TokenCounts.of": lambda: (expert.TokenCounts.of, {"indices": scores()["indices"], "num_experts": 3}),
    "attach_loss": lambda: (expert.attach_loss, {"x": floats(2, 3), "loss": floats()}),
    "aux_loss": lambda: (expert.aux_loss, scores()),
    "global_batch_aux_loss": lambda: (expert.global_batch_aux_loss, scores()),
    "sequence_aux_loss": lambda: (
        expert.sequence_aux_loss,
        {**scores(), "sequences": torch.tensor([0, 0, 1, 1]), "num_sequences": 2},
    ),
    "z_loss": lambda: (expert.z_loss, {"logits": floats(4, 3)}),
    "load_balance": lambda: (expert.load_balance, {"counts": torch.tensor([1, 2, 3])}),
    "plan_placement": lambda: (expert.plan_placement, {"loads": [1.0, 2.0, 3.0, 4.0], "ep": 2, "replicas": 1}),
    "preset": lambda: (expert.preset, {"name": "mixtral"}),
    "rebalance": lambda: (expert.rebalance, {"model": layer()}),
    "collected_losses": lambda: (expert.collected_losses, {"model": layer()}),
    "expert_loads": lambda: (expert.expert_loads, {"model": layer()}),
    "set_loss_scale": lambda: (expert.set_loss_scale, {"model": layer(), "scale": 1.0}),
    "update_biases": lambda: (expert.update_biases, {"model": layer()}),
    "update_biases_with": lambda: (expert.update_biases_with, {"optimizer": sgd(), "model": layer()}),
    "record_routes": lambda: (expert.record_routes, {"model": layer()}),
    "replay_routes": lambda: (expert.replay_routes, {"model": layer(), "routes": {}}),
    "balance_routes": lambda: (expert.balance_routes, {"model": layer()}),
}

SCHEDULES = (
    *("naive", "gpipe", "one_f_one_b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zbv"),
    *("v_half", "v_min", "dualpipe", "dualpipev", "pipedream", "pipedream_2bw"),
)


def generator(name: str) -> Case:
    return getattr(pipeline, name), {"num_ranks": 2, "num_microbatches": 4}


PIPELINES: dict[str, Callable[[], Case]] = {
    **{name: functools.partial(generator, name) for name in SCHEDULES},
    "make_schedule": lambda: (pipeline.make_schedule, {"name": "1f1b", "num_ranks": 2, "num_microbatches": 3}),
    "find_schedule": lambda: (
        pipeline.find_schedule,
        {"num_ranks": 2, "num_microbatches": 2, "evaluations": 5, "time_limit": 0.2, "exact": False},
    ),
    "Action": lambda: (pipeline.Action, {"type": ActionType.FORWARD, "stage": 0, "microbatch": 0}),
    "Action.parse": lambda: (pipeline.Action.parse, {"text": "0F0"}),
    "Chain": lambda: (pipeline.Chain, {"stages": (0, 1), "microbatches": (0,)}),
    "Schedule": lambda: (
        pipeline.Schedule,
        {name: getattr(schedule(), name) for name in ("name", "stage_ranks", "chains", "actions")},
    ),
    "Schedule.of_one_chain": lambda: (
        pipeline.Schedule.of_one_chain,
        {"name": "a", "stage_ranks": [0, 1], "num_microbatches": 3, "actions": schedule().actions},
    ),
    "Schedule.part_of": lambda: (schedule().part_of, {"stage": 0}),
    "Schedule.stages_of": lambda: (schedule().stages_of, {"rank": 0}),
    "Schedule.to_csv": lambda: (schedule().to_csv, {}),
    "Schedule.from_csv": lambda: (pipeline.Schedule.from_csv, {"source": schedule().to_csv()}),
    "Costs": lambda: (pipeline.Costs, {}),
    "Costs.of": lambda: (pipeline.Costs().of, {"kind": ActionType.FORWARD, "part": 0}),
    "simulate": lambda: (pipeline.simulate, {"schedule": schedule()}),
    "activation_peaks": lambda: (pipeline.activation_peaks, {"schedule": schedule()}),
    "add_communication": lambda: (pipeline.add_communication, {"schedule": schedule()}),
    "add_reduce_grad": lambda: (pipeline.add_reduce_grad, {"schedule": schedule()}),
    "add_unshard": lambda: (pipeline.add_unshard, {"schedule": schedule()}),
    "split_backward": lambda: (pipeline.split_backward, {"schedule": schedule()}),
    "merge_backward": lambda: (pipeline.merge_backward, {"schedule": schedule()}),
    "shard_head": lambda: (pipeline.shard_head, {"schedule": pipeline.zb_h1(2, 4)}),
    "check": lambda: (pipeline.check, {"schedule": schedule()}),
    "validate": lambda: (pipeline.validate, {"schedule": schedule()}),
    "Evaluator": lambda: (pipeline.Evaluator, {"schedule": schedule()}),
    "compare": lambda: (
        pipeline.compare,
        {"predicted": pipeline.simulate(schedule()).timeline, "measured": pipeline.simulate(schedule()).timeline},
    ),
    "measured_costs": lambda: (
        pipeline.measured_costs,
        {"schedule": schedule(), "timeline": pipeline.simulate(schedule()).timeline},
    ),
    "Timeline": lambda: (pipeline.Timeline, {"events": pipeline.simulate(schedule()).timeline.events}),
    "Timeline.busy": lambda: (pipeline.simulate(schedule()).timeline.busy, {"rank": 0}),
    "Timeline.shifted": lambda: (pipeline.simulate(schedule()).timeline.shifted, {"offset": 1}),
    "Timeline.to_text": lambda: (pipeline.simulate(schedule()).timeline.to_text, {"width": 40}),
    "Architecture": lambda: (pipeline.Architecture, {"layers": "layers"}),
    "CrossEntropy": lambda: (pipeline.CrossEntropy, {"ignore_index": -100}),
    "partition": lambda: (pipeline.partition, {"model": [nn.Linear(3, 3), nn.Linear(3, 3)], "num_parts": 2}),
    "Partition.of_modules": lambda: (pipeline.Partition.of_modules, {"parts": [nn.Linear(3, 3), nn.Linear(3, 3)]}),
    "Pipeline": lambda: (pipeline.Pipeline, {"stages": [nn.Linear(3, 3)], "schedule": pipeline.gpipe(1, 2)}),
    "Pipeline.step": lambda: (step_once, {"x": floats(2, 3), "target": floats(2, 3)}),
    "Pipeline.load_state_dict": lambda: (
        (made := one_stage()).load_state_dict,
        {"state_dict": made.state_dict()},
    ),
    "Pipeline.train": lambda: (one_stage().train, {"mode": True}),
    "Stage.of_module": lambda: (pipeline.Stage.of_module, {"module": nn.Linear(3, 3), "part": 0, "num_parts": 1}),
    "ShardedHead": lambda: (pipeline.ShardedHead, {"whole": nn.Linear(3, 6), "rank": 0, "num_ranks": 1}),
}

# Functions of the user's own, what these get, and how long to go on: their errors are the user's.
PLANS: dict[str, Callable[[], Case]] = {
    "Layout": lambda: (fp.Layout, {"pp": 2, "tp": 2, "recompute": "full", "accumulate": 1}),
    "ZeroOptions": lambda: (fp.layouts.ZeroOptions, {"stage": 1, "offload": "cpu"}),
    "PipelineOptions": lambda: (fp.layouts.PipelineOptions, {"schedule": "1f1b", "microbatches": 2, "cut": (1, 2)}),
    "Layout.parse": lambda: (fp.Layout.parse, {"text": "pp2 tp2 mb4"}),
    "Layout.from_json": lambda: (fp.Layout.from_json, {"data": {"pp": 2}}),
    "Layout.check": lambda: (fp.Layout(dp_shard=2).check, {"model": shape(), "world_size": 2, "batch": 4}),
    "ModelShape": lambda: (
        fp.layouts.ModelShape,
        {"name": "m", "layers": 2, "hidden": 64, "ffn": 128, "vocab": 100, "heads": 4, "kv_heads": 2},
    ),
    "plan": lambda: (fp.plan, {"model": shape(), "machine": "a100x2", "batch": 4, "seq": 64, "memory": "40GB"}),
    "assemble": lambda: (
        assemble,
        {"model": linears(), "layout": "one rank", "optimizer": torch.optim.SGD, "max_norm": 1.0},
    ),
    "model_flops": lambda: (fp.assembly.model_flops, {"shape": shape(), "batch": 2, "seq": 4}),
    "Assembled.samples": lambda: (trained().samples, {"step": 1, "batch": 4}),
    "Assembled.load_state": lambda: (trained().load_state, {"state": trained().state()}),
    "label_shift": lambda: (fp.parallel.label_shift, {"model": linears()}),
    "routers_of": lambda: (expert.routers_of, {"model": linears()}),
    "pipedream": lambda: (
        fp.planner.pipedream,
        {"layers": [fp.planner.LayerProfile(1.0, 2.0, 3.0)], "num_machines": 2, "bandwidth": 1e9},
    ),
}


USERS_OWN: dict[str, tuple[str, ...]] = {
    "assemble": ("optimizer", "loss", "scheduler"),
    "verify": ("build", "batch", "target", "loss", "optimizer", "steps"),
    "find_schedule": ("evaluations", "time_limit", "num_microbatches"),
    "parallelize_pipeline": ("loss", "optimizer"),
    "checkpoint": ("function", "args", "captures"),
    "measure_layers": ("x", "repeats"),
    "stream": ("work", "written"),
    "replicate": ("make",),
    "AdamW.step": ("closure",),
    "Muon.step": ("closure",),
    "Experts.forward": ("add",),
    "Pipeline.step": ("x", "target"),
}
# What else an argument is called: by the op that gets it, or by the functions that take the same.
ALSO: dict[str, tuple[str, ...]] = {
    "Precision.of": ("precision",),
    "Offload.of": ("offload",),
    "VocabParallelHead.loss": ("target",),
    "causal_lm_loss": ("target", "denominator"),
    "masked_lm_loss": ("target", "denominator"),
    "MoELayer.from_preset": ("Router",),
    "gather_vocab": ("x",),
    "ShardedHead": ("parts",),
    "ColumnParallelLinear.from_linear": ("Linear",),
    "RowParallelLinear.from_linear": ("Linear",),
    "stream": ("item",),
    "LossScaler.update": ("update",),
}
PARTS = {"comm": COMM, "models": MODELS, "training": TRAINING, "pipelines": PIPELINES, "plans": PLANS}
