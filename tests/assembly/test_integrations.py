"""torch's parallelize_module and Hugging Face's registries accept fastpar's styles."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fastpar as fp
from fastpar.integrations import huggingface
from fastpar.integrations.torch_parallel import ColwiseParallel, ReplicateParallel, RowwiseParallel
from fastpar.tensor import ColumnParallelLinear, full_parameter
from tests.dist import run_ranks
from tests.models import VOCAB, build_model, logits_of, norms_in_their_own_dtype


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down, self.out = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        return self.out(x + self.down(torch.relu(self.up(x))))


def _parallelize_module_matches() -> None:
    torch.manual_seed(0)
    plain = Model().double()
    parallel = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "norm": ReplicateParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(parallel, mesh, plan)
    assert isinstance(parallel.up, ColumnParallelLinear)
    assert parallel.up.weight.placements == (Shard(0),)
    ids = torch.randint(0, 11, (3, 4))
    expected, out = plain(ids), parallel(ids)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    out.square().sum().backward()
    for (name, p), q in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_parameter(p, p.grad), q.grad, rtol=1e-11, atol=1e-11, msg=name)


def test_parallelize_module_takes_fastpar_styles() -> None:
    run_ranks(2, _parallelize_module_matches)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColwiseParallel(input_layouts=Shard(0)), "input_layouts must be one of"),
        (lambda: ColwiseParallel(use_local_output=False), "use_local_output=False is not available"),
        (lambda: RowwiseParallel(output_layouts=Shard(1)), "output_layouts must be one of"),
    ],
)
def test_layouts_that_are_not_there_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def _from_pretrained_matches(folder: str) -> float:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    huggingface.register()
    plan = {
        "model.layers.*.mlp.gate_proj": "fastpar_colwise",
        "model.layers.*.mlp.up_proj": "fastpar_colwise",
        "model.layers.*.mlp.down_proj": "fastpar_rowwise",
        "model.embed_tokens": "fastpar_vocab",
        "lm_head": "fastpar_colwise_gather_output",
    }
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    with fp.comm.record() as log:
        logits = logits_of(model, torch.arange(10).view(1, 10))
    assert len(log) == 2 + 2, "fastpar's forwards must run: one for the embedding, one per layer, one gather"
    expected = logits_of(AutoModelForCausalLM.from_pretrained(folder), torch.arange(10).view(1, 10))
    return (logits - expected).abs().max().item()


def test_hugging_face_plans_take_fastpar_styles(tmp_path: Path) -> None:
    build_model("llama", torch.float32, num_hidden_layers=2).save_pretrained(tmp_path)
    assert max(run_ranks(2, _from_pretrained_matches, str(tmp_path))) <= 1e-5


def _huggingface_loss(architecture: str, items: int | None) -> tuple[float, float, float]:
    plain = build_model(architecture, torch.float32)
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (2, 9))
    labels = ids.masked_fill(torch.rand(2, 9) < 0.2, -100)
    extra = {} if items is None else {"num_items_in_batch": items}
    expected, out = plain(ids, labels=labels, **extra), parallel(ids, labels=labels, **extra)
    assert isinstance(out.logits, DTensor)
    assert out.logits.to_local().size(-1) < VOCAB, "logits stay split"
    torch.testing.assert_close(out.logits.full_tensor(), expected.logits)
    expected.loss.backward()
    out.loss.backward()
    grads = dict(plain.named_parameters())
    worst = max(float((full_parameter(p, p.grad) - grads[n].grad).abs().max()) for n, p in parallel.named_parameters())
    fp.unparallelize(parallel)
    restored = parallel(ids, labels=labels, **extra).loss.item()
    loss, reference = out.loss.item(), expected.loss.item()
    return abs(loss - reference), worst, abs(restored - reference)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("items", [None, 10])
def test_hugging_face_models_compute_their_loss_on_split_logits(architecture: str, items: int | None) -> None:
    for loss, grad, restored in run_ranks(3, _huggingface_loss, architecture, items):
        assert loss <= 2e-6
        assert grad <= 1e-5
        assert restored == 0.0


def _attention_dropout_logits() -> Tensor:
    huggingface.register()
    model = build_model("gpt2", torch.float64, attn_pdrop=0.3, attn_implementation="fastpar_eager")
    fp.parallelize(model, dist.group.WORLD, gather_logits=True)
    torch.manual_seed(2)
    return logits_of(model, torch.arange(24).view(2, 12)).detach()


def test_attention_dropout_does_not_depend_on_the_layout() -> None:
    (expected,) = run_ranks(1, _attention_dropout_logits)
    for size in (2, 3):
        for logits in run_ranks(size, _attention_dropout_logits):
            torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def _recomputed_gradients() -> float:
    plain = build_model("llama", torch.float64)
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, sequence_parallel=True, gather_logits=True)
    parallel.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(26).view(2, 13)
    with norms_in_their_own_dtype(plain):
        logits_of(plain, ids).square().sum().backward()
        logits_of(parallel, ids).square().sum().backward()
    grads = dict(plain.named_parameters())
    return max(
        ((full_parameter(p, p.grad) - grads[n].grad).abs().max() / grads[n].grad.abs().max()).item()
        for n, p in parallel.named_parameters()
    )


def test_activation_recomputation_gives_the_same_gradients() -> None:
    assert max(run_ranks(2, _recomputed_gradients)) <= 1e-10


def _generated() -> tuple[list[int], list[int]]:
    plain = build_model("qwen3", torch.float32).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = torch.arange(6).view(1, 6)
    expected = plain.generate(ids, **options)
    fp.parallelize(plain, dist.group.WORLD, gather_logits=True)
    return plain.generate(ids, **options)[0].tolist(), expected[0].tolist()


def test_generate_works_on_gathered_logits() -> None:
    for tokens, expected in run_ranks(3, _generated):
        assert tokens == expected
        assert len(tokens) == 14


def test_attention_function_without_dropout_is_eager_attention() -> None:
    huggingface.register()
    ours = build_model("llama", torch.float64, attn_implementation="fastpar_eager")
    theirs = build_model("llama", torch.float64, attn_implementation="sdpa")
    ids = torch.arange(20).view(2, 10)
    torch.testing.assert_close(logits_of(ours, ids), logits_of(theirs, ids), rtol=1e-6, atol=1e-6)


def test_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.2.0")
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.20, found 5\.2\.0"):
        huggingface.register()
