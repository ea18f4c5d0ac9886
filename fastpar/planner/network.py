"""What a collective over a dim of the mesh costs: the bandwidth follows from where its ranks are.

Note: the stride rule. Ranks of a dim of n members are σ apart, σ being the product of the dims within, and a node holds
R ranks. With n σ <= R all of them share a node. Else g = min(n, max(1, R / σ)) share one, and the rings of a node's
other ranks use its other cards, so that g cards carry what crosses: min(nvlink, nic g).
"""

from __future__ import annotations

import numpy as np

from fastpar.planner.machine import Machine
from fastpar.planner.table import Column


def bandwidth(machine: Machine, size: Column, stride: Column) -> Column:
    """Bytes/s per rank and direction of a ring over a dim, from its size and stride."""
    shared = np.minimum(size, np.maximum(1, machine.per_node // np.maximum(stride, 1)))
    across = np.minimum(machine.nvlink, machine.nic * shared)
    return np.where(size * stride <= machine.per_node, machine.nvlink, across)


def latency(machine: Machine, size: Column, stride: Column) -> Column:
    """Seconds of a collective of no bytes."""
    alpha = np.where(size * stride <= machine.per_node, machine.alpha_node, machine.alpha_net)
    return alpha * np.log2(np.maximum(size, 1))


def gather_seconds(machine: Machine, nbytes: Column, size: Column, stride: Column) -> Column:
    """An all-gather or a reduce-scatter whose whole tensor has so many bytes; 0 for one rank."""
    share = (size - 1) / np.maximum(size, 1)
    return latency(machine, size, stride) + nbytes * share / bandwidth(machine, size, stride)


def all_reduce_seconds(machine: Machine, nbytes: Column, size: Column, stride: Column) -> Column:
    """A reduce-scatter and an all-gather."""
    return 2 * gather_seconds(machine, nbytes, size, stride)


def hop_seconds(machine: Machine, nbytes: Column, size: Column, stride: Column) -> Column:
    """A message to the next rank of a dim; each rank of a node has its own card."""
    inside = size * stride <= machine.per_node
    rate = np.where(inside, machine.nvlink, machine.nic)
    return np.where(size > 1, np.where(inside, machine.alpha_node, machine.alpha_net) + nbytes / rate, 0.0)
