"""Whole models on tensor-parallel grids by `parallelize`, against one process, in float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fastpar as fp
from fastpar.parallel.on_grid import _BatchCut
from tests.dist import run_ranks
from tests.tensor.grid_ranks import (
    other_doors,
    own_model_differences,
    refusals,
    train_all,
    trained_by_zero,
    trained_on_from_another_grid,
)

pytest.importorskip("transformers")

FEATURES: Any = "features"
# Nothing divides: features 27 and 14, heads 3, sequences 2 and 1, tokens 4 and 3.
UNEVEN = {"hidden_size": 54, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
SHARED = {"hidden_size": 36}  # Mistral's two key/value heads over four ranks
FOUR: list[Any] = [
    ("llama", fp.GridSpec(1, 2, 2), UNEVEN),
    ("gpt2", fp.GridSpec(2, 2, 1), {}),
    ("llama", fp.GridSpec.summa(2), {}),
]
MORE_OF_FOUR: list[Any] = [
    ("gpt2", fp.GridSpec(1, 2, 2), {}),
    ("gpt2", fp.GridSpec.summa(2), {}),
    ("gpt2", fp.GridSpec.summa(2, stream=True), {}),
    ("llama", fp.GridSpec.summa(2, stream=True), {}),
    ("qwen3", fp.GridSpec(2, 2, 1), UNEVEN | {"num_attention_heads": 20, "head_dim": 2}),
    ("mistral", fp.GridSpec(2, 2, 1), SHARED),
    ("qwen3", fp.GridSpec(2, 1, 2), {}),
    ("qwen3", fp.GridSpec(1, 2, 2, FEATURES, replicas=2), {}),
    ("llama", fp.GridSpec.axonn(1, 2, 2), {}),
    ("llama", fp.GridSpec.axonn(2, 2, 1), {}),
    ("llama", fp.GridSpec(1, 4, 1), {}),
    ("gpt2", fp.GridSpec(4, 1, 1), {}),
    ("gpt2", fp.GridSpec(1, 4, 1, FEATURES), {}),
]
EIGHT: list[Any] = [
    ("llama", fp.GridSpec.cube(2), SHARED),
    ("gpt2", fp.GridSpec.cube(2), {}),
    ("llama", fp.GridSpec.axonn(2, 2, 2), {}),
]


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(4, FOUR, id="4 ranks"),
        pytest.param(4, MORE_OF_FOUR, id="4 ranks, more", marks=pytest.mark.slow),
        pytest.param(8, EIGHT, id="8 ranks", marks=pytest.mark.slow),
    ],
)
def test_a_model_on_a_grid_trains_as_one_process(ranks: int, cases: list[Any]) -> None:
    for found in run_ranks(ranks, train_all, cases, timeout=300.0):
        wrong = {case: {k: v for k, v in by.items() if not v < 1e-9} for case, by in found.items()}
        assert not {case: by for case, by in wrong.items() if by}


def own_models(specs: list[fp.GridSpec]) -> dict[str, dict[str, float]]:
    return {repr(spec): own_model_differences(spec) for spec in specs}


def test_a_written_plan_works_and_rows_of_sequences_go_with_them() -> None:
    for found in run_ranks(
        4, own_models, [fp.GridSpec(2, 1, 2), fp.GridSpec.summa(2), fp.GridSpec.summa(2, stream=True)]
    ):
        wrong = {spec: {k: v for k, v in by.items() if not v < 1e-10} for spec, by in found.items()}
        assert not {spec: by for spec, by in wrong.items() if by}


@pytest.mark.expensive
def test_what_a_model_returns_generates_drops_and_loads_is_that_of_one_process() -> None:
    for found in run_ranks(4, other_doors):
        assert not {k: v for k, v in found.items() if not v < 1e-9}


@pytest.mark.expensive
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_zero_trains_a_model_on_a_grid_as_one_process_does(stage: int) -> None:
    for found in run_ranks(4, trained_by_zero, stage):
        assert not {k: v for k, v in found.items() if not v < 1e-9}


def test_a_run_goes_on_from_the_checkpoint_of_another_grid(tmp_path: Path) -> None:
    """Rows of [q; k; v] that one rank of y has by heads of x, where another grid has two ranks of y."""
    for found in run_ranks(4, trained_on_from_another_grid, str(tmp_path)):
        assert not {k: v for k, v in found.items() if not v < 1e-9}


def test_what_does_not_fit_a_grid_is_refused_with_what_would() -> None:
    words = {
        "heads": "self_attn: 6 heads must be divisible by tp_x * tp_y (2 * 2); grids of 4 ranks that work: (1, 1, 4), ",
        "written": "layers.0.attention: 6 heads must be divisible",
        "stream": "tp_grid needs to know where the residual stream is split",
        "whole": "layers.0.mlp.0 in the block 'layers.0.mlp' does not read the block's input",
        "gather": "use a grid with x=1",
        "spread": 'use spread="rows"',
        "cp": "cannot be split over {'cp': 2} as well",
        "experts": "has style 'expert', and experts cannot be split with tp_grid=(2, 2, 1)",
        "features": "layers.0.norm reads [4, 8, 3], and on a grid that cuts features a rank has 8 of the 16",
        "draws": "same mask on other samples and features. Use an nn.Dropout module there, which fastpar replaces, set "
        "the dropout to 0, or use a mesh without tp_grid",
        "changed": "[]",
        "small batch": "batch 3 cannot be cut over tp_z=4",
        "empty rank": "batch 5 leaves a rank of tp_z=4 without a sequence",
    }
    for said in run_ranks(4, refusals):
        assert [name for name, part in words.items() if part not in said[name]] == []


def test_rows_of_sequences_and_of_their_heads_go_with_them() -> None:
    """BLOOM's ALiBi has batch and heads in one dim; tables and masks have none of their own."""
    region: Any = SimpleNamespace(shape=(4, 8, 6), batch_range=(2, 4), is_whole=False)
    hidden, alibi, mask = torch.zeros(2, 8, 6), torch.arange(12.0)[:, None, None], torch.arange(4.0)[:, None]
    tables, whole_mask = torch.zeros(12, 3), torch.zeros(1, 1, 12, 12)
    cut = _BatchCut("h.0", region, frozenset({3}))
    args, kwargs = cut(nn.Identity(), (hidden, alibi), {"mask": mask, "tables": tables, "whole": whole_mask})
    assert torch.equal(args[1], alibi[6:])
    assert torch.equal(kwargs["mask"], mask[2:])
    assert kwargs["tables"] is tables
    assert kwargs["whole"] is whole_mask
    with pytest.raises(ValueError, match="had 3 rows for each sequence before, and the batch has 4"):
        cut(nn.Identity(), (hidden, alibi[:8]), {})
    of_tokens = torch.zeros(8, 4, 6)  # as many rows as tokens
    assert _BatchCut("h.0", region, frozenset({2}))(nn.Identity(), (hidden, of_tokens), {})[0][1] is of_tokens
