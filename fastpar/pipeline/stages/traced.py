"""Models of any shape, cut at given modules by tracing the code between them.

Only the forward of modules that contain a split point is traced (torch.fx); every other module stays as it is, a leaf
with its own forward, names and hooks. A tensor that the next part uses is passed on; one that a part further on uses
goes there directly, as a skip tensor. Inputs of the model that have a default (masks) are keyword inputs of the parts
that use them; the others come in at part 0 and are sent on to where they are used.

The traced code may not branch on values of tensors or on `training`, and what else a graph does not keep is refused
(`tracing.trace`). Where it branches on an optional input, the parts are those of calls that give it, and need it. Each
part has its own copy of a tensor that several use: one that changes what later parts use as well is an error.
torch.distributed.pipelining traces with torch.export instead, which fixes the shapes as well and dissolves
modules into operators, so that no plan for tensor parallelism fits them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from fastpar.pipeline.stages.absent import Absent
from fastpar.pipeline.stages.calling import Keywords, StageOutput
from fastpar.pipeline.stages.carve import PartShare, Shares
from fastpar.pipeline.stages.chain import Edge
from fastpar.pipeline.stages.placement import StagePlacement
from fastpar.pipeline.stages.tracing import CONSTANT, Traced, trace


class TracedModel:
    """A model and its graph, cut before the first call of each split point; what `Partition` is made from.

    owners  path of a leaf module, or of a parameter or buffer that traced code reads, to the parts that use it; part 0
            also keeps what nothing uses, for the sake of checkpoints
    """

    def __init__(self, model: nn.Module, split_points: Sequence[str]):
        self.model = model
        self.traced = {path.rpartition(".")[0] for path in split_points}
        self.traced |= {p.rsplit(".", depth)[0] for p in self.traced for depth in range(1, p.count(".") + 1)} | {""}
        self.graph, self.deciding = self._trace(split_points)
        self._parts = self._parts_of_nodes(split_points)
        self.num_parts = len(split_points) + 1
        users: dict[str, set[int]] = {path: set() for path in self._leaves()}
        for node in self.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                path = str(node.target)
                while path and path not in users:  # a tensor read from inside a leaf: the whole leaf is needed
                    path = path.rpartition(".")[0]
                users.setdefault(path or str(node.target), set()).update(self._used_in(node))  # else a constant
        self.owners: Mapping[str, tuple[int, ...]] = {path: tuple(sorted(u or {0})) for path, u in users.items()}
        units = [tuple("t" for parts in self.owners.values() if part in parts) for part in range(self.num_parts)]
        self.layout = StagePlacement(tuple(units))
        self.edges = tuple(sorted({Edge(s, d, n.name) for s, d, n in self._crossings() if d > s + 1}))
        for part in range(1, self.num_parts):
            if not self._passed_on(part - 1):
                raise ValueError(
                    f"part {part} uses nothing that part {part - 1} computes (split points {split_points})"
                )

    def keywords(self, part: int) -> Keywords:
        required, optional = self._inputs(part)
        return Keywords(frozenset(str(node.target) for node in [*(required if part == 0 else []), *optional]))

    def build(self, parts: Sequence[int]) -> dict[int, nn.Module]:
        """The module of each part; the model loses what no kept part uses."""
        shares = Shares()
        modules = {part: self._module(part, shares.of_part(part)) for part in parts}
        shares.finish()
        for name in [name for name in vars(self.model) if name.startswith(CONSTANT)]:
            delattr(self.model, name)  # the tracer put it there, and the parts have it now
        for path, owners in self.owners.items():
            if not set(owners) & set(parts) and hasattr(self.model, path.partition(".")[0]):
                parent, name = self.model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
                if name in parent._modules:
                    parent._modules[name] = Absent(parent.get_submodule(name), path, owners[0])
                else:
                    (parent._parameters if name in parent._parameters else parent._buffers)[name] = None
        return modules

    # The graph.

    def _trace(self, split_points: Sequence[str]) -> Traced:
        paths = [path for path, _ in self.model.named_modules(remove_duplicate=False) if path]
        for path in split_points:
            if path not in paths:
                near = difflib.get_close_matches(path, paths, n=3) or paths[:3]
                raise ValueError(f"split point {path!r} is no module of this model; near misses: {near}")
            if path in self.traced:
                raise ValueError(f"split point {path!r} contains another split point")
        try:
            graph, deciding = trace(self.model, self.traced)
        except Exception as error:
            raise ValueError(
                f"the forward of {type(self.model).__name__} cannot be traced between its split points: {error}. "
                "Describe it as an Architecture, or list its parts as modules (Partition.of_modules)"
            ) from error
        for node in graph.nodes:
            if node.op == "placeholder" and str(node.target).startswith("*") and node.users:
                raise ValueError(f"the traced forward uses {node.target}; give its inputs names")
        return Traced(graph, deciding)

    def _parts_of_nodes(self, split_points: Sequence[str]) -> dict[fx.Node, int]:
        parts: dict[fx.Node, int] = {}
        part = 0
        for node in self.graph.nodes:
            if node.op == "call_module" and part < len(split_points) and node.target == split_points[part]:
                part += 1
            parts[node] = 0 if node.op == "placeholder" else part
        if part < len(split_points):
            raise ValueError(
                f"split point {split_points[part]!r} is not called after {list(split_points[:part])}; "
                "list the split points in the order in which the model calls them"
            )
        return parts

    def _used_in(self, node: fx.Node) -> set[int]:
        """The parts that run a call, or that read a parameter or an input."""
        if node.op in ("get_attr", "placeholder"):
            return {self._parts[user] for user in node.users}
        return {self._parts[node]}

    def _inputs(self, part: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """(inputs of the model without a default, those with one that this part takes)."""
        nodes = [n for n in self.graph.nodes if n.op == "placeholder" and not str(n.target).startswith("*")]
        decides = self.deciding if part == 0 else frozenset()  # which is looked at there
        optional = [n for n in nodes if n.args and (part in self._used_in(n) or n.target in decides)]
        return [n for n in nodes if not n.args], optional

    def _crossings(self) -> Iterator[tuple[int, int, fx.Node]]:
        """(part that computes it, later part that uses it, value), in the order of the graph."""
        for node in self.graph.nodes:
            if node.op == "get_attr" or (node.op == "placeholder" and node.args):
                continue
            for part in sorted({self._parts[user] for user in node.users}):
                if part > self._parts[node]:
                    yield self._parts[node], part, node

    def _passed_on(self, part: int) -> list[fx.Node]:
        return [node for source, destination, node in self._crossings() if (source, destination) == (part, part + 1)]

    def _leaves(self) -> list[str]:
        """Paths of all modules, parameters and buffers directly under traced modules."""
        leaves = []
        for path in self.traced:
            module = self.model.get_submodule(path)
            for name in (*module._parameters, *module._buffers, *module._modules):
                full = f"{path}.{name}" if path else name
                if full not in self.traced and getattr(module, name) is not None:
                    leaves.append(full)
        order = [p for p, _ in self.model.named_modules(remove_duplicate=False)]
        return sorted(leaves, key=lambda p: order.index(p) if p in order else -1)

    # One part.

    def _module(self, part: int, share: PartShare) -> nn.Module:
        graph = self._part_graph(part)
        root = {
            str(n.target): self._own(str(n.target), share) for n in graph.nodes if n.op in ("call_module", "get_attr")
        }
        module = fx.GraphModule(root, graph, class_name=type(self.model).__name__)
        for path, owners in self.owners.items():
            if part in owners and path not in root:
                _place(module, path, self._own(path, share))
            elif part not in owners and isinstance(original := _get(self.model, path), nn.Module):
                _place(module, path, Absent(original, path, owners[0]))  # so that plans know that it exists
        for inner in module.modules():
            if inner is module or type(inner) is nn.Module:  # made here, to hold others
                inner.training = self.model.training
        saved = self.model.state_dict()
        for path, _ in list(module.named_buffers()):
            if path not in saved:  # made persistent by GraphModule
                parent, _, name = path.rpartition(".")
                module.get_submodule(parent)._non_persistent_buffers_set.add(name)
        if part == 0:
            required, optional = self._inputs(0)
            decide = {str(node.target): node.args[0] for node in optional if node.target in self.deciding}
            check = _CheckedInputs(tuple(str(node.target) for node in required), decide)
            module.register_forward_pre_hook(check, with_kwargs=True)
        if watched := self._watched(module, part):
            module.register_forward_pre_hook(watched.before, with_kwargs=True)
            module.register_forward_hook(watched.after)
        return module

    def _watched(self, module: nn.Module, part: int) -> _Unchanged | None:
        """What comes in here and is used by later parts too, and the buffers that other parts have as well."""
        _, optional = self._inputs(part)
        later = {node.name for _, destination, node in self._crossings() if destination > part}
        later |= {str(node.target) for node in optional if max(self._used_in(node), default=0) > part}
        # In the order of the module's inputs, which come by position or by name.
        inputs = tuple(inspect.signature(module.forward).parameters)
        shared = [path for path, owners in self.owners.items() if len(owners) > 1 and part in owners]
        buffers = [
            n for n, _ in module.named_buffers() if any(n == path or n.startswith(f"{path}.") for path in shared)
        ]
        if not buffers and later.isdisjoint(inputs):
            return None
        return _Unchanged(part, inputs, frozenset(later), tuple(buffers))

    def _own(self, path: str, share: PartShare) -> Any:
        original = _get(self.model, path)
        return share.tensor(original) if isinstance(original, Tensor) else share.module(original)

    def _part_graph(self, part: int) -> fx.Graph:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        required, optional = self._inputs(part)
        if part == 0:
            env |= {node: graph.placeholder(str(node.target)) for node in required}
        else:
            arriving = [n for _, d, n in self._crossings() if d == part and n not in self._passed_on(part - 1)]
            env |= {node: graph.placeholder(node.name) for node in [*self._passed_on(part - 1), *arriving]}
        env |= {node: graph.placeholder(str(node.target), default_value=node.args[0]) for node in optional}
        for node in self.graph.nodes:
            here = part in self._used_in(node) if node.op == "get_attr" else self._parts[node] == part
            if here and node.op not in ("placeholder", "output"):
                env[node] = graph.node_copy(node, env.__getitem__)
        if part == self.num_parts - 1:
            (output,) = (node for node in self.graph.nodes if node.op == "output")
            result: Any = fx.node.map_arg(output.args[0], env.__getitem__)
        else:
            passed = tuple(env[node] for node in self._passed_on(part))
            result = passed[0] if len(passed) == 1 else passed
        skips = {n.name: env[n] for s, d, n in self._crossings() if s == part and d > s + 1}
        graph.output(graph.call_function(StageOutput, (result, skips)) if skips else result)
        return graph


@dataclass(frozen=True)
class _CheckedInputs:
    """Optional inputs may be needed on later parts, which get keywords only; without some the graph is another one.

    required  names of the inputs without a default
    deciding  the inputs that have to be given, and their defaults
    """

    required: tuple[str, ...]
    deciding: Mapping[str, Any]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = type(module).__name__
        if len(args) > len(self.required):
            raise TypeError(
                f"part 0 of {name} got {len(args)} positional inputs; pass all but "
                f"{list(self.required)} by name, so that every part that uses them gets them"
            )
        if missing := [key for key, default in self.deciding.items() if kwargs.get(key, default) is default]:
            raise TypeError(
                f"the forward of {name} is another one without {', '.join(missing)}, and was traced with: give it in "
                "every step, or cut a module around the model whose forward calls it without"
            )


class _Unchanged:
    """A part's own copies of tensors of which other parts have theirs: that its forward does not write to them.

    inputs   names of the part's inputs, of which `later` are used by later parts too
    buffers  names of buffers that other parts have
    """

    def __init__(self, part: int, inputs: tuple[str, ...], later: frozenset[str], buffers: tuple[str, ...]):
        self._part, self._inputs, self._later, self._buffers = part, inputs, later, buffers
        self._before: list[tuple[str, Tensor, int]] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(self._inputs, args, strict=False)), **kwargs}
        found = {name: value for name, value in given.items() if name in self._later}
        found |= {name: module.get_buffer(name) for name in self._buffers}
        self._before = [
            (name, x, x._version) for name, x in found.items() if isinstance(x, Tensor) and not x.is_inference()
        ]

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        before, self._before = self._before, []
        for name, x, version in before:
            if x._version != version or (name in self._buffers and module.get_buffer(name) is not x):
                raise RuntimeError(
                    f"part {self._part} of {type(module).__name__} has written to {name} in place, of which other "
                    "parts have copies that stay as they were: write to a copy of it, or choose other split points"
                )


def _get(model: nn.Module, path: str) -> Any:
    """A module, parameter, buffer or other attribute of the model's modules."""
    parent, _, name = path.rpartition(".")
    return getattr(model.get_submodule(parent), name)


def _place(module: nn.Module, path: str, value: Any) -> None:
    """Keep something that the graph does not use under its name."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)
