"""What ranks do with models on tensor-parallel grids: train beside one process, and compare."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.tensor import full_parameter
from tests.models import VOCAB, build_model, norms_in_their_own_dtype

BATCH, TOKENS, STEPS = 3, 7, 3


def apart(mine: Tensor, other: Tensor) -> float:
    """The largest difference, of the largest entry."""
    scale = float(other.detach().abs().max())
    return float((mine.detach() - other.detach()).abs().max()) / (scale or 1.0)


def padded_batch(step: int) -> dict[str, Tensor]:
    """Ids with padding on the right of one sequence, and labels without it."""
    ids = torch.randint(1, VOCAB, (BATCH + step % 2, TOKENS + step), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Next-token loss in the logits' dtype: that of transformers is in float32."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    target = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def trained(model: nn.Module, steps: int = STEPS) -> list[Tensor]:
    """Losses and gradient norms of a few steps of AdamW on padded batches, and in the end the model's own loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, padded_batch(step))
        loss.backward()
        norm = fp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses += [loss.detach(), norm]
    return [*losses, model(**padded_batch(0)).loss.detach()]


def trains_as_one_process(architecture: str, spec: fp.GridSpec, overrides: dict[str, Any]) -> dict[str, float]:
    """By what is compared: the largest relative difference to one process."""
    whole = build_model(architecture, torch.float64, **overrides)
    split = copy.deepcopy(whole)
    fresh = copy.deepcopy(whole).requires_grad_(False)
    mesh = fp.init_mesh(tp=spec.ranks, tp_grid=spec, device="cpu")
    with norms_in_their_own_dtype(whole), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fp.parallelize(split, mesh)
        pairs = zip(trained(split), trained(whole), strict=True)
        found = {f"loss or norm {index}": apart(mine, other) for index, (mine, other) in enumerate(pairs)}
    found[f"loss or norm {2 * STEPS}"] *= 1e-4  # transformers' own, in float32
    names = dict(whole.named_parameters())
    for name, mine in split.named_parameters():
        found[name] = apart(full_parameter(mine), names[name])
    fp.parallelize(fresh, mesh)
    fresh.load_state_dict(split.state_dict())
    here = dict(split.named_parameters())
    found["state"] = max(float(not torch.equal(p.to_local(), here[n].to_local())) for n, p in fresh.named_parameters())
    fp.unparallelize(split)
    found["unparallelize"] = max(apart(p, names[name]) for name, p in split.named_parameters())
    mesh.close()
    return found


def train_all(cases: list[tuple[str, fp.GridSpec, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    return {f"{name} {spec}": trains_as_one_process(name, spec, overrides) for name, spec, overrides in cases}


class Own(nn.Module):
    """A model of somebody's own: attention with one fused weight, a linear pair without a module, own norms."""

    def __init__(self, hidden: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList([OwnLayer(hidden, heads) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(self.norm(x))


class OwnLayer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(hidden), OwnAttention(hidden, heads)
        self.norm2, self.mlp = (
            nn.LayerNorm(hidden),
            nn.Sequential(nn.Linear(hidden, 22), nn.GELU(), nn.Linear(22, hidden)),
        )

    def forward(self, x: Tensor, scale: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), scale)
        return x + self.mlp(self.norm2(x))


class OwnAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, hidden // heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """scale [B], of each sequence."""
        q, k, v = self.qkv(x).chunk(3, -1)
        heads = [y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        return self.out(out if scale is None else out * scale[:, None, None])


OWN_PLAN: dict[str, Any] = {
    "embed": "vocab",
    "head": "vocab",
    "layers.*": "stream",
    "layers.*.attention": "block",
    "layers.*.attention.qkv": "packed_qkv",
    "layers.*.attention.out": "rowwise",
    "layers.*.mlp": "block",
    "layers.*.mlp.0": "colwise",
    "layers.*.mlp.2": "rowwise",
}


def own_model_differences(spec: fp.GridSpec) -> dict[str, float]:
    """A written plan, a tensor with a row for each sequence, and batches as large as sequences are long."""
    torch.manual_seed(0)
    whole = Own().double()
    split = copy.deepcopy(whole)
    mesh = fp.init_mesh(tp=spec.ranks, tp_grid=spec, device="cpu")
    fp.parallelize(split, mesh, OWN_PLAN)
    found: dict[str, float] = {}
    for step, (batch, tokens) in enumerate(((4, 6), (6, 6), (4, 4))):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCAB, (batch, tokens), generator=generator)
        scale = torch.rand(batch, generator=generator, dtype=torch.float64)
        for name, model in (("split", split), ("whole", whole)):
            model.zero_grad()
            loss = F.cross_entropy(model(ids, scale).flatten(0, 1), ids.flatten())
            loss.backward()
            found[f"{name} {step}"] = float(loss.detach())
        found[f"loss {step}"] = abs(found.pop(f"split {step}") - found.pop(f"whole {step}"))
        for (name, mine), other in zip(split.named_parameters(), whole.parameters(), strict=True):
            grad = other.grad
            assert grad is not None
            scale_of = max(float(grad.abs().max()), 1e-3)  # a key's bias has none but rounding
            found[f"d{name} {step}"] = float((full_parameter(mine, mine.grad) - grad).abs().max()) / scale_of
    mesh.close()
    return found


def other_doors() -> dict[str, float]:
    """Generation, hidden states, attention probabilities, dropout, and weights for another layout, on (2, 1, 2)."""
    mesh = fp.init_mesh(tp=4, tp_grid=(2, 1, 2), device="cpu")
    one_dim = fp.init_mesh(tp=4, tp_grid=(1, 4, 1), device="cpu")
    whole: Any = build_model("llama", torch.float64, attn_implementation="eager").eval()
    split = fp.parallelize(copy.deepcopy(whole), mesh)
    found: dict[str, float] = {}
    batch = padded_batch(0)
    ids, mask = batch["input_ids"], torch.ones_like(batch["input_ids"])
    with norms_in_their_own_dtype(whole), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
        mine, other = (model(input_ids=ids, attention_mask=mask, **options) for model in (split, whole))
        pairs = zip(mine.hidden_states, other.hidden_states, strict=True)
        found["hidden states"] = max(apart(a, b) for a, b in pairs)
        found["attentions"] = max(apart(a, b) for a, b in zip(mine.attentions, other.attentions, strict=True))
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
        texts = [model.generate(ids, **options) for model in (split, whole)]
        found["generate"] = float(not torch.equal(*texts))
        other_layout = fp.parallelize(build_model("llama", torch.float64, seed=3, attn_implementation="eager"), one_dim)
        full = {name: full_parameter(p) for name, p in split.named_parameters()}
        other_layout.load_state_dict(full)
        found["load"] = max(apart(full_parameter(p), full[n]) for n, p in other_layout.named_parameters())
    dropping = {"resid_pdrop": 0.2, "embd_pdrop": 0.1}
    plain = fp.parallelize(build_model("gpt2", torch.float64, **dropping), None)
    on_grid = fp.parallelize(build_model("gpt2", torch.float64, **dropping), mesh)
    losses = []
    for model in (on_grid, plain):
        torch.manual_seed(5)
        losses.append(loss_of(model, batch))
        losses[-1].backward()
    found["dropout"] = apart(*losses)
    weights = [model.transformer.h[0].mlp.c_fc.weight for model in (on_grid, plain)]
    found["dropout dgrad"] = apart(full_parameter(weights[0], weights[0].grad), weights[1].grad)
    mesh.close()
    one_dim.close()
    return found


def trained_by_zero(stage: int) -> dict[str, float]:
    """Two steps of AdamW under ZeRO, over data-parallel ranks that have grids of their own."""
    whole: Any = build_model("llama", torch.float64)
    split = copy.deepcopy(whole)
    mesh = fp.init_mesh(dp_shard=2, tp=2, tp_grid=(2, 1, 1) if stage == 3 else (1, 1, 2), device="cpu")
    found: dict[str, float] = {}
    with norms_in_their_own_dtype(whole), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fp.parallelize(split, mesh)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in (split, whole)]
        zero = fp.zero.shard(split, optimizers[0], group=mesh, stage=stage)
        for _ in range(2):
            batches = [{k: v[:3] for k, v in padded_batch(seed).items()} for seed in (0, 2)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            (sum(loss_of(whole, batch) for batch in batches) / 2).backward()
            loss_of(split, batches[mesh.rank("dp_shard")]).backward()
            for optimizer in optimizers:
                optimizer.step()
    zero.detach()
    names = dict(whole.named_parameters())
    found |= {name: apart(full_parameter(p), names[name]) for name, p in split.named_parameters()}
    mesh.close()
    return found


def trained_on_from_another_grid(folder: str) -> dict[str, float]:
    """A step on one grid, ZeRO's checkpoint with its moments, and a step from there on another one."""
    whole = Own().double()
    models = copy.deepcopy(whole), copy.deepcopy(whole)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05)
    ids = torch.arange(24).view(4, 6) * 7 % VOCAB

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()

    for turn, (model, spec) in enumerate(zip(models, (fp.GridSpec(2, 1, 2), fp.GridSpec(1, 2, 2)), strict=True)):
        mesh = fp.init_mesh(tp=4, tp_grid=spec, device="cpu")
        fp.parallelize(model, mesh, OWN_PLAN)
        on_grid = torch.optim.AdamW(model.parameters(), lr=0.05)
        zero = fp.zero.shard(model, on_grid, group=mesh)
        state = zero.state_dict()
        if turn:
            dcp.load(state, checkpoint_id=folder)
            zero.load_state_dict(state)
        step(model, on_grid)
        step(whole, optimizer)
        if not turn:
            dcp.save(zero.state_dict(), checkpoint_id=folder)
            mesh.close()
    names = dict(whole.named_parameters())
    found = {name: apart(full_parameter(p), names[name]) for name, p in models[1].named_parameters()}
    zero.detach()
    mesh.close()
    return found


class Transposed(OwnLayer):
    """Batch normalisation between attention and MLP, which has the features as dim 1."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        self.norm = nn.BatchNorm1d(hidden)

    def forward(self, x: Tensor, scale: Tensor | None) -> Tensor:
        x = self.norm((x + self.attention(self.norm1(x), scale)).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class Dropping(OwnLayer):
    """Draws in its forward, where no module says so."""

    def forward(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return super().forward(F.dropout(x, 0.1, self.training), scale)


def build_experts() -> nn.Module:
    """A tiny model of Mixtral's."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4, "vocab_size": VOCAB}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def refusals() -> dict[str, str]:
    """By what is asked for: what is said, with a note where the model was changed after all."""
    flat, cube = (fp.init_mesh(tp=4, tp_grid=spec, device="cpu") for spec in ((2, 2, 1), (1, 1, 4)))
    copies = fp.init_mesh(tp=4, tp_grid=fp.GridSpec.axonn(2, 2, 1), device="cpu")
    beside = fp.init_mesh(cp=2, tp=2, tp_grid=(2, 1, 1), device="cpu")
    odd = {"num_attention_heads": 6, "num_key_value_heads": 2}
    own = Own()
    calls: dict[str, Any] = {
        "heads": lambda m: fp.parallelize(build_model("llama", torch.float32, **odd), m, "auto"),
        "written": lambda m: fp.parallelize(Own(hidden=18, heads=6), m, OWN_PLAN),
        "stream": lambda m: fp.parallelize(own, m, {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}),
        "whole": lambda m: fp.parallelize(own, m, OWN_PLAN | {"layers.*.mlp.0": "replicate"}),
        "gather": lambda m: fp.parallelize(own, m, OWN_PLAN | {"layers.*.mlp.0": "colwise_gather_output"}),
    }
    said: dict[str, str] = {}
    for name, call in calls.items():
        said[name] = _error(lambda call=call: call(flat))
    said["spread"] = _error(lambda: fp.parallelize(own, copies, OWN_PLAN, sequence_parallel=True))
    said["cp"] = _error(lambda: fp.parallelize(own, beside, OWN_PLAN))
    experts = build_experts()
    said["experts"] = _error(lambda: fp.parallelize(experts, flat))
    other = Own()
    other.layers = nn.ModuleList([Transposed(16, 4)])
    fp.parallelize(other, flat, OWN_PLAN)
    said["features"] = _error(lambda: other(torch.zeros(4, 6, dtype=torch.long)))
    other = Own()
    other.layers = nn.ModuleList([Dropping(16, 4)])
    fp.parallelize(other, flat, OWN_PLAN)
    said["draws"] = _error(lambda: other(torch.zeros(4, 6, dtype=torch.long)))
    said["changed"] = str([n for m in (own, experts) for n, p in m.named_parameters() if type(p) is not nn.Parameter])
    fp.parallelize(own, cube, OWN_PLAN)
    said["small batch"] = _error(lambda: own(torch.zeros(3, 8, dtype=torch.long)))
    said["empty rank"] = _error(lambda: own(torch.zeros(5, 8, dtype=torch.long)))
    for mesh in (flat, cube, copies, beside):
        mesh.close()
    return said


def _error(call: Any) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"
