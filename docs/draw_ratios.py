"""Draws the chart of the README from the rows of bench/results:  python docs/draw_ratios.py

A bar is the time of the best of the others over fastpar's, both medians of rows of one case and one setting. Which
others there are is what the bench measured; "best" is the fastest of them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ROWS = HERE.parent / "bench" / "results" / "amd-epyc-family-25-model-17-2c-24g"


@dataclass(frozen=True)
class Bar:
    """A label; the bench, the provider and the case whose rows are compared; and whose rows the others are."""

    label: str
    bench: str
    provider: str
    case: dict[str, Any]
    others: tuple[str, ...] = ("torch", "plain torch", "Megatron", "Hugging Face", "gloo")


BARS = (
    Bar("cross-entropy, 131072 words, bf16", "cross_entropy", "fastpar in place",
        {"dtype": "bf16", "vocab": 131072, "ranks": 1, "threads": 2}),
    Bar("the same, vocabulary over 2 ranks", "cross_entropy", "fastpar in place",
        {"dtype": "bf16", "vocab": 131072, "ranks": 2}),
    Bar("head GEMM + cross-entropy, fp32", "linear_cross_entropy", "fastpar", {"dtype": "fp32"}),
    Bar("RMSNorm, bf16", "rms_norm", "fastpar", {"dtype": "bf16", "threads": 2}),
    Bar("SwiGLU, bf16", "swiglu", "fastpar packed", {"dtype": "bf16", "threads": 2}),
    Bar("MLP over 2 ranks, bf16, 64 tokens", "linear", "fastpar",
        {"dtype": "bf16", "tokens": 64, "hidden": 1024, "ffn": 4096, "ranks": 2}),
    Bar("experts over 2 ranks, fp32", "moe", "fastpar", {"dtype": "fp32", "ranks": 2}),
    Bar("step with ZeRO stage 3, 2 ranks", "zero", "fastpar stage 3",
        {"dtype": "fp32", "ranks": 2}, ("torch fully_shard",)),
    Bar("all-reduce of 16 MB, 2 ranks", "comm", "fastpar", {"op": "all_reduce", "bytes": 1 << 24, "ranks": 2}),
)  # fmt: skip


def ratio(bar: Bar) -> float:
    """Of the best other's median to fastpar's, tuned."""
    rows = json.loads((ROWS / f"{bar.bench}.json").read_text())["rows"]
    fits = [
        row
        for row in rows
        if row["setting"] == "tuned" and not row["problem"] and bar.case.items() <= row["case"].items()
    ]
    cases = {json.dumps(row["case"], sort_keys=True) for row in fits}
    if len(cases) != 1:
        raise ValueError(f"{bar.label}: rows of {len(cases)} cases, one is wanted: {sorted(cases)}")
    own = [row["ms"]["median"] for row in fits if row["provider"] == bar.provider]
    others = [row["ms"]["median"] for row in fits if row["provider"].startswith(bar.others)]
    return float(min(others) / own[-1])


def main() -> None:
    found = [(bar.label, ratio(bar)) for bar in reversed(BARS)]
    figure, axes = plt.subplots(figsize=(8, 3.4))
    bars = axes.barh([label for label, _ in found], [value for _, value in found], color="#3b6ea5", height=0.62)
    axes.bar_label(bars, [f"{value:.1f}x" for _, value in found], padding=4, fontsize=9)
    axes.axvline(1, color="#888888", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.8, 25)
    axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_xlabel("time of the best other / time of fastpar, two CPU cores")
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "ratios.svg", metadata={"Date": None})
    for label, value in reversed(found):
        print(f"{value:5.2f}  {label}")


if __name__ == "__main__":
    main()
