"""`fp.verify`: silent on right models, and the module of a planted error is named.

Several cases run in one go: see `chunk`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastpar as fp
from fastpar import cli
from fastpar.verification import VerifyError, VerifyReport, command
from fastpar.verification.alignment import Alignment, overlaps
from fastpar.verification.inputs import add_noise, seeded
from fastpar.verification.layout import ModuleHints
from fastpar.verification.pieces import take
from fastpar.verification.report import VerifyFinding
from fastpar.verification.tiny import tiny_model
from fastpar.verification.words import parse_layout
from tests.dist import run_ranks
from tests.verification import verify_ranks
from tests.verification.verify_ranks import BUGS, RIGHT, Case, Chain, next_tokens

CHUNK = 8  # cases to a run of the ranks


@functools.cache
def chunk(which: str, number: int) -> list[list[VerifyReport]]:
    """Of some cases, by rank."""
    last = min((number + 1) * CHUNK, len(getattr(verify_ranks, which)))
    return run_ranks(2, verify_ranks.run_some, which, range(number * CHUNK, last), timeout=240)


def reports(case: Case) -> list[VerifyReport]:
    """By rank."""
    which = "RIGHT" if case in RIGHT else "BUGS"
    number = (RIGHT if which == "RIGHT" else BUGS).index(case)
    return [of_rank[number % CHUNK] for of_rank in chunk(which, number // CHUNK)]


def named(name: str) -> Case:
    return next(case for case in BUGS if case.name == name)


def name_of(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", RIGHT, ids=name_of)
def test_a_right_model_is_equal(case: Case) -> None:
    report = reports(case)[0]
    assert report.ok, str(report)
    report.raise_if_wrong()
    compared = [check for check in report.checks if check.status == "equal"]
    assert len(compared) > 100
    assert {check.kind for check in compared} >= {"input", "output", "loss", "gradient", "gradient norm", "update"}
    assert {check.step for check in compared} >= {0, 1}


@pytest.mark.parametrize("case", BUGS, ids=name_of)
def test_the_module_of_a_planted_error_is_named(case: Case) -> None:
    report = reports(case)[0]
    assert report.culprit is not None
    assert report.culprit.module in case.culprits, str(report)
    assert case.kind in (None, report.culprit.kind), str(report)
    assert report.culprit.ranks
    with pytest.raises(VerifyError, match="differs from the whole model, first in"):
        report.raise_if_wrong()


@pytest.mark.parametrize("cases", [RIGHT, BUGS], ids=["right", "wrong"])
def test_every_rank_gets_the_same_report(cases: list[Case]) -> None:
    for case in cases:
        first, second = reports(case)
        assert first.to_json() == second.to_json()
        assert str(first) == str(second)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(verify_ranks.ON_FOUR)), ids=lambda i: verify_ranks.ON_FOUR[i].name)
def test_compositions_on_four_ranks(index: int) -> None:
    case = verify_ranks.ON_FOUR[index]
    for report in run_ranks(4, verify_ranks.run_case, case, timeout=240):
        assert report.ok == (not case.culprits), str(report)
        if report.culprit is not None:
            assert report.culprit.module in case.culprits, str(report)


def test_findings_tell_class_style_and_ranks() -> None:
    report = reports(named("masks of dropout per rank"))[0]
    first = report.findings[0]
    assert (first.cls, first.style, first.ranks, first.step) == ("Dropout", "dropout", (1,), 0)
    assert first.error > 0.1
    assert first.rounding < 1e-5
    stale = reports(named("weights of the step before"))[0].findings[0]
    assert stale.step == 1
    assert "other weights than the updated ones" in stale.what


def test_one_rank_in_one_process_is_equal_to_itself() -> None:
    ids = torch.randint(verify_ranks.VOCAB, (2, 6))
    mesh = fp.init_mesh(device="cpu")
    layout = fp.VerifyLayout(mesh, plan=verify_ranks.CHAIN_PLAN)
    report = fp.verify(Chain, layout, (ids,), loss=next_tokens, target=ids)
    mesh.close()
    assert report.ok
    assert "equal to the whole model" in str(report)
    assert len(report.table(everything=True).splitlines()) > 100
    json.dumps(report.to_json())


class Cancelling(nn.Module):
    """Logits that lose most of their digits in float32, and few in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(verify_ranks.VOCAB, 8)
        self.head = nn.Linear(8, verify_ranks.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)) + 1e4 - 1e4


def test_what_rounding_alone_does_to_a_model_is_no_difference() -> None:
    ids = torch.randint(verify_ranks.VOCAB, (2, 6))
    mesh = fp.init_mesh(device="cpu")
    report = fp.verify(Cancelling, fp.VerifyLayout(mesh, plan={}), (ids,), loss=next_tokens, target=ids)
    mesh.close()
    assert report.ok, str(report)
    (logits,) = [c for c in report.checks if (c.module, c.kind, c.step) == ("", "output", 0)]
    assert logits.error == logits.rounding > 1e-4  # ours differs from float64 as the whole model's float32 does


def test_what_cannot_be_compared_is_an_error_on_every_rank() -> None:
    first, second = run_ranks(2, verify_ranks.misuses)
    expected = [
        ("ValueError", "batch has 3 rows, which 2 data-parallel ranks"),
        ("ValueError", "build() must give the same model on every rank and in every call, but number differs"),
        ("ValueError", "build() must give the same model on every rank and in every call, but embed.weight differs"),
        ("OSError", "no such file"),
        ("TypeError", "build() must return an nn.Module, got int"),
        ("ValueError", "steps must be at least 1, got 0"),
        ("TypeError", "layout must be a VerifyLayout, a Mesh or words, got int"),
        ("TypeError", "the model returned a tensor of shape (3, 5, 257) where a loss was expected"),
        ("TypeError", "the loss returned a tensor of shape (3, 5, 257) where a loss was expected"),
    ]
    for (kind, text), *found in zip(expected, first, second, strict=True):
        for line in found:
            assert text in line
        assert any(line.startswith(kind) for line in found)
    assert first[3] == "ValueError: verify cannot begin: rank 1 raised OSError: no such file"


def test_refusals_and_errors_are_findings_with_their_text() -> None:
    for refused, failed in run_ranks(2, verify_ranks.failures):
        assert refused.refused
        assert not refused.ok
        assert "refused. rank 0: ValueError: " in str(refused)
        assert "attention heads (1) must be divisible by the tensor-parallel size" in str(refused)
        first = failed.findings[0]
        assert (first.kind, first.module) == ("error", "4")
        assert "failed in step 1, in 4: rank 1: PipelineError" in str(failed)
        assert "a module that cannot" in str(failed)


def test_a_model_that_does_not_run_in_float64_is_compared_in_its_own_dtype() -> None:
    right, wrong = run_ranks(2, verify_ranks.in_single_precision)[0]
    assert right.ok, str(right)
    notes = " ".join(right.notes)
    assert "does not run in float64 (no kernel for double)" in notes
    assert "dropout (p=0.5) that the code of the model draws by itself was switched off" in notes
    assert wrong.findings[0].module == "blocks.1.down"


# ---- parts


def test_noise_moves_norms_and_biases_alike_in_every_build() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    before = [p.clone() for p in models[0].parameters()]
    for model in models:
        add_noise(model, 1.0)
    for old, new, other in zip(before, models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(new, other)
        assert bool((old != new).all())


def placed(hints: ModuleHints, path: str, whole: torch.Tensor, locals_: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    places = Alignment(hints, (2, 5)).places(path, True, whole, locals_)
    return [[take(whole, index) for index in each] for each in places]


def test_parts_of_sequences_in_flattened_tokens_are_found() -> None:
    whole = torch.arange(10.0).reshape(10, 1)
    sequences = whole.reshape(2, 5, 1)
    parts = [sequences[:, :3].reshape(6, 1), sequences[:, 3:].reshape(4, 1)]
    assert any(all(map(torch.equal, found, parts)) for found in placed(ModuleHints(), "gate", whole, parts))


def test_heads_of_a_block_go_as_its_layers_say() -> None:
    rows = {"attn.k_proj": (6, (((0, 2), (2, 4)), ((2, 4), (4, 6))))}  # 3 heads of 2 features, one of them shared
    hints = ModuleHints(rows=rows, blocks=["attn"])
    whole = torch.randn(1, 3, 4, 2)  # [B, heads, S, head_dim]
    parts = [whole[:, :2], whole[:, 1:]]
    (found,) = placed(hints, "attn.k_norm", whole, parts)
    assert all(map(torch.equal, found, parts))
    (places,) = Alignment(hints, None).places("attn.k_norm", True, whole, parts)
    assert overlaps(places)
    assert not list(Alignment(hints, None).places("mlp.act", True, whole, parts)), "heads are those of their block only"


def test_a_column_parallel_layer_is_held_to_its_own_rows() -> None:
    hints = ModuleHints(rows={"qkv": (4, (((0, 1), (2, 3)), ((1, 2), (3, 4))))})
    whole = torch.arange(4.0).reshape(1, 4)
    (found,) = placed(hints, "qkv", whole, [torch.zeros(1, 2), torch.zeros(1, 2)])
    assert [x.tolist() for x in found] == [[[0.0, 2.0]], [[1.0, 3.0]]]


def test_of_what_a_model_returns_logits_alone_may_be_split() -> None:
    whole = torch.randn(2, 5, 4)
    assert placed(ModuleHints(), "", whole, list(whole.split(2, dim=-1)))
    assert not placed(ModuleHints(), "", whole, list(whole.tensor_split(2, dim=1)))


# ---- layouts and models by name


@pytest.mark.parametrize(
    ("text", "sizes", "world"),
    [
        ("tp2,sp", {"tp": 2}, 2),
        ("tp2,pp2,zero2", {"tp": 2, "pp": 2}, 4),
        ("ep2", {"ep": 2, "dp_shard": 2}, 2),
        ("tp2,ep4", {"tp": 2, "ep": 4, "dp_shard": 2}, 4),
        ("tp2,ep2", {"tp": 2, "ep": 2}, 2),
        ("dp2,replicas=2,zero3", {"dp_shard": 2, "dp_replicate": 2}, 4),
    ],
)
def test_layouts_in_words(text: str, sizes: dict[str, int], world: int) -> None:
    found = parse_layout(text)
    assert (found.sizes, found.world_size) == (sizes, world)


@pytest.mark.parametrize("text", ["", "tp", "tp0", "zero4", "tp2;sp", "tp-2", "zero"])
def test_words_that_are_none_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r"has an unknown word|stage must be|must be at least 1"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("google/gemma-2-2b", "Gemma2ForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM"),
        ("Gemma2ForCausalLM", "Gemma2ForCausalLM"),
        ("google/gemma-3-1b-it", "Gemma3ForCausalLM"),
        ("meta-llama/Meta-Llama-3.1-8B", "LlamaForCausalLM"),
        ("Qwen/Qwen2.5-7B", "Qwen2ForCausalLM"),
        ("qwen3-moe", "Qwen3MoeForCausalLM"),
        ("mistralai/Mixtral-8x7B-v0.1", "MixtralForCausalLM"),
        ("openai-community/gpt2-xl", "GPT2LMHeadModel"),
        ("microsoft/phi-3-mini", "Phi3ForCausalLM"),
    ],
)
def test_names_stand_for_classes(name: str, cls: str) -> None:
    assert tiny_model(name).model_class == cls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llamma", "near misses: llama"),
        ("org/unheard-of-7b", "is no model that the installed transformers know"),
        ("Qwen/Qwen3-30B-A3B", "say qwen3_moe, or qwen3"),
        ("org/llama-mistral", "may be llama or mistral"),
    ],
)
def test_names_that_are_unknown_or_ambiguous_are_errors(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tiny_model(name)


def test_tiny_configurations_keep_ratios() -> None:
    gemma = tiny_model("gemma2").numbers
    assert gemma["num_key_value_heads"] < gemma["num_attention_heads"]
    assert gemma["hidden_size"] > gemma["num_attention_heads"] * gemma["head_dim"], "as 2304 is more than 8 * 256"
    assert len(set(gemma["layer_types"])) == gemma["num_hidden_layers"] == 2
    assert gemma["vocab_size"] % 2
    assert tiny_model("falcon").numbers["num_kv_heads"] == tiny_model("falcon").numbers["num_attention_heads"]
    gpt2 = tiny_model("gpt2")
    assert "attn_pdrop" in gpt2.switched_off
    model: Any = gpt2.build()
    assert sum(p.numel() for p in model.parameters()) < 100_000


def test_a_configuration_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    given = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
    file.write_text(json.dumps({**given, "attention_bias": True}))
    for name in (str(file), str(tmp_path)):
        numbers = tiny_model(name).numbers
        assert (numbers["num_key_value_heads"], numbers["attention_bias"]) == (1, True)
    file.write_text('{"model_type": "lama"}')
    with pytest.raises(ValueError, match=r"model_type is 'lama'; near misses: .*llama"):
        tiny_model(str(file))


# ---- the command


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ((), 0),
        ((VerifyFinding("output", "m", "", "", "output"),), 1),
        ((VerifyFinding("refused", "", "", "", "no"),), 2),
    ],
)
def test_exit_status_tells_what_was_found(
    findings: Any, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_run", lambda *_: VerifyReport("tp=2", 2, findings))
    assert cli.main(["verify", "--model", "llama", "--layout", "tp2", "--json"]) == status
    assert json.loads(capsys.readouterr().out)["ok"] == (status == 0)


def test_misuse_of_the_command_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--model", "llama", "--layout", "tq2"]) == 2
    assert cli.main(["verify", "--model", "lamma", "--layout", "tp2"]) == 2
    assert cli.main(["verify", "--model", "llama", "--layout", "dp2", "--rows", "3"]) == 2
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify", "--layout", "tp2"])
    assert stop.value.code == 2
    assert "has an unknown word" in capsys.readouterr().err


def test_ranks_of_the_command_go_through_sets_in_one_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Gemma 3 goes through its kinds of layers, and calls one module for each."""
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    monkeypatch.delenv("PYTHONHASHSEED")

    def spawn(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"hashes begin with {os.environ.get('PYTHONHASHSEED')}")

    monkeypatch.setattr(sys.modules["torch.multiprocessing.spawn"], "spawn", spawn)
    assert cli.main(["verify", "--model", "llama", "--layout", "tp2"]) == 2
    assert "hashes begin with 0" in capsys.readouterr().err


@pytest.mark.ranks
def test_the_command_starts_its_ranks() -> None:
    line = [sys.executable, "-m", "fastpar", "verify", "--model", "meta-llama/Llama-3.1-8B", "--layout", "tp2", "-v"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("LlamaForCausalLM, tiny\ntp=2 on 2 ranks: equal to the whole model in ")
    assert "model.layers.0.self_attn.o_proj" in done.stdout


@pytest.mark.parametrize("has_begun", [False, True])
def test_seeds_are_of_generators_that_are_brought_back(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    """CUDA's too where it has begun; where it has not, it would begin with the last seed that was said."""
    said: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_begun)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["before"])
    monkeypatch.setattr(torch.cuda, "manual_seed_all", said.append)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", said.append)
    before = torch.get_rng_state()
    with seeded(3):
        assert torch.initial_seed() == 3
    assert torch.get_rng_state().equal(before)
    assert said == ([3, ["before"]] if has_begun else [])
