"""Hugging Face's mixture-of-experts models on fastpar's dispatch, experts and combine.

    from fastpar.integrations import huggingface
    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fastpar")      # one process, or any of
                                                                                              # transformers' layouts
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(
        ep_size=4, fsdp_size=4, ep_implementation="fastpar"))                                 # under torchrun

The first replaces what an experts module computes, once it has its tokens; the second also how tokens get to the ranks
of their experts, whatever `experts_implementation` says: once to every rank with an expert that they have chosen, and
back as one row, over shared memory on one host. Names in `state_dict` stay what they are, as do gradients' scales.

Covered are all modules that transformers' `use_experts_implementation` decorates: gated or not, with biases or not,
transposed, interleaved. Activations that `moe_mlp` knows run fused, others as the module has them
(`fastpar.parallel.stacked_experts`). Llama 4, whose experts are called without their tokens' choices, has neither door;
`fastpar.parallelize` has one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fastpar.comm import Communicator
from fastpar.parallel.stacked_experts import ExpertSpread, run_experts


@torch.compiler.disable
def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module: "fastpar" in transformers' `ALL_EXPERTS_FUNCTIONS`.

        hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]; out [T, H]

    An index of `num_experts` goes nowhere: so transformers marks, where experts are spread, those of other ranks. Under
    torch.compile it is a break of the graph, since how many rows an expert gets is known on the host.
    """
    return run_experts(self, hidden_states, top_k_index, top_k_weights)


@functools.cache
def ep_implementation() -> type[Any] | None:
    """The class "fastpar" for transformers' `EPImplementationInterface`; None where transformers has no such thing."""
    try:
        from transformers.distributed.expert_parallel import EPImplementation
    except ImportError:
        return None

    class FastparEP(EPImplementation):
        """Tokens to the ranks of their experts and back by `moe_dispatch` and `moe_combine` over the expert group.

        Ranks of one tensor-parallel group hold the same tokens: each sends its part of them, and the parts of the
        output are gathered. The gradients of the experts are sums over all batches of the expert group, which is what
        transformers' FSDP divides by the number of batches.
        """

        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts  # its parameters are local tensors while this is called
            self.group, self.same_tokens = Communicator.of(ep_mesh), Communicator.of(tp_mesh)

        @torch.compiler.disable
        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            routing = hidden_states, top_k_index, top_k_weights
            return run_experts(self.experts, *routing, ExpertSpread(self.group, self.same_tokens))

    return FastparEP


def register_experts() -> None:
    """Give transformers the names; `fastpar.integrations.huggingface.register` calls it after its version guard."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("fastpar", experts_forward)
    implementation = ep_implementation()
    if implementation is not None:
        from transformers.distributed.expert_parallel import EPImplementationInterface

        EPImplementationInterface.register("fastpar", implementation)
