"""Attention over sequences that no rank holds: ring, gather, Ulysses and their product."""
