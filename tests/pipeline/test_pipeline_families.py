"""Pipelines over transformers' language models, in tiny configurations with noise on every parameter: the loss and the
gradients of one process, or a refusal that says why.
"""

from __future__ import annotations

import pytest
import torch

from fastpar.pipeline import partition
from tests.pipeline.pipeline_families import all_families, family_batch, run_family_pipeline
from tests.tensor.family_models import tiny_config, tiny_model

# Scaled embeddings and capped logits; layers that return no tuple though they say so; positions from masks, with a
# norm of another name; alibi; a loss that is not shifted; experts; another kind of mixer.
QUICK = [
    ("gemma2", "Gemma2ForCausalLM", "1f1b"),
    ("gemma3_text", "Gemma3ForCausalLM", "zbv"),
    ("granite", "GraniteForCausalLM", "1f1b"),
    ("opt", "OPTForCausalLM", "1f1b"),
    ("bloom", "BloomForCausalLM", "zbv"),
    ("bert", "BertForMaskedLM", "1f1b"),
    ("mixtral", "MixtralForCausalLM", "1f1b"),
    ("lfm2", "Lfm2ForCausalLM", "1f1b"),
]


@pytest.mark.parametrize(("model_type", "name", "schedule"), QUICK, ids=[f"{c[1]}-{c[2]}" for c in QUICK])
def test_families_of_other_shapes_equal_one_process(model_type: str, name: str, schedule: str) -> None:
    assert run_family_pipeline(model_type, name, schedule) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "name"), all_families(), ids=lambda value: str(value))
def test_every_family_equals_one_process_or_is_refused(model_type: str, name: str) -> None:
    result = run_family_pipeline(model_type, name)
    if result.startswith("not built"):
        pytest.skip(result)
    assert result.startswith(("equal", "refused")), result


def test_balance_losses_over_all_layers_are_refused() -> None:
    """Routers' logits are recorded on every part for its own layers only; the loss would change, and nothing fail."""
    import transformers

    config = tiny_config("mixtral")
    config.output_router_logits, config.use_cache = True, False
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    ids, _ = family_batch()
    assert model(ids, labels=ids).aux_loss != 0
    with pytest.raises(ValueError, match=r"part 1 .* of MixtralForCausalLM .*the loss is .* adds something of other"):
        partition(model, num_parts=2, loss=True)
    assert partition(model, num_parts=2).num_parts == 2, "logits alone need no router"


def test_a_sharded_head_refuses_logits_that_are_capped_after_it() -> None:
    model = tiny_model("gemma2", "Gemma2ForCausalLM")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"does something to the logits after lm_head .*shard_head=False"):
        partition(model, num_parts=2, shard_head=True)
