"""Optimizers for plain and sharded parameters."""

from fastpar.optim.muon import Muon

__all__ = ["Muon"]
"""Optimizers whose step is one pass over memory: torch.optim's classes and conventions on the ops of `fastpar.ops`."""
from fastpar.optim.steps import SGD, AdamW, Lion

__all__ = ["SGD", "AdamW", "Lion"]
