"""The walk over Hugging Face's language models: every layout of every family is right, or refused.

Those that are not slow differ in structure: latent attention with routed and shared experts, gates in the queries and
linear attention, layers of a plan with gathered outputs, a norm over all heads, layers without modules for their MLPs,
heads interleaved in one weight; linears with a forward of their own over shared key/value heads, an embedding that
cannot be split, routers that read the tokens' ids. docs/families_table.py writes the results of the walk into
docs/families.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import run_ranks
from tests.tensor.family_models import families
from tests.tensor.family_ranks import walk_family

pytest.importorskip("transformers")

CHOSEN = {"deepseek_v2", "qwen3_next", "phi3", "opt", "gpt_neox", "falcon", "inkling_text", "deepseek_v4"}


def cases() -> list[Any]:
    return [
        pytest.param(*family[:2], id=family[0], marks=[] if family[0] in CHOSEN else pytest.mark.slow)
        for family in families()
    ]


@pytest.mark.parametrize(("model_type", "class_name"), cases())
def test_family_computes_the_same_in_every_layout_or_is_refused(model_type: str, class_name: str) -> None:
    results = run_ranks(2, walk_family, model_type, class_name, ["tp2", "tp2 sp", "ep2"], timeout=240.0)
    if model_type not in CHOSEN:
        results += run_ranks(2, walk_family, model_type, class_name, ["cp2"], timeout=240.0)
        results += run_ranks(3, walk_family, model_type, class_name, ["tp3", "tp3 sp"], timeout=240.0)
    found = {f"rank {i % 2}, {name}": row["result"] for i, rank in enumerate(results) for name, row in rank.items()}
    wrong = {
        name: text for name, text in found.items() if text not in ("equal", "-") and not text.startswith("refused")
    }
    assert not wrong
    if model_type in CHOSEN:
        assert set(found.values()) <= {"equal", "-"}
