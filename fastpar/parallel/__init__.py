"""Splitting a model that exists over the ranks of a mesh: `fastpar.parallelize` and what it stands on."""
