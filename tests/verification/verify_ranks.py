"""What ranks do for test_verify.py: right models in many layouts, and models with one error planted each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.verification import VerifyReport
from fastpar.verification.words import parse_layout
from tests.models import VOCAB, build_model
from tests.moe import moe_models
from tests.verification.verify_errors import (
    Plant,
    at,
    bias_again,
    detached_weight,
    doubled_expert_gradient,
    factor_of_one,
    gradient_twice,
    labels_shifted,
    local_norm_of_experts,
    loss_times,
    lost_forward,
    no_copy,
    no_mask,
    no_sum,
    not_averaged,
    nothing_gathered,
    one_nan,
    other_batch,
    own_positions,
    partial_gradient,
    planted,
    prepared_input,
    rank_dropout,
    rolled_rows,
    rows_of_the_other,
    scaled,
    scaled_gradient,
    shared_gradients_not_exchanged,
    stale_after_a_step,
    untold,
    zero_changed,
)

SMALL = {"hidden_size": 32, "intermediate_size": 42, "num_attention_heads": 4, "num_key_value_heads": 2}


class Scale(nn.Module):
    """A factor between two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Residual(nn.Module):
    """x + down(gelu(up(norm(x)))), whose norm computes on what the block gets."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Ids to logits over named blocks; with a probability, dropout that its code draws by itself."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p
        self.embed = nn.Embedding(VOCAB, 24)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(F.dropout(x, self.p, self.training))
        return self.head(x)


CHAIN_PLAN = {
    "embed": "vocab",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def sequential() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, 24), Residual(), Scale(), Residual(), nn.Linear(24, VOCAB))


def gemma() -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "head_dim": 8, "max_position_embeddings": 64, **SMALL}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, attn_implementation="eager"))


def make(name: str, **overrides: Any) -> nn.Module:
    if name in ("chain", "sequential", "gemma"):
        return {"chain": Chain, "sequential": sequential, "gemma": gemma}[name](**overrides)
    if name in moe_models.MODELS:
        return moe_models.build(name)
    sizes = {} if name == "gpt2" else SMALL
    return build_model(name, torch.float32, **{**sizes, **overrides})


def next_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """One call of `fp.verify`.

    layout   words, and further options of VerifyLayout; verify: of fp.verify
    plant    what is done to the model in its layout; patch: a context in which all of verify runs
    culprits modules one of which must be named first; kind of that finding, and the step that it shows in
    """

    name: str
    model: str
    layout: str
    build: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    plant: Plant | None = None
    patch: Callable[[], Any] = contextlib.nullcontext
    batch: Callable[[Tensor], Tensor] | None = None
    verify: dict[str, Any] = field(default_factory=dict)
    culprits: tuple[str, ...] = ()
    kind: str | None = None
    shows_in: int = 0

    @property
    def steps(self) -> int:
        return self.shows_in + 1 if self.culprits else 2


def run_case(case: Case) -> VerifyReport:
    ids = torch.randint(moe_models.VOCAB, (4, 7), generator=torch.Generator().manual_seed(1))
    ids = ids if case.batch is None else case.batch(ids)
    own = case.model in ("example", "chain", "sequential")
    batch: Any = (ids,) if own else {"input_ids": ids, "labels": ids}
    extra: dict[str, Any] = {"loss": next_tokens, "target": ids} if own else {}
    words = parse_layout(case.layout)
    mesh = fp.init_mesh(**words.sizes, device="cpu")
    asked = fp.VerifyLayout(mesh, **{**words.options, **case.options})
    try:
        with planted(case.plant), case.patch():
            return fp.verify(
                partial(make, case.model, **case.build), asked, batch, steps=case.steps, **extra, **case.verify
            )
    finally:
        mesh.close()


def run_cases(cases: Sequence[Case]) -> list[VerifyReport]:
    return [run_case(case) for case in cases]


EXPERTS = {"num_experts": 4, "router_aux_loss_coef": 0.0}
BALANCED = {"num_experts": 4, "router_aux_loss_coef": 0.05}
EAGER = {"attn_implementation": "eager"}

RIGHT = [
    Case("llama tp", "llama", "tp2"),
    Case("llama sp", "llama", "tp2,sp"),
    Case("llama recompute", "llama", "tp2,sp,recompute"),
    Case("qwen3 tied, norms of heads", "qwen3", "tp2,sp"),
    Case("mistral, one kv head", "mistral", "tp2", {"num_key_value_heads": 1}),
    Case("gpt2 packed", "gpt2", "tp2"),
    Case("gpt2 dropout", "gpt2", "tp2,sp", {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    Case("example dropout", "example", "tp2,sp", {"dropout": 0.2}),
    Case("example recompute", "example", "tp2,recompute", {"dropout": 0.2}),
    Case("custom plan", "chain", "tp2", options={"plan": CHAIN_PLAN}),
    Case("custom sequential", "sequential", "pp2"),
    Case("zero 0", "llama", "dp2,zero0"),
    Case("zero 1", "gpt2", "dp2,zero1"),
    Case("zero 2", "qwen3", "dp2,zero2"),
    Case("zero 3", "llama", "dp2,zero3"),
    Case("pipeline", "llama", "pp2,mb4"),
    Case("pipeline tied", "qwen3", "pp2,zbv"),
    Case("experts over data parallelism", "mixtral", "ep2,zero1"),
    Case("experts over tensor parallelism", "example", "tp2,ep2,sp", EXPERTS),
    Case("experts with balance losses", "example", "tp2,ep2,sp", BALANCED),
    Case("experts, not spread", "qwen3_moe", "tp2,sp"),
    Case("experts in ZeRO 3", "example", "ep2,zero3", EXPERTS),
    Case("ranks with other seeds", "llama", "tp2", verify={"rank_seeds": True}),
]

L1 = "model.layers.1"


def down_without_sum(model: nn.Module) -> None:
    at(f"{L1}.mlp.down_proj", no_sum)(model)


BUGS = [
    Case(
        "no sum after a row-parallel layer",
        "llama",
        "tp2",
        plant=at(f"{L1}.mlp.down_proj", no_sum),
        culprits=(f"{L1}.mlp.down_proj",),
        kind="output",
    ),
    Case(
        "no sum of dgrad",
        "llama",
        "tp2",
        plant=at(f"{L1}.self_attn", no_copy),
        culprits=(f"{L1}.self_attn",),
        kind="gradient of the input",
    ),
    Case(
        "bias added by every rank",
        "llama",
        "tp2",
        {"attention_bias": True},
        plant=at("model.layers.0.self_attn.o_proj", bias_again),
        culprits=("model.layers.0.self_attn.o_proj",),
        kind="output",
    ),
    Case(
        "wrong scale",
        "gpt2",
        "tp2,sp",
        plant=at("transformer.h.1.mlp.c_proj", scaled),
        culprits=("transformer.h.1.mlp.c_proj",),
        kind="output",
    ),
    Case(
        "not a number",
        "llama",
        "tp2",
        plant=at(f"{L1}.post_attention_layernorm", one_nan),
        culprits=(f"{L1}.post_attention_layernorm",),
        kind="output",
    ),
    Case(
        "wrong scale of a gradient",
        "example",
        "tp2",
        plant=at("layers.1.mlp.down_proj", scaled_gradient),
        culprits=("layers.1.mlp.down_proj",),
    ),
    Case(
        "a forward of its own is lost",
        "gemma",
        "tp2",
        plant=at("model.embed_tokens", lost_forward),
        culprits=("model.embed_tokens",),
        kind="output",
    ),
    Case(
        "masks of dropout per rank",
        "example",
        "tp2,sp",
        {"dropout": 0.2},
        patch=rank_dropout,
        culprits=("layers.0.dropout",),
        kind="output",
    ),
    Case(
        "random numbers per rank",
        "chain",
        "tp2",
        {"p": 0.3},
        {"plan": CHAIN_PLAN},
        verify={"rank_seeds": True},
        culprits=("(model)",),
        kind="input",
    ),
    Case(
        "no attention mask",
        "llama",
        "tp2",
        EAGER,
        plant=at(f"{L1}.self_attn", no_mask),
        culprits=(f"{L1}.self_attn",),
        kind="input",
    ),
    Case(
        "positions of the local part",
        "llama",
        "tp2,sp",
        plant=at(f"{L1}.self_attn", own_positions),
        culprits=(f"{L1}.self_attn",),
        kind="input",
    ),
    Case(
        "norm's gradient not summed",
        "llama",
        "tp2,sp",
        plant=at(f"{L1}.input_layernorm", partial_gradient),
        culprits=(f"{L1}.input_layernorm",),
        kind="gradient",
    ),
    Case(
        "partial gradient not summed",
        "qwen3",
        "tp2",
        plant=at("model.layers.0.self_attn.q_norm", partial_gradient),
        culprits=("model.layers.0.self_attn.q_norm",),
        kind="gradient",
    ),
    Case(
        "gradient of a tied weight twice",
        "qwen3",
        "tp2",
        plant=at("model.embed_tokens", gradient_twice),
        culprits=("model.embed_tokens",),
        kind="gradient",
    ),
    Case(
        "gradient of a tied weight once",
        "qwen3",
        "tp2",
        plant=at("lm_head", detached_weight),
        culprits=("model.embed_tokens", "lm_head"),
        kind="gradient",
    ),
    Case(
        "gradient of a tied weight not exchanged",
        "qwen3",
        "pp2",
        patch=shared_gradients_not_exchanged,
        culprits=("model.embed_tokens",),
        kind="gradient",
    ),
    Case(
        "scale of experts' gradients",
        "example",
        "ep2,zero1",
        EXPERTS,
        plant=at("layers.1.mlp.experts", doubled_expert_gradient),
        culprits=("layers.1.mlp.experts",),
        kind="gradient",
    ),
    Case(
        "balance loss of a part of the tokens",
        "example",
        "tp2,ep2,sp",
        BALANCED,
        plant=untold,
        culprits=("layers.1.mlp.gate",),
    ),
    Case(
        "loss over another number of tokens",
        "qwen3",
        "tp2",
        plant=loss_times(27 / 28),
        culprits=("(loss)",),
        kind="loss",
    ),
    Case("labels shifted once more", "gpt2", "tp2", plant=labels_shifted, culprits=("(loss)",), kind="loss"),
    Case(
        "gradient of the head not summed",
        "llama",
        "tp2",
        plant=at("lm_head", prepared_input),
        culprits=("lm_head",),
        kind="gradient of the input",
    ),
    Case(
        "rows of packed QKV",
        "gpt2",
        "tp2",
        plant=at("transformer.h.1.attn.c_attn", rolled_rows),
        culprits=("transformer.h.1.attn.c_attn",),
        kind="output",
    ),
    Case(
        "key/value heads of the other rank",
        "llama",
        "tp2",
        plant=at(f"{L1}.self_attn.v_proj", rows_of_the_other),
        culprits=(f"{L1}.self_attn.v_proj",),
        kind="output",
    ),
    Case("a stage skips a scale", "sequential", "pp2", plant=at("2", factor_of_one), culprits=("2",), kind="output"),
    Case(
        "a parameter not averaged",
        "llama",
        "dp2,zero1",
        patch=partial(zero_changed, not_averaged(f"{L1}.mlp.up_proj.weight")),
        culprits=(f"{L1}.mlp.up_proj",),
        kind="gradient",
    ),
    Case(
        "owners not written back",
        "llama",
        "dp2,zero1",
        patch=nothing_gathered,
        culprits=("model.embed_tokens",),
        kind="update",
    ),
    Case(
        "norm without other ranks' experts",
        "example",
        "tp2,ep2",
        EXPERTS,
        patch=local_norm_of_experts,
        culprits=("(gradient norm)",),
        kind="gradient norm",
    ),
    Case(
        "weights of the step before",
        "llama",
        "tp2",
        plant=at(f"{L1}.mlp.up_proj", stale_after_a_step),
        shows_in=1,
        culprits=(f"{L1}.mlp.up_proj",),
        kind="output",
    ),
    Case("another batch on one rank", "llama", "tp2", batch=other_batch, culprits=("(batch)",), kind="batch"),
]


# Pickled, and so without contexts of their own; an error goes by the name of a function.
ON_FOUR = [
    Case("tp and pp", "llama", "tp2,sp,pp2"),
    Case("tp and pp, tied", "qwen3", "tp2,pp2,zbv,mb4"),
    Case("tp and zero 2", "gpt2", "tp2,dp2,zero2"),
    Case("tp and zero 3", "llama", "tp2,sp,dp2,zero3"),
    Case("pp and zero 1", "llama", "pp2,dp2,zero1"),
    Case("replicas of shards", "llama", "dp2,replicas2,zero3"),
    Case("experts, tp and dp", "example", "tp2,sp,dp2,ep2,zero1", EXPERTS),
    Case("experts over all", "example", "tp2,dp2,ep4,zero2", EXPERTS),
    Case("no sum, in two dims", "llama", "tp2,dp2,zero1", plant=down_without_sum, culprits=(f"{L1}.mlp.down_proj",)),
    Case("no sum, in a stage", "llama", "tp2,pp2", plant=down_without_sum, culprits=(f"{L1}.mlp.down_proj",)),
]


def run_some(which: str, numbers: range) -> list[VerifyReport]:
    return [run_case({"RIGHT": RIGHT, "BUGS": BUGS}[which][number]) for number in numbers]


# ---- what verify refuses, and what it says of errors


def misuses() -> list[str]:
    """What is raised for arguments that cannot be compared, on this rank."""
    ids = torch.randint(VOCAB, (3, 5))
    counter = iter(range(100))

    def other_each_time() -> nn.Module:
        made = Chain()
        made.register_buffer("number", torch.tensor(next(counter)))
        return made

    def by_rank() -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return Chain()

    def fails_on_one() -> nn.Module:
        if dist.get_rank() == 1:
            raise OSError("no such file")
        return Chain()

    def lm(logits: Tensor, target: Tensor) -> Tensor:
        return logits.float()

    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        (Chain, "dp2", {}),
        (other_each_time, "tp2", {"loss": next_tokens, "target": ids}),
        (by_rank, "tp2", {"loss": next_tokens, "target": ids}),
        (fails_on_one, "tp2", {}),
        (lambda: 3, "tp2", {}),
        (Chain, "tp2", {"steps": 0}),
        (Chain, 2, {}),
        (Chain, fp.VerifyLayout(fp.init_mesh(tp=2, device="cpu"), plan=CHAIN_PLAN), {}),
        (Chain, fp.VerifyLayout(fp.init_mesh(tp=2, device="cpu"), plan=CHAIN_PLAN), {"loss": lm}),
    ]
    found = []
    for build, asked, options in calls:
        try:
            fp.verify(build, asked, (ids,), **options)
            found.append("nothing")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        if isinstance(asked, fp.VerifyLayout):
            asked.mesh.close()
    return found


def failures() -> list[VerifyReport]:
    """A layout that is refused, and a module that raises on one rank."""
    import transformers

    ids = torch.randint(VOCAB, (4, 5))
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, **SMALL, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes)
    mesh = fp.init_mesh(tp=2, device="cpu")
    refused = fp.verify(lambda: transformers.LlamaForCausalLM(config), mesh, {"input_ids": ids, "labels": ids})
    mesh.close()

    def fails(module: Any) -> None:
        def forward(x: Tensor) -> Tensor:
            raise RuntimeError("a module that cannot")

        module.forward = forward

    failed = run_case(Case("", "sequential", "pp2", plant=at("4", fails)))
    return [refused, failed]


class OnlySingle(Chain):
    """A model that does not run in float64."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.head.weight.dtype == torch.float64:
            raise RuntimeError("no kernel for double")
        return super().forward(ids)


def in_single_precision() -> list[VerifyReport]:
    ids = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    found = []
    for plant in (None, at("blocks.1.down", no_sum)):
        mesh = fp.init_mesh(tp=2, device="cpu")
        with planted(plant):
            asked = fp.VerifyLayout(mesh, plan=CHAIN_PLAN)
            found.append(fp.verify(partial(OnlySingle, 0.5), asked, (ids,), loss=next_tokens, target=ids))
        mesh.close()
    return found
