"""`plan`: the layout that a model is best spread by over a machine, and `Plan`, what is said about it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from fastpar.argument_kinds import INT64
from fastpar.arguments import checked
from fastpar.layouts import ExpertShape, Layout, ModelShape
from fastpar.planner.comparison import Measurement, PlanComparison, beside, measured_beside
from fastpar.planner.machine import Machine, find_machine
from fastpar.planner.misses import NoLayoutFitsError, nearest_misses
from fastpar.planner.models import check_size, find_model
from fastpar.planner.reasons import Reason, classical_recipe, flags_of, reasons_for
from fastpar.planner.refine import RefinedLayout, refine
from fastpar.planner.search import EvaluatedLayouts, SearchResult, evaluate, search
from fastpar.planner.space import PlanOptions
from fastpar.planner.workload import BytesPerParameter, Workload


@dataclass(frozen=True)
class Plan:
    """The layout found, what is expected of it, and why. `print(plan)` is the report; docs/planner.md reads one.

    layout       recommended: the least time of all layouts whose features have been measured
    prediction   its seconds, error bar, and bytes of each pipeline rank
    trials       layouts that may be faster, but have features that nothing measured: worth a trial run
    runners_up   the next best of those that were looked at closely
    is_backed    whether the recommended layout's features have been measured
    limit        bytes that a rank may fill
    counts       layouts by what became of them: "compared", "do not fit", and names of rules
    reasons      what other values of each axis cost
    recipe       the classical recipe: tensor parallel inside a node, pipelines until it fits, data outermost
    flags        what to look at
    """

    layout: Layout
    prediction: RefinedLayout
    trials: tuple[RefinedLayout, ...]
    runners_up: tuple[RefinedLayout, ...]
    is_backed: bool
    machine: Machine
    work: Workload
    limit: int
    counts: Mapping[str, int]
    reasons: tuple[Reason, ...]
    recipe: tuple[str, float] | None
    flags: tuple[str, ...]
    bound: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second and rank."""
        return self.work.batch * self.work.seq / self.prediction.seconds / self.machine.gpus

    def __str__(self) -> str:
        from fastpar.planner.report import report

        return report(self)

    @checked(computed=False)
    def compare(self, other: Plan | Layout | Measurement | str) -> PlanComparison:
        """The plan beside another one, beside a layout (or its words), or beside what its own steps took.

            print(plan.compare("tp8 pp4 dp2 sp zero1 mb64"))
            print(plan.compare(fp.planner.Measurement(tuple(seconds_of_ten_steps), memory=(peak_bytes,))))

        Raises LayoutError for a layout that is not legal here; ValueError for a plan of another model, batch,
        length or precision, whose seconds are not comparable.
        """
        if isinstance(other, Measurement):
            return measured_beside(self.prediction, other)
        if isinstance(other, Plan):
            for name in ("model", "batch", "seq", "precision"):
                mine, theirs = getattr(self.work, name), getattr(other.work, name)
                if mine != theirs:
                    raise ValueError(f"the plans differ in {name}: {mine} and {theirs}")
            return beside(self.prediction, other.prediction, other.limit)
        layout = Layout.parse(other) if isinstance(other, str) else other
        layout.check(self.work.model, world_size=self.machine.gpus, batch=self.work.batch)
        told = refine(self.machine, self.work, layout, float("inf"), as_given=True)
        assert told is not None
        return beside(self.prediction, told, self.limit)

    def apply(self, model: Any, optimizer: Callable[..., Any], **options: Any) -> Any:
        """Lay the model out as planned: `fp.assemble(model, plan.layout, optimizer, precision=..., **options)`.

        model      of the shape that the plan is for
        optimizer  from a rank's parameters to its optimizer
        options    further ones of `fp.assemble`; precision is the plan's unless it is among them

        Collective. Returns an `Assembled`. Raises ValueError for a model of another shape, and what `fp.assemble`
        raises.
        """
        try:
            shape = find_model(model)
        except (TypeError, ValueError):  # no configuration, or one that does not read: the module says how large it is
            shape = self.work.model
            check_size(shape, model, "the plan's model has")
        for name in ("layers", "hidden", "ffn", "vocab", "heads", "kv_heads", "head_dim", "experts"):
            mine, theirs = getattr(self.work.model, name), getattr(shape, name)
            if mine != theirs:
                raise ValueError(
                    f"the plan is for {self.work.model.name} with {name} {mine}, but the model has {theirs}"
                )
        # By name: the call stands above the planner, which runs without torch.
        assemble = importlib.import_module("fastpar.assembly.api").assemble
        return assemble(model, self.layout, optimizer, **{"precision": self.work.precision, **options})

    def draw(self, path: str | Path) -> None:
        """Write the pictures (SVG): memory of each pipeline rank against the limit, and where the step's time goes."""
        from fastpar.planner.draw import draw

        Path(path).write_text(draw(self))

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it."""
        data = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        data["machine"], data["layout"] = self.machine.to_json(), self.layout.to_json()
        data["work"] = dataclasses.asdict(self.work)
        data["prediction"] = _refined_to_json(self.prediction)
        for name in ("trials", "runners_up"):
            data[name] = [_refined_to_json(each) for each in data[name]]
        data["reasons"] = [dataclasses.asdict(reason) for reason in self.reasons]
        data["recipe"], data["flags"] = list(self.recipe) if self.recipe else None, list(self.flags)
        data["counts"], data["format"] = dict(self.counts), "fastpar plan 1"
        data["bound"] = None if self.bound == float("inf") else self.bound
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_json`. ValueError for what is no plan."""
        if not isinstance(data, Mapping) or data.get("format") != "fastpar plan 1":
            raise ValueError('a plan has the "format" "fastpar plan 1"; write one by Plan.save or fastpar plan --json')
        try:
            work = dict(data["work"])
            model = dict(work["model"])
            model["experts"] = ExpertShape(**model["experts"]) if model["experts"] else None
            work |= {"model": ModelShape(**model), "bytes": BytesPerParameter(**work["bytes"])}
            return Plan(
                layout=Layout.from_json(data["layout"]),
                prediction=_refined_from_json(data["prediction"]),
                trials=tuple(map(_refined_from_json, data["trials"])),
                runners_up=tuple(map(_refined_from_json, data["runners_up"])),
                is_backed=data["is_backed"],
                machine=Machine.from_json(data["machine"]),
                work=Workload(**work),
                limit=data["limit"],
                counts=data["counts"],
                reasons=tuple(Reason(**reason) for reason in data["reasons"]),
                recipe=(data["recipe"][0], data["recipe"][1]) if data["recipe"] else None,
                flags=tuple(data["flags"]),
                bound=float("inf") if data["bound"] is None else data["bound"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the plan lacks or has too much: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what `save` has written. ValueError for what is no plan."""
        try:
            return Plan.from_json(json.loads(Path(path).read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"plan {path}: {error}") from error


def _refined_to_json(each: RefinedLayout) -> dict[str, Any]:
    return {
        "layout": each.layout.to_json(),
        "words": each.layout.words,
        "seconds": each.seconds,
        "parts": dict(each.parts),
        "ranks": [dict(rank) for rank in each.ranks],
        "error": each.error,
        "is_backed": each.is_backed,
    }


def _refined_from_json(data: Mapping[str, Any]) -> RefinedLayout:
    values = {name: value for name, value in data.items() if name != "words"}
    values |= {"layout": Layout.from_json(data["layout"]), "ranks": tuple(data["ranks"])}
    return RefinedLayout(**values)


@checked(computed=False, but=("model", "memory"))
def plan(
    model: Any,
    machine: str | Machine,
    *,
    batch: int,
    seq: int,
    precision: str = "bf16",
    memory: str | int | None = None,
    pin: Mapping[str, int | str] | None = None,
    allow: Collection[str] = (),
    fused_loss: bool = False,
    fused_kernels: bool = False,
) -> Plan:
    """Find how a model is best spread over a machine. Nothing is run, and torch is not needed.

        plan = fp.plan("llama-3-70b", "h100x64", batch=128, seq=8192)
        print(plan)                                   # the layout, what it costs, and why
        plan.layout                                   # an fp.Layout

    model       a name (`fastpar.planner.MODELS`), a config.json, a configuration of transformers, a module with one
                (on the meta device, say), or a `ModelShape`
    machine     "h100x64": 64 of these GPUs; a JSON file of `Machine.to_json`; or a `Machine`
    batch, seq  sequences of a step over all ranks, and their length
    precision   "bf16", "fp16", "fp8" or "fp32"; with AdamW and, but for fp32, float32 masters
    memory      of a rank, such as "80GB" or bytes; the machine's reserve and 8 % are left free of it
    pin         axes that are given, such as {"tp": 4, "zero": 2}: `fastpar.planner.PINS`
    allow       what is not searched unasked: "offload", "tp_across_nodes", "cp"
    fused_loss  the loss is computed from hidden states, by `fp.ops.linear_cross_entropy`
    fused_kernels  norms and SwiGLU are one op each and keep less, as after `fp.apply_kernels(model)`

    Returns a `Plan`. Raises NoLayoutFitsError with the nearest misses where no layout fits; ValueError for unknown
    models, machines and axes, with near misses, and for a batch that no layout can deal out.
    """
    found = find_machine(machine)
    if memory is not None:
        found = dataclasses.replace(found, hbm_bytes=parse_bytes(memory))
    if found.limit <= 0:
        raise ValueError(f"memory ({memory}) is less than the machine's reserve of {found.reserve / 1e9:.1f} GB")
    shape, kept = find_model(model), BytesPerParameter.of(precision)
    work = Workload(
        shape, batch, seq, precision, kept,
        fused_loss=fused_loss, fused_kernels=fused_kernels, copies_gradients=True,
    )  # fmt: skip
    found.flops(precision)  # raises for a precision that the machine does not have
    options = PlanOptions(dict(pin or {}), frozenset(allow))
    candidates = evaluate(found, work, options)
    if not len(candidates.table):
        told = ", ".join(f"{count} by {rule!r}" for rule, count in candidates.rejected.items())
        raise ValueError(
            f"no layout of {found.gpus} ranks that is searched has these pins and deals out a batch of {batch}: "
            f"rejected {told or 'all'}"
        )
    result = search(found, work, candidates)
    if result is None:
        raise NoLayoutFitsError(nearest_misses(found, work, candidates, options), candidates.limit)
    return _plan_of(found, work, candidates, result)


def _plan_of(machine: Machine, work: Workload, candidates: EvaluatedLayouts, result: SearchResult) -> Plan:
    chosen = result.recommended
    fits = int(candidates.fits.sum())
    counts = {"compared": fits, "do not fit": len(candidates.table) - fits, **candidates.rejected}
    return Plan(
        layout=chosen.layout,
        prediction=chosen,
        trials=result.trials,
        runners_up=tuple(each for each in result.ranked if each is not chosen)[:8],
        is_backed=result.is_backed,
        machine=machine,
        work=work,
        limit=candidates.limit,
        counts=counts,
        reasons=reasons_for(candidates, chosen, work),
        recipe=classical_recipe(candidates, machine),
        flags=flags_of(machine, work, chosen, candidates),
        bound=result.bound,
    )


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_bytes(value: str | int) -> int:
    """ "80GB", "74.5 GiB" or bytes. ValueError for anything else, and for 2**63 bytes or more."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return _checked_bytes(value)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower()) if isinstance(value, str) else None
    if found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f'memory must be bytes, or a text such as "80GB" or "74.5GiB", got {value!r}')
    return _checked_bytes(int(Decimal(found[1]) * _UNITS[found[2]]))


def _checked_bytes(size: int) -> int:
    if size not in INT64:
        raise ValueError(f"memory must fit 64 bits, got bytes of {size.bit_length()} bits")
    return size
