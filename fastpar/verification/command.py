"""`fastpar verify`: a language model of transformers, tiny, in a layout against itself whole.

    fastpar verify --model google/gemma-2-2b --layout tp2,sp
    fastpar verify --model Qwen3ForCausalLM --layout tp2,pp2,zero2 --json

It starts the layout's processes by itself, on CPU. Exit status: 0 equal, 1 different (or failed), 2 refused by the
layout, or a command line that is not understood.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastpar.verification.report import VerifyReport
from fastpar.verification.run import verify
from fastpar.verification.tiny import TinyModel, tiny_model
from fastpar.verification.words import LayoutText, parse_layout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    flags = _parser().parse_args(arguments)
    try:
        words = parse_layout(flags.layout)
        model = tiny_model(flags.model)
    except (ValueError, RuntimeError) as error:
        return _misuse(str(error))
    rows = _rows(words)
    if flags.rows is not None and flags.rows % words.parts:
        return _misuse(f"--rows {flags.rows} cannot be shared by {words.parts} parts of the batch ({flags.layout})")
    options = {"rows": flags.rows or rows, "length": flags.length, "dtype": flags.dtype, "rank_seeds": flags.rank_seeds}
    try:
        report = _run(words, flags.layout, model, options)
    except (ValueError, TypeError, RuntimeError) as error:
        return _misuse(f"{type(error).__name__}: {error}")
    if flags.json:
        print(json.dumps({"model": model.model_class, **report.to_json()}, indent=2))
    else:
        print(f"{model.model_class}, tiny")
        print(report.table(everything=flags.verbose))
        if model.switched_off:
            print(f"note: set to 0 in the configuration: {', '.join(model.switched_off)}")
    return 2 if report.refused else 0 if report.ok else 1


def _misuse(text: str) -> int:
    print(f"fastpar verify: {text}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="fastpar verify",
        description="Compare a model of transformers, tiny and with random weights, in a layout with itself whole.",
    )
    made.add_argument(
        "--model", required=True, help="a name (google/gemma-2-2b), class, model_type, or the path of a config.json"
    )
    made.add_argument("--layout", required=True, help="words of fp.Layout: tp2,sp or pp2,dp2,zero2 or 'tp4 grid1x2x2'")
    made.add_argument("--rows", type=int, help="sequences in the batch (two for each part that the layout makes of it)")
    made.add_argument("--length", type=int, default=11, help="tokens of a sequence (%(default)s)")
    made.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"), help="(%(default)s)")
    made.add_argument("--rank-seeds", action="store_true", help="seed the ranks differently")
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    made.add_argument("-v", "--verbose", action="store_true", help="list all comparisons")
    return made


def _rows(words: LayoutText) -> int:
    """Two or more for each part of the batch, and as many for each rank of a grid that shares its sequences."""
    z: int = words.asked.tp_grid.z
    return max(2, z) * words.parts


def _batch(rows: int, length: int) -> dict[str, Tensor]:
    """Ids that every tiny vocabulary has, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 120, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


def _verified(words: LayoutText, model: TinyModel, options: dict[str, Any]) -> VerifyReport:
    layout = words.layout("cpu")
    try:
        batch = _batch(options["rows"], options["length"])
        build = partial(model.build, options["dtype"])
        return verify(build, layout, batch, rank_seeds=options["rank_seeds"])
    finally:
        layout.mesh.close()


def _run(words: LayoutText, text: str, model: TinyModel, options: dict[str, Any]) -> VerifyReport:
    """Run it in this process for one rank, else in a process per rank."""
    if words.world_size == 1:
        return _verified(words, model, options)
    from torch.distributed import TCPStore
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    # Models that go through a set of words, as Gemma 3's does, must do so in one order on all ranks.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: a free one
    try:
        spawn(_rank, (words.world_size, store.port, text, model, options), nprocs=words.world_size)
    except ProcessRaisedException as error:
        last = str(error).strip().splitlines()[-1]
        raise RuntimeError(last) from None
    found: VerifyReport = _read(store)
    return found


def _rank(rank: int, size: int, port: int, text: str, model: TinyModel, options: dict[str, Any]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=size)
    try:
        report = _verified(parse_layout(text), model, options)
        if rank == 0:
            _write(store, report)
    finally:
        dist.destroy_process_group()


_KEY = "report"


def _write(store: Any, report: VerifyReport) -> None:
    import pickle

    store.set(_KEY, pickle.dumps(report).hex())


def _read(store: Any) -> VerifyReport:
    """The words that rank 0, a child of this process, has written."""
    import pickle

    found: VerifyReport = pickle.loads(bytes.fromhex(store.get(_KEY).decode()))
    return found


if __name__ == "__main__":
    sys.exit(main())
