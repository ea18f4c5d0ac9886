"""How known models and libraries route: the rule, the loss and the bias of each in one table.

    name          scores               weights                      choice                     balance
    mixtral       softmax, before      normalised                   -                          huggingface 1e-3
    qwen2_moe     softmax, before      as they are                  -                          huggingface 1e-3
    qwen3_moe     softmax, before      normalised                   -                          huggingface 1e-3
    deepseek_v3   sigmoid, before      normalised, + 1e-20, * 2.5   bias; 4 of 8 groups, top2  sequence 1e-4, bias 1e-3
    gpt_oss       softmax, after       as they are                  bias of the linear         huggingface 1e-3
    llama4        sigmoid, after       on the experts' input        top 1                      none
    switch        softmax, before      as they are                  top 1, input jitter        switch 1e-2, z 1e-3
    megatron      softmax, after       as they are                  groups by top_k / groups   switch 1e-2
    torchtitan    sigmoid, before      as they are                  bias, groups by top2       bias 1e-3, centered

What differs between models of a name (top_k, groups, qwen's `norm_topk_prob`) is that of the released ones; `routing`
changes it. Sources: transformers 5.23's router modules, against which tests compare; Megatron-LM's
`topk_routing_with_score_function` and torchtitan's `TokenChoiceTopKRouter`, whose formulas tests spell out.

Decided: precision is not a convention. Logits and weights are float32 here in all of them; transformers' Qwen and
gpt-oss routers round both to the model's dtype. transformers takes the huggingface loss over all layers at once; a
router has its own layer only, so that over L layers the loss is L numbers of `coeff` each. For transformers' mean,
divide `coeff` by L.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fastpar.arguments import checked, checked_fields
from fastpar.expert.losses import LossRule
from fastpar.expert.router import BiasRule, Router
from fastpar.ops.moe.route import RouteRule


@checked_fields
@dataclass(frozen=True)
class RouterPreset:
    """What a model's router is.

    rule       how experts are chosen and weighed
    losses     what is added to the loss
    bias_rule  how the selection bias moves; None: there is none
    bias       whether the linear has one
    jitter     of the input, in training
    weigh      where the weights come in: `ExpertRule.weigh`
    """

    rule: RouteRule
    losses: LossRule = field(default_factory=LossRule)
    bias_rule: BiasRule | None = None
    bias: bool = False
    jitter: float = 0.0
    weigh: str = "after"

    def routing(self, **changes: Any) -> RouterPreset:
        """The same with other fields of the rule: `preset("qwen3_moe").routing(top_k=4)`."""
        return replace(self, rule=replace(self.rule, **changes))

    def router(self, hidden: int, num_experts: int, **options: Any) -> Router:
        """A `Router` of this kind; options as for that, which go before the preset's."""
        known = {"losses": self.losses, "bias_rule": self.bias_rule, "bias": self.bias, "jitter": self.jitter}
        return Router(hidden, num_experts, self.rule, **{**known, **options})


_HUGGINGFACE = LossRule("huggingface", coeff=1e-3)

PRESETS: dict[str, RouterPreset] = {
    "mixtral": RouterPreset(RouteRule(2, normalize=True), _HUGGINGFACE),
    "qwen2_moe": RouterPreset(RouteRule(4), _HUGGINGFACE),
    "qwen3_moe": RouterPreset(RouteRule(8, normalize=True), _HUGGINGFACE),
    "deepseek_v3": RouterPreset(
        RouteRule(8, "sigmoid", normalize=True, epsilon=1e-20, scale=2.5, num_groups=8, top_groups=4),
        LossRule("sequence", coeff=1e-4),
        BiasRule(1e-3),
    ),
    "gpt_oss": RouterPreset(RouteRule(4, when="after"), _HUGGINGFACE, bias=True),
    "llama4": RouterPreset(RouteRule(1, "sigmoid", when="after"), weigh="input"),
    "switch": RouterPreset(RouteRule(1), LossRule("switch", coeff=1e-2, z_coeff=1e-3), jitter=1e-2),
    "megatron": RouterPreset(
        RouteRule(2, when="after", group_score="top_k_over_groups"),
        LossRule("switch", coeff=1e-2, counted="top_scores"),
        weigh="before",
    ),
    "torchtitan": RouterPreset(RouteRule(1, "sigmoid"), bias_rule=BiasRule(1e-3, centered=True)),
}


@checked(computed=False)
def preset(name: str) -> RouterPreset:
    """The preset of this name.

    Raises ValueError for an unknown one.
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
