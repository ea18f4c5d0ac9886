"""What ranks do in the tests of context parallelism: models on a split sequence beside the same model whole."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.context import ContextRegion
from fastpar.context.region import region_of
from fastpar.contracts.moe import RouteRule
from tests.tensor.family_models import tiny_model

TOKENS = 37
PACKED = ((20, 0, 17), (5, 32))
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def whole_batch(seed: int = 1) -> dict[str, Tensor]:
    """Two rows of ids, and labels of which some do not count: more in the first half."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 61, (2, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, 3:12] = -100
    return {"input_ids": ids, "labels": labels}


def alone(model: nn.Module, batch: dict[str, Tensor], documents: Any) -> Tensor:
    """The loss in one process, of each document by itself: transformers' own packing of GPT-OSS mixes documents."""
    rows = documents or ((TOKENS,),)
    rows = rows * (2 // len(rows))
    total, count = torch.zeros(()), 0
    for ids, labels, lengths in zip(batch["input_ids"], batch["labels"], rows, strict=True):
        for part, target in zip(ids.split(list(lengths)), labels.split(list(lengths)), strict=True):
            if len(part) > 1:
                logits = model(input_ids=part[None]).logits[0, :-1]
                total = total + nn.functional.cross_entropy(logits, target[1:], reduction="sum", ignore_index=-100)
                count += int((target[1:] != -100).sum())
    return total / count


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
    return found


def sum_over(mesh: fp.Mesh, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    comm = fp.Communicator(mesh.group("dp_cp"))
    return {name: comm.all_reduce(grad) for name, grad in grads.items()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], what: object, tolerance: float) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        error = float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-3))
        assert error < tolerance, f"{what}: {name} is off by {error:.1e} of its largest entry"


def compare_families(families: dict[str, str], sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Loss and gradients of each family on the mesh, packed and not, against one process."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    for model_type, name in families.items():
        plain = tiny_model(model_type, name)
        model = fp.parallelize(copy.deepcopy(plain), mesh, context=fp.Context(**options))
        for documents in (None, ((20, 0, 17),), PACKED):
            what = (model_type, sizes, options, documents)
            plain.zero_grad()
            model.zero_grad()
            expected = alone(plain, whole_batch(), documents)
            expected.backward()
            batch = fp.context.shard(model, whole_batch(), documents=documents)
            loss = model(**batch).loss
            loss.backward()
            total = fp.context.total(model, loss)
            assert abs(float(total - expected.detach())) < 1e-5 * abs(float(expected.detach())), what
            assert_near(sum_over(mesh, gradients(model)), gradients(plain), what, 2e-4)
        fp.unparallelize(model)
        assert getattr(model.config, "_attn_implementation", "") == getattr(plain.config, "_attn_implementation", "")
        assert float(alone(model, whole_batch(), None).detach()) == float(alone(plain, whole_batch(), None).detach())


def train_step(sizes: dict[str, int], stage: int, documents: Any) -> dict[str, Tensor]:
    """Two AdamW steps of a Llama with ZeRO over the mesh: the whole parameters."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    model = fp.parallelize(tiny_model("llama", "LlamaForCausalLM"), mesh, context=fp.Context())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=stage, max_norm=0.05)
    for step in range(2):
        batch = fp.context.shard(model, whole_batch(1 + step * mesh.size("dp") + mesh.rank("dp")), documents=documents)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del zero
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def train_step_alone(replicas: int, documents: Any) -> dict[str, Tensor]:
    model = tiny_model("llama", "LlamaForCausalLM")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for replica in range(replicas):
            (alone(model, whole_batch(1 + step * replicas + replica), documents) / replicas).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def compare_steps(sizes: dict[str, int], stage: int, documents: Any) -> None:
    found = train_step(sizes, stage, documents)
    replicas = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
    assert_near(found, train_step_alone(replicas, documents), (sizes, stage), 1e-3)


def perturb_a_document(families: dict[str, str]) -> dict[str, tuple[float, float]]:
    """By family, how far the logits of the first and of the second document move when a token of the first becomes
    another."""
    mesh = fp.init_mesh(cp=dist.get_world_size(), device="cpu")
    comm, found = fp.Communicator(mesh.group("cp")), {}
    for model_type, name in families.items():
        model = fp.parallelize(tiny_model(model_type, name), mesh)
        ids = whole_batch()["input_ids"]
        outputs = []
        for token in (3, 4):
            ids[:, 0] = token
            batch = fp.context.shard(model, {"input_ids": ids}, documents=(20, 17))
            outputs.append(model(**batch).logits.detach())
        moved = (outputs[0] - outputs[1]).abs().amax((0, 2))
        is_first = region_of(model).positions < 20
        first, second = comm.all_reduce(torch.stack([moved[is_first].sum(), moved[~is_first].sum()])).tolist()
        found[model_type] = first, second
    return found


def recompute_two_batches() -> None:
    """Two forwards and then two backwards, of batches with other documents, with layers that are run again."""
    mesh = fp.init_mesh(cp=dist.get_world_size(), device="cpu")
    grads = []
    for recomputed in (False, True):
        model = fp.parallelize(tiny_model("llama", "LlamaForCausalLM"), mesh)
        if recomputed:
            fp.apply_recompute(model)
        losses = []
        for step, documents in enumerate([(20, 17), (5, 32)]):
            batch = fp.context.shard(model, whole_batch(step), documents=documents)
            losses.append(model(**batch).loss)
        sum(losses).backward()
        grads.append(gradients(model))
    assert_near(grads[1], grads[0], "recomputed", 1e-6)


class Own(nn.Module):
    """A layer of one's own: one head of attention over the split sequence."""

    def __init__(self, region: ContextRegion | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(dropout)
        self.embed = nn.Embedding(61, 8)
        if region is not None:
            self.attention = fp.context.ContextAttention(region, causal=True, window=(9, 0), dropout=dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.drop(out)


def own_model(layout: str, size: int, dropout: float) -> tuple[Tensor, Tensor]:
    """(all tokens' outputs in the order of the sequence, this rank's number of tokens)"""
    mesh = fp.init_mesh(cp=size, device="cpu")
    region = ContextRegion(mesh.group("cp"), fp.Context(layout=layout, block=4))
    torch.manual_seed(0)
    model = fp.parallelize(Own(region, dropout), mesh, {})  # no linear is split
    torch.manual_seed(5)
    ids = whole_batch()["input_ids"][:, : 36 if layout == "striped" else None]
    batch = fp.context.shard(model, {"input_ids": ids})
    out = model(batch["input_ids"])
    whole = torch.zeros(2, ids.shape[1], 8)
    whole[:, region.positions] = out.detach()
    return region.comm.all_reduce(whole), torch.tensor(out.shape[1])


def errors() -> list[str]:
    """What is refused, by the first line of each error."""
    mesh = fp.init_mesh(cp=dist.get_world_size(), device="cpu")
    found = []

    def refused(action: Any) -> None:
        try:
            action()
        except (ValueError, TypeError, RuntimeError) as error:
            found.append(str(error))
        else:
            found.append("accepted")

    ids = whole_batch()["input_ids"]
    model = fp.parallelize(tiny_model("llama", "LlamaForCausalLM"), mesh)
    refused(lambda: model(input_ids=ids))
    good = fp.context.shard(model, whole_batch())
    refused(lambda: model(input_ids=ids))
    refused(lambda: model(**good, attention_mask=torch.zeros_like(good["input_ids"])))
    refused(lambda: model(**good, output_attentions=True))
    refused(lambda: fp.context.shard(model, whole_batch(), documents=(20, 16)))
    refused(lambda: fp.context.shard(model, whole_batch(seed=dist.get_rank())))
    refused(lambda: fp.context.shard(model, {**whole_batch(), "pixel_values": ids}))
    refused(lambda: fp.context.shard(model, {**whole_batch(), "attention_mask": (ids > 9).long()}))
    bad = (20, 16) if dist.get_rank() else (20, 17)
    refused(lambda: fp.context.shard(model, whole_batch(), documents=bad))
    refused(lambda: fp.parallelize(tiny_model("qwen3_next", "Qwen3NextForCausalLM"), mesh))
    refused(lambda: fp.parallelize(nn.Sequential(nn.Linear(4, 4)), mesh))
    four = fp.Context(method="ulysses")
    refused(lambda: fp.parallelize(tiny_model("gpt2", "GPT2LMHeadModel"), mesh, context=four))
    refused(lambda: fp.context.shard(tiny_model("llama", "LlamaForCausalLM"), whole_batch()))
    return found


def not_a_part() -> list[str]:
    """What is refused of a sequence that is too short, and of a part that is given without its positions."""
    mesh = fp.init_mesh(cp=2, device="cpu")
    model = fp.parallelize(tiny_model("llama", "LlamaForCausalLM"), mesh)
    found = []
    batch = fp.context.shard(model, {"input_ids": torch.ones(2, 8, dtype=torch.int64)})
    with pytest.raises(ValueError, match="got 4 tokens without position_ids") as error:
        model(batch["input_ids"])
    found.append(str(error.value).partition(":")[0])
    assert model(batch["input_ids"], None, batch["position_ids"]).logits.shape[1] == 4
    with pytest.raises(ValueError, match="fewer than") as error:
        fp.context.shard(model, {"input_ids": torch.ones(2, 1, dtype=torch.int64)})
    return [*found, str(error.value).partition(", ")[2].removesuffix(" they are split over")]


def groups_that_do_not_sum() -> list[str]:
    """What data parallelism says that would average gradients over the ranks of cp."""
    mesh = fp.init_mesh(cp=2, device="cpu")
    model = fp.parallelize(tiny_model("llama", "LlamaForCausalLM"), mesh)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), []
    groups: list[Any] = [None, mesh["cp"]]
    for group in groups:
        with pytest.raises(ValueError, match="split over 2 ranks") as error:
            fp.zero.shard(model, optimizer, group=group, stage=0)
        found.append(str(error.value).partition(",")[0])
    with pytest.raises(TypeError, match="DistributedDataParallel averages them"):
        nn.parallel.DistributedDataParallel(model)
    fp.unparallelize(model)
    nn.parallel.DistributedDataParallel(model)
    return found


def region_of_other_ranks() -> str:
    """What is said to a region over dp_shard in the place of cp: by size and rank, some ranks could not tell them."""
    mesh = fp.init_mesh(dp_shard=2, cp=2, device="cpu")
    with pytest.raises(ValueError, match="ContextRegion has the ranks") as error:
        fp.parallelize(Own(ContextRegion(mesh["dp_shard"])), mesh, {})
    routed = Routed(ContextRegion(mesh["cp"]), group=mesh.group("dp_shard"))
    with pytest.raises(ValueError, match=r"router balances over the tokens of the ranks .* but sequences are split"):
        fp.parallelize(routed, mesh, {})
    routed.router.comm = fp.Communicator(mesh.group("dp_cp"))
    fp.parallelize(routed, mesh, {})
    return str(error.value)


def batch_of_own_region() -> tuple[int, int]:
    """The share of the batch that a model's own region has after `parallelize`."""
    mesh = fp.init_mesh(dp_shard=2, device="cpu")
    region = ContextRegion(mesh.group("cp"))
    fp.parallelize(Own(region), mesh, {}, context=fp.Context())
    return region.batch


class PlainBlock(nn.Module):
    """A layer of one's own that calls torch's attention: four query heads of two key heads."""

    def __init__(self, mask: str = "") -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.mask == "never":
            return x + self.out(q.transpose(1, 2).flatten(2))
        options: dict[str, Any] = {"is_causal": True}
        if self.mask == "window":
            places = torch.arange(x.shape[1])
            far = places[:, None] - places
            options = {"attn_mask": (far >= 0) & (far < 6)}
        attention = functools.partial(nn.functional.scaled_dot_product_attention, enable_gqa=True, scale=0.4, **options)
        if self.mask in ("checkpoint", "reentrant"):
            out = torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=self.mask == "reentrant")
        else:
            out = attention(q, k, v)
        return x + self.out(out.transpose(1, 2).flatten(2))


def plain_model(mask: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(61, 8), PlainBlock(mask), PlainBlock(mask), nn.Linear(8, 61)).double()


class Counting(nn.Module):
    """Embeddings of ids and of places, which it counts from 0 where it is given none."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.places = nn.Embedding(61, 8), nn.Embedding(61, 8)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        counted = torch.arange(ids.shape[1]) if positions is None else positions
        embedded: Tensor = self.ids(ids) + self.places(counted)
        return embedded


class Placed(nn.Module):
    """A model that takes positions, and reads tables there, or is so careless as not to."""

    def __init__(self, is_careless: bool) -> None:
        super().__init__()
        self.embed, self.block, self.is_careless = Counting(), PlainBlock(), is_careless

    def forward(self, ids: Tensor, start_pos: int = 0, positions: Tensor | None = None) -> Tensor:
        out: Tensor = self.block(self.embed(ids, None if self.is_careless else positions))
        return out


def style_of(mask: str) -> Any:
    return fp.parallel.AttentionStyle(window=(5, 0)) if mask == "window" else "attention"


def styled_models() -> None:
    """Modules with the style "attention": loss and gradients of one process, whole and in a pipeline, then undone."""
    mesh = fp.init_mesh(cp=2, device="cpu")
    loss = fp.pipeline.CrossEntropy()
    for mask in ("", "window"):
        for pipelined in (False, True):
            plain: Any = plain_model(mask)
            batch = whole_batch()
            shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            expected = loss(plain(batch["input_ids"]), shifted)
            expected.backward()
            plan = {"1": style_of(mask), "2": style_of(mask)}
            model: Any = plain_model(mask)
            if pipelined:
                model = fp.parallelize_pipeline(model, mesh, num_microbatches=2, plan=plan, loss=loss)
                part = fp.context.shard(model, batch)
                found = model.step(part["input_ids"], target=part["shift_labels"])
            else:
                model = fp.parallelize(model, mesh, plan, context=fp.Context(layout="striped"))
                if mask:
                    fp.apply_recompute([model[1], model[2]])  # whose own forwards call the function
                part = fp.context.shard(model, batch)
                logits = model(part["input_ids"])
                targets = part["shift_labels"].flatten()
                sums = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
                found = sums / part["num_items_in_batch"]
                found.backward()
            torch.testing.assert_close(fp.context.total(model, found), expected.detach(), rtol=1e-9, atol=0)
            named = {name: p.grad for name, p in model.named_parameters()}
            grads = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named.items()}
            assert_near(sum_over(mesh, grads), gradients(plain), (mask, pipelined), 1e-9)
            if not pipelined:
                if mask:
                    fp.remove_recompute([model[1], model[2]])
                fp.unparallelize(model)
                torch.testing.assert_close(model(batch["input_ids"]), plain(batch["input_ids"]), rtol=0, atol=0)
    mesh.close()


def styled_refusals() -> list[str]:
    mesh = fp.init_mesh(cp=2, device="cpu")
    found = []
    masks = ("window", "never", "", "mha", "checkpoint", "reentrant", "places")
    for mask, style in ((mask, "attention" if mask else None) for mask in masks):
        model: Any = plain_model(mask)
        if mask == "mha":
            model[1] = nn.MultiheadAttention(8, 2)
        if mask == "places":
            model[0] = Counting().double()
        try:
            fp.parallelize(model, mesh, {"1": style, "2": style} if style else {})
            model(fp.context.shard(model, {"input_ids": whole_batch()["input_ids"]})["input_ids"])
        except (ValueError, TypeError) as error:
            found.append(str(error))
    with pytest.raises(ValueError, match=r"by itself .* Let it take positions"):
        fp.parallelize(Placed(is_careless=True), mesh, {"block": "attention"})
    fp.parallelize(Placed(is_careless=False), mesh, {"block": "attention"})
    mesh.close()
    return found


class Routed(nn.Module):
    """A layer of attention, and a router behind it whose losses are collected."""

    def __init__(self, region: ContextRegion, group: Any = None) -> None:
        super().__init__()
        self.own = Own(region)
        losses = fp.expert.LossRule(balance="switch", coeff=1.0, z_coeff=0.1)
        self.router = fp.expert.Router(8, 6, RouteRule(top_k=2), losses=losses, group=group, collect=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.own(input_ids)
        self.router(x)
        return x


class RoutedStream(nn.Module):
    """Attention, and behind it a layer with a router on the residual stream."""

    def __init__(self, region: ContextRegion, group: Any = None) -> None:
        super().__init__()
        routed = Routed(region, group)
        self.own, self.layers = routed.own, nn.ModuleList([RoutedLayer(routed.router)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.own(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


class RoutedLayer(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        self.router(x)
        return x * 2


def router_losses(cp: int, tp: int = 1) -> dict[str, Tensor]:
    """The sums over ranks of a router's losses, and of their gradients. With tp the stream is split over it as well."""
    mesh = fp.init_mesh(cp=cp, tp=tp, device="cpu")
    region = ContextRegion(mesh.group("cp"))
    torch.manual_seed(0)
    plan = {"layers.*": "stream"}
    model = fp.parallelize(RoutedStream(region).double(), mesh, plan, sequence_parallel=tp > 1)
    batch = fp.context.shard(model, {"input_ids": whole_batch()["input_ids"]})
    model(batch["input_ids"])
    losses = fp.expert.collected_losses(model)
    sum(losses.values()).backward()
    tokens = fp.Communicator(mesh.group("cp_tp"))
    found = {name: tokens.all_reduce(loss.detach().clone()) for name, loss in losses.items()}
    for name, grad in gradients(model).items():  # that of a rank of tp is whole
        found[name] = region.comm.all_reduce((grad.to_local() if isinstance(grad, DTensor) else grad).clone())
    mesh.close()
    return found


def router_of_some_ranks() -> str:
    """What is said to a router whose group has the ranks of tp, or of cp, where both share its tokens."""
    mesh, found = fp.init_mesh(cp=2, tp=2, device="cpu"), []
    for dim in ("cp", "tp"):
        model = RoutedStream(ContextRegion(mesh["cp"]), group=mesh.group(dim))
        try:
            fp.parallelize(model, mesh, {"layers.*": "stream"}, sequence_parallel=True)
        except ValueError as error:
            found.append(str(error))
    whole = RoutedStream(ContextRegion(mesh["cp"]), group=mesh.group("cp_tp"))
    fp.parallelize(whole, mesh, {"layers.*": "stream"}, sequence_parallel=True)
    mesh.close()
    return "; ".join(found)


class TakesMore(nn.Module):
    """A layer of one's own behind an embedding, which fails without a second input."""

    def __init__(self, region: ContextRegion) -> None:
        super().__init__()
        self.own = Own(region)

    def forward(self, input_ids: Tensor, scale: float | None = None) -> Tensor:
        if scale is None:
            raise RuntimeError("a scale is needed")
        return cast(Tensor, self.own(input_ids)) * scale


def said_of_untried_models() -> list[str]:
    """What is logged of models that cannot be tried on a few ids."""
    mesh, found = fp.init_mesh(cp=2, device="cpu"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fastpar.parallelize")
    logger.addHandler(handler)
    try:
        without_ids: Any = Own(ContextRegion(mesh["cp"]))
        without_ids.embed = nn.Linear(8, 8)
        for model in (TakesMore(ContextRegion(mesh["cp"])), without_ids, Own(ContextRegion(mesh["cp"]))):
            fp.parallelize(model, mesh, {})
    finally:
        logger.removeHandler(handler)
        mesh.close()
    return found
