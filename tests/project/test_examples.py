"""The reference trainer: its data, its model, and the trainer itself, in one process and under torchrun."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.dist import run_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))  # as `python examples/train.py` does

import overlap  # noqa: E402
import report  # noqa: E402
import train  # noqa: E402
from data import Corpus, load_corpus  # noqa: E402
from model import Attention, Llama, LlamaConfig, apply_rotary, rotary_tables  # noqa: E402

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TINY_FLAGS = ["--hidden=32", "--layers=2", "--heads=4", "--kv-heads=2", "--seq-len=32", "--batch=4"]


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Matrices this small gain nothing from a second thread, and lose 100-fold if another process has its core. The
    trainer sets the number of threads, too: give the rest of the test run its own back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return path


def corpus_of(tokens: np.ndarray, seq_len: int = 8, seed: int = 0) -> Corpus:
    return Corpus(tokens.astype(np.uint8), "test", seq_len, seed)


# data


def test_ranks_read_consecutive_parts_of_the_same_global_batch():
    corpus = load_corpus(None, seq_len=16, seed=3, max_bytes=100_000)
    whole = corpus.batch(7, range(6))
    for parts in (2, 3):
        size = 6 // parts
        shares = [corpus.batch(7, range(part * size, (part + 1) * size)) for part in range(parts)]
        for side in (0, 1):
            assert torch.equal(torch.cat([share[side] for share in shares]), whole[side])


def test_batches_change_with_seed_and_step_and_repeat_otherwise():
    corpus = load_corpus(None, seq_len=16, seed=3, max_bytes=100_000)
    again = load_corpus(None, seq_len=16, seed=3, max_bytes=100_000)
    first = corpus.batch(0, range(4))[0]
    assert torch.equal(first, again.batch(0, range(4))[0])
    assert not torch.equal(first, corpus.batch(1, range(4))[0])
    assert not torch.equal(first, dataclasses.replace(corpus, seed=4).batch(0, range(4))[0])


def test_targets_are_the_bytes_after_the_inputs_and_every_start_occurs():
    corpus = corpus_of(np.arange(12), seq_len=8)
    input_ids, targets = corpus.batch(0, range(100))
    assert input_ids.shape == targets.shape == (100, 8)
    assert input_ids.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, input_ids + 1)
    assert set(input_ids[:, 0].tolist()) == {0, 1, 2, 3}


def test_folder_is_read_in_sorted_order_without_hidden_binary_and_test_files(tmp_path: Path):
    for name, content in {
        "b.txt": b"second ",
        "a/z.md": b"first ",
        ".hidden": b"hidden",
        ".git/config": b"hidden",
        "image.bin": b"\x89\0\0",
        "tests/t.py": b"test",
        "c.txt": b"third",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert load_corpus(tmp_path, 4, 0).tokens.tobytes() == b"first second third"
    assert load_corpus(tmp_path, 4, 0, max_bytes=9).tokens.tobytes() == b"first sec"


def test_missing_empty_and_short_text_are_errors_that_say_so(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_corpus(tmp_path / "nowhere", 8, 0)
    with pytest.raises(ValueError, match="no text in"):
        load_corpus(tmp_path, 8, 0)
    (tmp_path / "short.txt").write_text("12345678")
    with pytest.raises(ValueError, match=r"has 8 bytes.*seq_len=8.*at least 9 bytes"):
        load_corpus(tmp_path / "short.txt", 8, 0)
    assert load_corpus(tmp_path / "short.txt", 7, 0).batch(0, range(1))[0].tolist() == [list(b"1234567")]
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        load_corpus(tmp_path / "short.txt", 0, 0)


# model


def test_a_later_token_does_not_change_earlier_logits():
    torch.manual_seed(0)
    model = Llama(TINY)
    input_ids = torch.randint(0, 256, (2, 12))
    changed = input_ids.clone()
    changed[:, 7] += 1
    changed %= 256
    before, after = model(input_ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-3


def test_grouped_query_attention_equals_full_attention_with_repeated_key_value_heads():
    torch.manual_seed(0)
    grouped = Attention(TINY)
    full = Attention(dataclasses.replace(TINY, num_key_value_heads=4))

    def repeat(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)

    state = {name: repeat(w) if name[0] in "kv" else w for name, w in grouped.state_dict().items()}
    full.load_state_dict(state)
    hidden = torch.randn(2, 9, 32)
    cos, sin = rotary_tables(torch.arange(9)[None], 8, 10000.0, like=hidden)
    torch.testing.assert_close(grouped(hidden, cos, sin), full(hidden, cos, sin))


def test_rotated_query_key_products_depend_on_their_distance_only():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 10, 8)
    cos, sin = rotary_tables(torch.arange(10)[None], 8, 100.0, like=query)
    scores = (apply_rotary(query, cos, sin) @ apply_rotary(key, cos, sin).mT).squeeze()
    for distance in range(10):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[0].expand_as(along))
    assert scores[:, 0].unique().numel() == 10


def test_first_prediction_is_close_to_uniform():
    torch.manual_seed(0)
    input_ids = torch.randint(0, 256, (2, 33))
    loss = F.cross_entropy(Llama(TINY)(input_ids[:, :-1]).flatten(0, 1), input_ids[:, 1:].flatten())
    assert abs(loss.item() - np.log(256)) < 0.05


def test_tied_head_is_the_embedding():
    model = Llama(dataclasses.replace(TINY, tie_word_embeddings=True))
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, r"hidden_size \(32\).*num_attention_heads \(5\)"),
        ({"num_attention_heads": 32}, r"hidden_size \(32\).*even number"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"num_hidden_layers": 0}, "at least 1"),
    ],
)
def test_impossible_model_sizes_are_errors(change: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


# trainer


def test_default_layout_takes_two_tensor_parallel_ranks_and_leaves_the_rest_to_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {}
    for world in (1, 2, 3, 4):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        flags = train.parse_arguments([*TINY_FLAGS, "--batch=12", "--out", str(tmp_path)])
        found[world] = train.make_job(flags)[1].words
    assert found == {1: "one rank", 2: "tp2", 3: "dp3", 4: "tp2 dp2"}


def test_microbatches_have_the_samples_of_all_data_parallel_ranks() -> None:
    job = train.Job(TINY, steps=1, batch=8, seq_len=8, lr=1.0, seed=0, dtype="float32")
    layout = train.fp.Layout.parse("dp2 acc2")
    assert train.microbatches(job, layout) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert train.microbatches(job, train.fp.Layout.parse("pp2 mb4")) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_learning_rate_warms_up_then_falls_to_a_tenth():
    job = train.Job(TINY, steps=100, batch=1, seq_len=8, lr=1.0, seed=0, dtype="float32")
    factors = [job.lr_factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1, rel=1e-3)
    assert max(factors) == factors[9] > 0.95
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, rel=0.01)


def test_training_in_one_process_lowers_the_loss(text: Path):
    job = train.Job(TINY, steps=30, batch=4, seq_len=32, lr=1e-2, seed=0, dtype="float32")
    run = train.train_single(job, load_corpus(text, 32, 0))
    assert len(run.losses) == len(run.seconds) == 30
    assert run.losses[0] == pytest.approx(np.log(256), abs=0.05)
    assert run.losses[-1] < 2.0


@pytest.mark.expensive
def test_trainer_without_a_launcher_fails_when_the_runs_differ(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = [*TINY_FLAGS, "--steps", "2", "--data", str(text), "--out", str(tmp_path)]
    assert train.main(flags) == 0
    single = train.train_single
    monkeypatch.setattr(train, "train_single", lambda job, *rest: single(dataclasses.replace(job, lr=0.1), *rest))
    assert train.main(flags) == 1
    assert not json.loads((tmp_path / "report.json").read_text())["difference"]["passed"]


def test_comparison_passes_up_to_the_tolerance_and_never_with_nan():
    def passed(loss: float, tolerance: float | None) -> bool:
        return report.Comparison(report.Run("a", 1, [1.0, loss]), report.Run("b", 1, [1.0, 1.0]), tolerance).passed

    assert passed(1.25, 0.25)
    assert not passed(1.25, 0.2)
    assert not passed(float("nan"), 1e9)
    assert passed(2.0, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--layout tp2", "ranks: pp x dp_replicate x dp_shard x cp x tp is 2, but there are 1 ranks"),
        ("--layout tpp2", "did you mean"),
        ("--kv-heads 3", "num_key_value_heads (3)"),
        ("--data no_such_file", "no_such_file"),
        ("--steps 0", "must be positive"),
        ("--out README.md", "README.md"),
        ("--layout acc3", "batch: a batch of 8 cannot be dealt to 1 data-parallel ranks in 3 passes"),
        ("--layout nvme", "nvme needs one"),
        ("--layout cpu+parameters", "offload of parameters is for ZeRO stage 3"),
        ("--experts 4 --top-k 5", "num_experts_per_tok (5) must be 1 to num_experts (4)"),
        ("--precision bf16 --dtype float64", "--precision bf16 has float32 masters, but --dtype is float64"),
        ("--layout cp2 --experts 4", "balance losses are not for split sequences: leave --experts out"),
        ("--torch-threads 0", "--torch-threads must be at least 1"),
    ],
)
def test_wrong_flags_are_one_line_and_status_2(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").touch()
    assert train.main(flags.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def trained(arguments: list[str]) -> tuple[int, str]:
    """As a rank: the exit status, and what it has printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return train.main(arguments), said.getvalue()


def trained_under_torchrun(arguments: list[str], ranks: int) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "examples/train.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,  # ends a hang; two ranks of a busy machine may take a minute
    )
    assert done.returncode == 0, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("layout", "flags", "splits"),
    [
        pytest.param("tp2 sp", [], "parameters", marks=pytest.mark.slow),
        pytest.param("dp2 zero3 acc2", [], "states", marks=pytest.mark.slow),
        ("pp2 zbv mb2", ["--layers=4"], "parameters"),
        ("dp2 ep2 zero3", ["--experts=4"], "states"),
        ("cp2 zero1", ["--dtype=float64"], "states"),
        pytest.param("cp2 tp2 sp", ["--dtype=float64"], "parameters", marks=pytest.mark.slow),
        pytest.param("pp2 cp2 mb2", ["--dtype=float64"], "parameters", marks=pytest.mark.slow),
        pytest.param("pp2 mb2 acc2 full", ["--experts=4"], "parameters", marks=pytest.mark.slow),
    ],
    ids=[
        "tensor",
        "zero",
        "pipeline",
        "experts_zero under torchrun",
        "context",
        "context_tensor",
        "context_pipeline",
        "experts_pipeline",
    ],
)
def test_ranks_match_a_single_process(layout: str, flags: list[str], splits: str, text: Path, tmp_path: Path):
    ranks = train.fp.Layout.parse(layout).world_size
    arguments = [*TINY_FLAGS, "--steps=6", "--lr=1e-2", "--layout", layout, *flags]
    arguments += ["--data", str(text), "--out", str(tmp_path)]
    if layout == "dp2 ep2 zero3":  # one of them by the whole way of the command
        status, said = trained_under_torchrun(arguments, ranks)
    else:
        (status, said), *others = run_ranks(ranks, trained, arguments, timeout=280.0)
        assert others == [(0, "")] * (ranks - 1)
    assert status == 0
    assert f"layout {train.fp.Layout.parse(layout).words}: {ranks} ranks" in said  # what explain says
    assert (tmp_path / "layout.svg").read_text().startswith("<svg")

    figures = json.loads((tmp_path / "report.json").read_text())
    assert train.fp.Layout.parse(figures["settings"]["layout"]) == train.fp.Layout.parse(layout)
    parts, whole = figures["parallel"]["bytes_per_rank"], figures["single"]["bytes_per_rank"]
    if splits == "states":
        assert parts["parameters"] > 0.5 * whole["parameters"]  # this rank's half, and the layer that runs
        assert parts["states"] == pytest.approx(whole["states"] / 2, rel=0.02)
    else:
        assert parts["parameters"] < 0.8 * whole["parameters"]
    assert parts["activations"] < 0.9 * whole["activations"]
    parallel, single = figures["parallel"]["losses"], figures["single"]["losses"]
    assert len(parallel) == len(single) == 6
    assert parallel[-1] < parallel[0] - 0.1
    assert max(abs(a - b) for a, b in zip(parallel, single, strict=True)) == figures["difference"]["max"]
    assert figures["difference"]["max"] <= (1e-9 if "--dtype=float64" in flags else 1e-4)
    assert figures["difference"]["passed"]
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    if "--experts=4" in flags:
        loads = figures["parallel"]["expert_loads"]
        assert loads[0] == figures["single"]["expert_loads"][0]
        assert [sum(layer) for layer in loads[-1]] == [2 * 4 * 32] * 2  # two of four experts for every token
        assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.expensive
def test_a_step_of_every_stage_is_drawn_with_its_waits(tmp_path: Path):
    if dist.is_initialized():
        pytest.fail("a test before left its process group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        traces = {stage: overlap.traced_step(stage, hidden=8, layers=2) for stage in range(4)}
    finally:
        dist.destroy_process_group()
    for found in traces.values():
        assert [name for name, *_ in found.phases] == ["forward", "backward", "step"]
    overlap.draw(traces, tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").stat().st_size > 10_000
