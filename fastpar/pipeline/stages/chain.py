"""A model that is a list of modules, and tensors that skip some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from fastpar.pipeline.stages.absent import Absent
from fastpar.pipeline.stages.calling import Keywords, StageOutput, call


class Edge(NamedTuple):
    """A tensor that goes from one module (or part) to a later one besides the main stream."""

    source: int
    destination: int
    name: str


class ModuleChain(nn.Module):
    """Modules that are called one after another, each with what the one before it returned; see `calling`. What comes
    from another part may be given whole: a tuple or dict as the only positional input.

    Children are named by their position in the whole list, whichever of them are on this part. Every keyword input goes
    to the modules whose forward takes it. `edges` are between positions: module `source` returns
    `StageOutput(output, skips={name: tensor})`, and module `destination` takes the keyword `name`. On the way it is
    called "source.name": so it comes in as a keyword, and so it leaves in the StageOutput of a part that does not hold
    all its destinations.
    """

    def __init__(self, modules: Sequence[nn.Module], edges: Sequence[Edge] = ()):
        super().__init__()
        self.edges = tuple(edges)
        self._takes = [Keywords.of(module) for module in modules]
        for index, module in enumerate(modules):
            self.add_module(str(index), module)
        for edge in self.edges:
            if not 0 <= edge.source < edge.destination < len(modules):
                raise ValueError(
                    f"edge {tuple(edge)} must go from a module to a later one among the {len(modules)} modules"
                )
            if edge.name not in self._takes[edge.destination]:
                destination = type(modules[edge.destination]).__name__
                raise ValueError(f"edge {tuple(edge)}: the forward of {destination} takes no keyword {edge.name!r}")
        taken = [(edge.destination, edge.name) for edge in self.edges]
        for edge in self.edges:
            if taken.count((edge.destination, edge.name)) > 1:
                raise ValueError(f"edge {tuple(edge)}: module {edge.destination} gets {edge.name!r} from two modules")

    def keywords_of(self, indices: Iterable[int]) -> Keywords:
        """What these modules take from the batch."""
        names: set[str] = set()
        takes_any = False
        for index in indices:
            names |= self._takes[index].names - {edge.name for edge in self.edges if edge.destination == index}
            takes_any |= self._takes[index].takes_any
        return Keywords(frozenset(names), takes_any)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        known = {f"{e.source}.{e.name}" for e in self.edges}
        skips = {name: keywords.pop(name) for name in known & keywords.keys()}
        sent: dict[str, Any] = {}
        indices = [index for index, _ in self._here()]
        for index, module in self._here():
            mine = {e.name: skips[f"{e.source}.{e.name}"] for e in self.edges if e.destination == index}
            named = self._takes[index].without(mine).select(keywords)
            value = call(module, value, {**named, **mine})
            given = value.skips if isinstance(value, StageOutput) else {}
            value = value.output if isinstance(value, StageOutput) else value
            wanted = {e.name for e in self.edges if e.source == index}
            if wanted != set(given):
                raise ValueError(
                    f"module {index} ({type(module).__name__}) returned skips {sorted(given)}, but edges from it are "
                    f"declared for {sorted(wanted)}"
                )
            skips |= {f"{index}.{name}": tensor for name, tensor in given.items()}
            away = [e for e in self.edges if e.source == index and e.destination not in indices]
            sent |= {f"{index}.{e.name}": skips[f"{index}.{e.name}"] for e in away}
        return StageOutput(value, sent) if sent else value

    def _here(self) -> list[tuple[int, nn.Module]]:
        # Not named_children, which yields a module that stands in the list twice only once.
        return [(int(name), m) for name, m in self._modules.items() if m is not None and not isinstance(m, Absent)]
