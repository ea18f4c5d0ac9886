"""Optimizers for plain and sharded parameters."""

from fastpar.optim.muon import Muon

__all__ = ["Muon"]
