"""Models cut into parts for a pipeline.

    whole = partition(model, num_parts=4)                         # cut where the parts cost the same
    whole = partition(model, layout="E,t*7|t*8|t*8|t*7,H")
    stages = whole.stages([0, 3])                                 # what this rank runs; the rest is freed

Three kinds of models are cut. A *layered* model (embedding, layers, norm, head; see `Architecture`) stays one model
object whose own forward runs on every part; `absent` says what stands for the modules that are elsewhere. So does an
`nn.Sequential`. A list of modules, called one after another, may pass tuples and dicts, and tensors that skip modules.
In all of them the full names of parameters are those of the whole model, whatever the layout: the state dicts of all
parts together are the model's, with tied parameters on every part that uses them.

Models on the meta device are cut the same way; nothing here touches data.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, Protocol

from torch import nn

from fastpar.arguments import checked
from fastpar.contracts.rehearsal import Example
from fastpar.pipeline.stages.absent import Absent, AbsentEmbedding, AbsentLayer, ReturnCheck
from fastpar.pipeline.stages.agreement import fingerprint
from fastpar.pipeline.stages.architecture import Architecture, ModelUnit, find_architecture, sequential_units
from fastpar.pipeline.stages.balance import balance
from fastpar.pipeline.stages.calling import Convention, Keywords
from fastpar.pipeline.stages.carve import carve, carve_around
from fastpar.pipeline.stages.chain import Edge, ModuleChain
from fastpar.pipeline.stages.infer import infer_architecture
from fastpar.pipeline.stages.placement import StagePlacement
from fastpar.pipeline.stages.probe import Findings, PartError, Recording, check_head, find_loss_mean, record, try_part
from fastpar.pipeline.stages.stage import Stage, Tied
from fastpar.pipeline.stages.stream import EnterStream, Stream
from fastpar.pipeline.stages.traced import TracedModel
from fastpar.pipeline.stages.unit_costs import UnitCosts, group_costs, groups_of
from fastpar.pipeline.stages.weighting import LossMean


class Source(Protocol):
    """A model that can be cut, and how: what `Partition` asks of `UnitModel` and `TracedModel`.

    owners  path of a module (or tensor) to the parts that use it; what is under no such path is used by all
    """

    model: nn.Module
    layout: StagePlacement
    owners: Mapping[str, tuple[int, ...]]
    edges: tuple[Edge, ...]

    def keywords(self, part: int) -> Keywords: ...

    def build(self, parts: Sequence[int]) -> dict[int, nn.Module]: ...


class UnitModel:
    """A layered model, nn.Sequential or ModuleChain: units in a row, each on one part."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ModelUnit],
        layout: StagePlacement,
        convention: Convention | None,
        *,
        sharded_head: bool = False,
        example: Example | None = None,
    ):
        self.model, self.layout, self.convention = model, layout, convention
        self._absent = {unit.path: unit.absent for unit in units}
        # A sharded head comes after all parts, and so is absent from each of them.
        self._part = {
            unit.path: layout.num_parts if sharded_head and unit.kind == "H" else layout.part_of(unit.kind, unit.number)
            for unit in units
        }
        self.head = next((unit.path for unit in units if unit.kind == "H"), None) if sharded_head else None
        self.owners: Mapping[str, tuple[int, ...]] = {path: (part,) for path, part in self._part.items()}
        self.edges = _part_edges(model, self._part) if isinstance(model, ModuleChain) else ()
        self._units = list(units)
        self._recording: Recording | None = None
        self._findings: dict[int, Findings] = {}  # by part
        self.loss_mean = LossMean()
        if convention is not None and (layout.num_parts > 1 or self.head is not None or convention.loss):
            self._recording = record(model, units, convention, example)
            if self._recording is not None:
                if layout.num_parts > 1 or self.head is not None:
                    self._try_parts(self._recording)
                self.loss_mean = find_loss_mean(model, convention, self._recording)

    def _try_parts(self, recording: Recording) -> None:
        """All parts on every rank, so that all raise the same."""
        name = type(self.model).__name__
        if self.head is not None:
            check_head(name, self.head, recording, self.model.get_submodule(self.head))
        for part in range(self.layout.num_parts):
            if part in self._part.values():
                beside = carve_around(self.model, self._part, self._absent, part)
                enter = self._connect(part, beside)
                named = f"part {part} ({str(self.layout).split('|')[part]}) of {name}"
                self._findings[part] = try_part(beside, self.model, self._units, recording, named, enter)

    def _connect(self, part: int, module: nn.Module) -> EnterStream | None:
        """Hooks and stand-ins of a part that has just been carved; what its first module needs, if it is not the
        model's first."""
        assert self.convention is not None
        places = [index for index, unit in enumerate(self._units) if self._part[unit.path] == part]
        stream = Stream(has_units=bool(places), is_guarded=self._findings.get(part, Findings()).guards)
        calls = {} if self._recording is None else self._recording.calls
        for index, unit in enumerate(self._units):
            if index in places:
                continue
            absent = module.get_submodule(unit.path)
            assert isinstance(absent, Absent)
            absent.connect(stream, is_entry=index + 1 in places[:1], is_exit=index - 1 in places[-1:])
            if unit.absent is AbsentLayer and unit.path in calls:
                absent.returns(calls[unit.path].returned)
            if unit.absent is AbsentEmbedding and unit.path in calls:
                stream.embedding_dims = calls[unit.path].num_dims
        is_last = self._is_last(part) and self.head is None
        self.convention.install(module, stream, is_first=part == 0, is_last=is_last)
        if not places or places[0] == 0:
            return None
        first = self._units[places[0]].path
        return EnterStream(stream, first, next(iter(signature(module.get_submodule(first).forward).parameters), ""))

    def keywords(self, part: int) -> Keywords:
        if self.convention is not None:
            return self.convention.keywords_of(has_embedding=part == 0, has_head=self._is_last(part))
        if isinstance(self.model, ModuleChain):
            return self.model.keywords_of(int(path) for path, owner in self._part.items() if owner == part)
        return Keywords(frozenset())

    def build(self, parts: Sequence[int]) -> dict[int, nn.Module]:
        modules = carve(self.model, self._part, self._absent, parts)
        if self.convention is None:
            return modules
        for part, module in modules.items():
            enter = self._connect(part, module)
            if enter is not None and self._findings.get(part, Findings()).enters:
                enter.register(module.get_submodule(enter.path))
            layers = [p for p, own in self._part.items() if own == part and self._absent[p] is AbsentLayer]
            for path in layers[:1]:
                tried = None if self._recording is None else self._recording.calls[path].returned
                layer = module.get_submodule(path)
                layer.register_forward_hook(ReturnCheck(layer, path, tried))
        self._recording = None
        return modules

    def _is_last(self, part: int) -> bool:
        return part == self.layout.num_parts - 1


class Partition:
    """A whole model and which part holds what; made by `partition` or `Partition.of_modules`.

    num_parts  number of parts
    layout     which units each part holds; for a model of units, str(layout) can be given to `partition` again
    edges      (source part, destination part, name) of tensors that go past the part between them
    tied       parameters that several parts use
    head       path of a head that is on no part (`partition(shard_head=True)`); None: there is none such
    """

    def __init__(self, source: Source, *, check_weights: bool = True):
        self._source: Source | None = source
        self.head: str | None = getattr(source, "head", None)
        self._name = type(source.model).__name__
        self.layout, self.num_parts, self._skips = source.layout, source.layout.num_parts, source.edges
        self.edges = tuple(edge for edge in source.edges if edge.destination > edge.source + 1)
        self._owners = dict(source.owners)
        self.tied = self._tied(source.model)
        self._keywords = [source.keywords(part) for part in range(self.num_parts)]
        self._rows = [self._row(source.model, part) for part in range(self.num_parts)]
        self._loss_mean: LossMean = getattr(source, "loss_mean", LossMean())
        self._fingerprint: Mapping[str, int] = fingerprint(source.model) if check_weights else {}

    @staticmethod
    @checked(computed=False)
    def of_modules(
        parts: Sequence[nn.Module | Sequence[nn.Module]], *, edges: Iterable[tuple[int, int, str]] = ()
    ) -> Partition:
        """A model given as one module per part, or a list of modules per part.

        Each module is called with what the one before it returned: a tensor, the elements of a tuple by position, or a
        dict by name. Modules are named by their position in the flat list ("0.weight"), wherever they are.

        edges  (source, destination, name) by position in the flat list: module `source` returns `StageOutput(output,
               skips={name: tensor})` and the forward of `destination` takes the keyword `name`
        """
        grouped = [[part] if isinstance(part, nn.Module) else list(part) for part in parts]
        chain = ModuleChain([module for group in grouped for module in group], [Edge(*edge) for edge in edges])
        units = [ModelUnit("t", index, name) for index, name in enumerate(chain._modules)]
        counts = [len(group) for group in grouped]
        return Partition(UnitModel(chain, units, _counts(counts, units), None))

    def keywords(self, part: int) -> Keywords:
        """The keyword inputs of a batch that the part takes."""
        return self._keywords[part]

    def units(self, part: int) -> tuple[str, ...]:
        """Paths of the modules that belong to the part, in running order."""
        return tuple(path for path, owners in self._owners.items() if part in owners)

    def head_module(self) -> nn.Module:
        """The whole head that is on no part, to be called before `stages`."""
        if self._source is None or self.head is None:
            raise RuntimeError("there is no head beside the parts, or the stages of this partition were taken already")
        return self._source.model.get_submodule(self.head)

    def stages(self, parts: Iterable[int]) -> list[Stage]:
        """The given parts, for this rank; modules of other parts are taken out of the model, which frees their memory.

        The first of them is the model object itself, changed in place; each further one has copies of what it shares
        with the others and nothing else. To be called once.
        """
        kept = list(parts)
        if self._source is None:
            raise RuntimeError("the stages of this partition were taken already, and the rest of the model is gone")
        if not kept or len(set(kept)) < len(kept) or not set(kept) <= set(range(self.num_parts)):
            raise ValueError(f"parts must be one or more different numbers below {self.num_parts}, got {kept}")
        modules = self._source.build(kept)
        self._source = None
        return [self._stage(part, modules[part]) for part in kept]

    def _stage(self, part: int, module: nn.Module) -> Stage:
        sends: dict[str, tuple[int, ...]] = {}
        for edge in self.edges:
            if edge.source == part:
                sends[edge.name] = (*sends.get(edge.name, ()), edge.destination)
        along = [edge for edge in self._skips if edge.destination == edge.source + 1]
        return Stage(
            part=part,
            num_parts=self.num_parts,
            module=module,
            units=self.units(part),
            keywords=self._keywords[part],
            sends=sends,
            receives={edge.name: edge.source for edge in self.edges if edge.destination == part},
            tied=tuple(tied for tied in self.tied if part in tied.names),
            passes=tuple(edge.name for edge in along if edge.source == part),
            takes=tuple(edge.name for edge in along if edge.destination == part),
            loss_mean=self._loss_mean,
            fingerprint=self._fingerprint,
        )

    def _row(self, model: nn.Module, part: int) -> dict[str, str]:
        named = model.named_parameters(remove_duplicate=False)
        found = {id(p): p for name, p in named if part in self._parts_of(name)}.values()
        trainable = sum(p.numel() for p in found if p.requires_grad)
        units = self.units(part)
        text = units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}" if units else "nothing"
        tied = [" = ".join(t.names[part]) for t in self.tied if part in t.names]
        return {
            "part": str(part),
            "layout": str(self.layout).split("|")[part],
            "modules": text,
            "parameters": f"{sum(p.numel() for p in found):,}",
            "trainable": f"{trainable:,}",
            "tied": ", ".join(tied),
        }

    def _parts_of(self, name: str) -> tuple[int, ...]:
        """The parts that use a parameter or module."""
        path = name
        while path:
            if path in self._owners:
                return self._owners[path]
            path = path.rpartition(".")[0]
        return tuple(range(self.num_parts))

    def _tied(self, model: nn.Module) -> tuple[Tied, ...]:
        """Parameters, by identity, that more than one part uses."""
        users: dict[int, dict[int, tuple[str, ...]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for part in self._parts_of(name):
                names: dict[int, tuple[str, ...]] = users.setdefault(id(parameter), {})
                names[part] = (*names.get(part, ()), name)
        return tuple(Tied(names) for names in users.values() if len(names) > 1)

    def describe(self) -> str:
        """A table: what each part holds, its parameters, and which of them other parts hold as well."""
        columns = list(self._rows[0])
        widths = {c: max(len(c), *(len(row[c]) for row in self._rows)) for c in columns}
        lines = ["  ".join(c.ljust(widths[c]) for c in columns).rstrip()]
        lines += ["  ".join(row[c].ljust(widths[c]) for c in columns).rstrip() for row in self._rows]
        lines += [f"tied: {tied}" for tied in self.tied]
        lines += [f"edge: {e.name} from part {e.source} to part {e.destination}" for e in self.edges]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Partition({self._name}, layout={str(self.layout)!r})"


@checked(computed=False)
def partition(
    model: nn.Module | Sequence[nn.Module],
    num_parts: int | None = None,
    *,
    layout: str | Sequence[int] | None = None,
    split_points: Sequence[str] | None = None,
    costs: UnitCosts = "flops",
    stage_ranks: Sequence[int] | None = None,
    architecture: Architecture | None = None,
    loss: bool = False,
    shard_head: bool = False,
    check_weights: bool = True,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
) -> Partition:
    """Cut a model into consecutive parts, by exactly one of `num_parts`, `layout` and `split_points`.

    model         a layered model, an nn.Sequential, or a list of modules that are called one after another (a
                  `ModuleChain`, where tensors skip some of them)
    num_parts     cut so that the costliest rank costs as little as possible (`balance`), by `costs`: "flops",
                  "parameters", or measured times of embedding, layers and head (`group_costs`); `stage_ranks` is the
                  rank of each part where a rank holds several (`Schedule.stage_ranks`)
    layout        such as "E,t*3|t*3|t*2,H" (`StagePlacement`), or layers per part, such as [3, 3, 2]
    split_points  paths of the units at which the second part and all after it begin: ["layers.3", "layers.6"]. A model
                  of no known architecture may have any shape: it is traced between the modules (`TracedModel`)
    architecture  which modules are the embedding, layers, norm and head; None: by the names of known architectures, or
                  by the order in which the model calls its modules when it is tried
    loss          let the last part return the model's own loss from the keyword input `labels`, where it computes one
    shard_head    leave the head of a layered model to all ranks (`ShardedHead`): no part has it, and the layout does
                  not name it; the last part returns hidden states
    check_weights take checksums of all parameters, which `Pipeline` compares: every rank must cut the same model
    example_inputs what the model is tried with, in the place of ids: a dict of keyword inputs, or a tuple of positional
                  ones, two rows of them

    A layered model is tried on ten made-up tokens, or the example, whole and part by part: ValueError for a part that
    needs more than the hidden states and the batch. Every layer is placed exactly once; a layout that leaves layers out
    is an error that names them. The model is not touched before `Partition.stages`.
    """
    given = {"num_parts": num_parts, "layout": layout, "split_points": split_points}
    ways = [name for name, value in given.items() if value is not None]
    if len(ways) != 1:
        raise TypeError(f"pass exactly one of num_parts, layout and split_points, got {ways or 'none'}")
    if num_parts is None and (stage_ranks is not None or costs != "flops"):
        raise TypeError(f"costs and stage_ranks choose the cut for num_parts, but {ways[0]} fixes it")
    if not isinstance(model, nn.Module):
        model = ModuleChain(model)
    is_chain = isinstance(model, ModuleChain) or (type(model) is nn.Sequential and architecture is None)
    found = find_architecture(model) if architecture is None and not is_chain else None
    if not is_chain and split_points is not None and architecture is None and found is None:
        if loss or shard_head:
            what = "loss" if loss else "shard_head"
            raise ValueError(f"{what}=True is not available for a model that is traced")
        return Partition(TracedModel(model, list(split_points)), check_weights=check_weights)
    example = Example.of(example_inputs, "partition")
    cut = _PartCut(num_parts, layout, split_points, costs, stage_ranks, loss, shard_head, example)
    source = _chain(model, cut) if is_chain else _layered(model, architecture, found, cut)
    return Partition(source, check_weights=check_weights)


class _PartCut(NamedTuple):
    """What `partition` was asked for."""

    num_parts: int | None
    layout: str | Sequence[int] | None
    split_points: Sequence[str] | None
    costs: UnitCosts
    stage_ranks: Sequence[int] | None
    loss: bool
    shard_head: bool
    example: Example | None

    def place(self, model: nn.Module, units: Sequence[ModelUnit]) -> StagePlacement:
        if self.num_parts is not None:
            return _balanced(model, units, self.num_parts, self.costs, self.stage_ranks)
        if self.split_points is not None:
            return _split(units, self.split_points)
        if isinstance(self.layout, str):
            names = [unit.path for unit in units if unit.kind == "t"]
            return StagePlacement.parse(self.layout, num_layers=len(names), names=names, **_ends(units))
        assert self.layout is not None
        return _counts(self.layout, units)


def _chain(model: nn.Module, cut: _PartCut) -> UnitModel:
    """A ModuleChain, or an nn.Sequential."""
    if cut.loss:
        raise ValueError(f"loss=True: {type(model).__name__} computes no loss of its own")
    if isinstance(model, nn.Sequential):
        units = sequential_units(model)
    else:
        units = [ModelUnit("t", index, name) for index, name in enumerate(model._modules)]
    placed = _without_head(model, units) if cut.shard_head else units
    return UnitModel(model, units, cut.place(model, placed), None, sharded_head=cut.shard_head)


def _layered(model: nn.Module, given: Architecture | None, named: Architecture | None, cut: _PartCut) -> UnitModel:
    """The units of the architecture that was given, or that the names tell, or that running the model shows."""
    if cut.loss and cut.shard_head:
        raise ValueError(f"loss=True: {type(model).__name__} computes no loss of its own with a sharded head")

    def of(architecture: Architecture) -> UnitModel:
        architecture.check(model)
        units, convention = architecture.units(model), Convention(model, loss=cut.loss)
        placed = _without_head(model, units) if cut.shard_head else units
        place = cut.place(model, placed)
        return UnitModel(model, units, place, convention, sharded_head=cut.shard_head, example=cut.example)

    if given is not None:
        return of(given)
    if named is None:
        return of(infer_architecture(model, cut.example))
    try:
        return of(named)
    except PartError:
        try:
            shown = infer_architecture(model, cut.example)
            if shown != named:
                return of(shown)
        except ValueError:
            pass  # what the names told was nearer
        raise


def _without_head(model: nn.Module, units: Sequence[ModelUnit]) -> list[ModelUnit]:
    """The units that parts share among them where the head has a shard on every rank."""
    heads = [unit.path for unit in units if unit.kind == "H"]
    if not heads:
        raise ValueError(f"shard_head=True needs a layered model with a head; {type(model).__name__} has none")
    own = {id(p) for p in model.get_submodule(heads[0]).parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not name.startswith(f"{heads[0]}."):
            raise ValueError(
                f"{heads[0]} is tied to {name}: a head that is sharded over the ranks of the pipeline needs weights of "
                "its own (tie_word_embeddings=False)"
            )
    return [unit for unit in units if unit.kind != "H"]


def _ends(units: Sequence[ModelUnit]) -> dict[str, bool]:
    kinds = {unit.kind for unit in units}
    return {"embedding": "E" in kinds, "norm": "N" in kinds, "head": "H" in kinds}


def _counts(counts: Sequence[int], units: Sequence[ModelUnit]) -> StagePlacement:
    return StagePlacement.of_counts(counts, num_layers=sum(unit.kind == "t" for unit in units), **_ends(units))


def _balanced(
    model: nn.Module, units: Sequence[ModelUnit], num_parts: int, costs: UnitCosts, stage_ranks: Sequence[int] | None
) -> StagePlacement:
    groups = groups_of(units)
    bounds = balance(group_costs(model, groups, costs), num_parts, stage_ranks)
    kinds = [group.kind for group in groups]
    layout = StagePlacement(tuple(tuple(kinds[a:b]) for a, b in itertools.pairwise(bounds)))
    return layout.with_norm() if _ends(units)["norm"] else layout


def _split(units: Sequence[ModelUnit], split_points: Sequence[str]) -> StagePlacement:
    steps = [unit for i, unit in enumerate(units) if unit.kind != "E" or i == 0]  # the embedding is not cut
    paths = [unit.path for unit in steps]
    starts = [0]
    for path in split_points:
        if path not in paths:
            near = difflib.get_close_matches(path, paths, n=3) or paths[:3]
            raise ValueError(f"split point {path!r} is no unit of this model; near misses: {near}")
        if paths.index(path) <= starts[-1]:
            raise ValueError(
                f"split points must be in the model's order, but {path!r} comes too late in {list(split_points)}"
            )
        starts.append(paths.index(path))
    ends = [*starts[1:], len(steps)]
    return StagePlacement(tuple(tuple(u.kind for u in steps[a:b]) for a, b in zip(starts, ends, strict=True)))


def _part_edges(chain: ModuleChain, part: Mapping[str, int]) -> tuple[Edge, ...]:
    ends = [(part[str(e.source)], part[str(e.destination)], f"{e.source}.{e.name}") for e in chain.edges]
    return tuple(sorted({Edge(*end) for end in ends if end[0] != end[1]}))


__all__ = ["Partition", "partition"]
