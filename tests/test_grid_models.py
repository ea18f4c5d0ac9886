"""Whole models on tensor-parallel grids by `parallelize`, against one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest

import fastpar as fp
from tests.dist import run_ranks
from tests.grid_ranks import train_all

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
    ("llama", fp.GridSpec(2, 2, 1), UNEVEN | {"num_attention_heads": 18, "head_dim": 2}),
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
