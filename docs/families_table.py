"""Write docs/families.md: which families of Hugging Face's language models compute the same in which layouts.

    PYTHONPATH=. python docs/families_table.py [--only llama,phi3] [--print]

Every family is built tiny, with noise on all parameters, and trained for a step on one process and in every layout, on
real ranks of this machine: see tests/tensor/family_models.py and tests/tensor/family_ranks.py. Takes about
ten minutes on two cores.
Exit status 1 if a layout computes something else, or fails with an error that is no refusal.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.dist import RankError, run_ranks
from tests.tensor.family_models import families
from tests.tensor.family_ranks import walk_family

LAYOUTS = {2: ["tp2", "tp2 sp", "ep2", "pp2", "cp2"], 3: ["tp3", "tp3 sp"]}
COLUMNS = ["tp2", "tp3", "tp2 sp", "tp3 sp", "ep2", "pp2", "cp2"]
HEAD = """# Families of models

What `plan="auto"` does with the causal and masked language models of transformers {version}: those with a `tp_plan`,
and some without one. Each is built with small sizes (six heads, two key/value heads, 61 ids, sequences of 7 tokens),
one layer of each kind, and noise on every parameter. *Equal*: loss, every parameter's gradient and its update by a step
of SGD are those of one process. *Refused*: `fastpar` raises, for the reason below the table. "-": no experts.

{counts}

tp2, tp3: tensor parallelism over two and three ranks; sp: with sequence parallelism; ep2: experts on two ranks of data
parallelism, which see the same sequences; pp2: two stages of a pipeline; cp2: sequences split over two ranks (masked
models have no loss that can be split). *Left whole*: modules that `plan="auto"`
leaves as they are in tp2, on every rank (with sequence parallelism: on all tokens), since a trial of their
split did not compute the same; `fastpar.explain` gives the reason.

Written by `PYTHONPATH=. python docs/families_table.py`.

"""


def walk(model_type: str, class_name: str) -> dict[str, dict[str, Any]]:
    """Layout to result of one family: the first rank's that is not equal, if one is not."""
    row: dict[str, dict[str, Any]] = {}
    for world_size, layouts in LAYOUTS.items():
        try:
            ranks = run_ranks(world_size, walk_family, model_type, class_name, layouts, timeout=300.0)
        except RankError as error:
            row |= {name: {"result": f"error: {error}", "notes": []} for name in layouts}
            continue
        for name in layouts:
            results = [rank[name] for rank in ranks]
            row[name] = next((r for r in results if r["result"] not in ("equal", "-")), results[0])
    return row


def cell(result: str, reasons: list[str]) -> str:
    kind, _, text = result.partition(": ")
    if not text:
        return kind
    text = re.sub(r"\.\d+(?=[. ])", ".*", " ".join(text.split()))
    if text not in reasons:
        reasons.append(text)
    return f"{kind} ({reasons.index(text) + 1})"


def whole_modules(row: dict[str, dict[str, Any]]) -> str:
    names = {note.partition(": ")[0].rpartition("*.")[2] for note in row.get("tp2", {}).get("notes", [])}
    return ", ".join(f"`{name}`" for name in sorted(names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model types, separated by commas; the file is not written then")
    parser.add_argument("--skip", default="", help="model types to leave out")
    args = parser.parse_args()
    import transformers

    chosen = [f for f in families() if not args.only or f[0] in args.only.split(",")]
    reasons: list[str] = []
    lines = [f"| family | class | {' | '.join(COLUMNS)} | left whole |", "|---" * (len(COLUMNS) + 3) + "|"]
    counts: dict[str, Counter[str]] = {name: Counter() for name in COLUMNS}
    for model_type, class_name, _kind in chosen:
        if model_type in args.skip.split(","):
            continue
        row = walk(model_type, class_name)
        cells = [cell(row[name]["result"], reasons) for name in COLUMNS]
        for name, text in zip(COLUMNS, cells, strict=True):
            counts[name][text.partition(" (")[0]] += 1
        lines.append(f"| {model_type} | {class_name} | {' | '.join(cells)} | {whole_modules(row)} |")
        print(
            lines[-1],
            *(f"  {name}: {row[name]['result']}" for name in COLUMNS if len(row[name]["result"]) > 5),
            sep="\n",
        )
        sys.stdout.flush()
    kinds = sorted({kind for counter in counts.values() for kind in counter})
    summary = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    summary += [f"| {kind} | {' | '.join(str(counts[name][kind]) for name in COLUMNS)} |" for kind in kinds]
    print("\n".join(summary))
    if not args.only:
        text = HEAD.format(version=transformers.__version__, counts="\n".join(summary))
        text += "\n".join(lines) + "\n\n## Reasons\n\n"
        text += "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))
        Path(__file__).with_name("families.md").write_text(text)
    return 0 if set(kinds) <= {"equal", "refused", "-"} else 1


if __name__ == "__main__":
    sys.exit(main())
