"""Collectives and messages of CPU ranks that share a host's memory (csrc/comm)."""
