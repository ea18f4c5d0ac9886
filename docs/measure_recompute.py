"""Prints the measured table of docs/recompute.md: a Llama of examples/model.py under each policy, on this machine.

    python docs/measure_recompute.py [--layers 16] [--hidden 256] [--tokens 512] [--repeats 5]

Layer forwards and floating-point operations are counted, memory is the peak of what tensors hold at any operation of
forward and backward, beyond parameters, gradients and what was there before; all three are the same on any machine.
Times are the least of several, policies taking turns, as ratios to no recomputation.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fastpar as fp
from examples.model import Llama, LlamaConfig, rotary_tables
from fastpar import recompute


class LiveBytes(TorchDispatchMode):
    """The peak of the memory that results of operations hold, whoever refers to them."""

    def __init__(self, ignored: list[Tensor]) -> None:
        super().__init__()
        self.ignored = {x.untyped_storage()._cdata for x in ignored}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.ignored:
                storage = x.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))
        return out


def step(layers: nn.ModuleList, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    hidden = x
    for layer in layers:
        hidden = layer(hidden, cos, sin)
    hidden.backward(torch.ones_like(hidden))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 16), ("hidden", 256), ("tokens", 512), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": options.hidden, "intermediate_size": options.hidden * 11 // 4}
    config = LlamaConfig(num_hidden_layers=options.layers, vocab_size=8, **sizes)
    layers = Llama(config).layers
    x = torch.randn(1, options.tokens, options.hidden, requires_grad=True)
    cos, sin = rotary_tables(torch.arange(options.tokens)[None], config.head_dim, config.rope_theta, like=x)
    costs = recompute.measure_layers(layers, x, cos, sin)
    everything = recompute.NoRecompute().plan(options.layers).peak_bytes(costs)
    policies: dict[str, recompute.Policy] = {
        "NoRecompute()": recompute.NoRecompute(),
        "Selective()": recompute.Selective(),
        "Full()": recompute.Full(),
        "Segments()": recompute.Segments(),
        "Binomial(3)": recompute.Binomial(3),
        "ConstantMemory()": recompute.ConstantMemory(),
        **{f"Budget({part}/8 of all)": recompute.Budget(everything * part // 8, costs) for part in (6, 4, 2)},
    }
    step(layers, x, cos, sin)  # makes the gradients
    held = [*layers.parameters(), *(p.grad for p in layers.parameters() if p.grad is not None), x, cos, sin]
    flops, peaks = {}, {}
    times = {name: float("inf") for name in policies}
    for name, policy in policies.items():
        fp.apply_recompute(layers, policy)
        with FlopCounterMode(display=False) as counter:
            step(layers, x, cos, sin)
        with LiveBytes(held) as live:
            step(layers, x, cos, sin)
        flops[name], peaks[name] = counter.get_total_flops(), live.peak
        fp.remove_recompute(layers)
    for _ in range(options.repeats):
        for name, policy in policies.items():
            fp.apply_recompute(layers, policy)
            started = time.perf_counter()
            step(layers, x, cos, sin)
            times[name] = min(times[name], time.perf_counter() - started)
            fp.remove_recompute(layers)
    print("| policy | layer forwards again | operations | peak, MiB | time |")
    print("|---|---|---|---|---|")
    for name, policy in policies.items():
        again = policy.plan(options.layers).num_recomputed
        row = (again, flops[name] / flops["NoRecompute()"], peaks[name] / 2**20, times[name] / times["NoRecompute()"])
        print(f"| `{name}` | {row[0]} | {row[1]:.2f} | {row[2]:.1f} | {row[3]:.2f} |")


if __name__ == "__main__":
    main()
