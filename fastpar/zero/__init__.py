"""Data parallelism: replicated (stage 0), and with optimizer states, gradients and parameters sharded (ZeRO 1 to 3)."""

from fastpar.zero.api import full_optimizer_state, load_full_optimizer_state, shard
from fastpar.zero.offload.activations import ActivationOffload, offload_activations
from fastpar.zero.options import Offload
from fastpar.zero.parameter_server import ParameterServer, Worker
from fastpar.zero.zero import Zero

__all__ = [
    "ActivationOffload",
    "Offload",
    "ParameterServer",
    "Worker",
    "Zero",
    "full_optimizer_state",
    "load_full_optimizer_state",
    "offload_activations",
    "shard",
]
