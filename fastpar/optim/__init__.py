"""Optimizers for plain and sharded parameters, with torch.optim's conventions: AdamW, SGD and Lion, whose step is one
pass over memory, and Muon over shards."""

from fastpar.optim.muon import Muon
from fastpar.optim.steps import SGD, AdamW, Lion

__all__ = ["SGD", "AdamW", "Lion", "Muon"]
