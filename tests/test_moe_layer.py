"""MoELayer in every layout against one process, and one process against a loop over tokens in float64."""

from __future__ import annotations

import pytest
import torch

from fastpar.ops.moe_mlp import ExpertRule
from tests.dist import run_ranks
from tests.moe_layer_ranks import all_layouts, train

RULES = [ExpertRule(), ExpertRule("gelu", weigh="before"), ExpertRule("clamped_swiglu", weigh="input")]


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_equals_one_process(world):
    wanted = {rule: train(None, rule) for rule in RULES}
    results = run_ranks(world, all_layouts, RULES)
    assert len(results[0]) == {2: 6, 4: 18}[world] * len(RULES)
    for found in results:
        for layout, values in found:
            want = wanted[layout["rule"]]
            assert values.keys() == want.keys()
            for name, value in values.items():
                torch.testing.assert_close(
                    value, want[name], rtol=1e-6, atol=1e-6, msg=lambda m: f"{layout}, {name}: {m}"
                )
