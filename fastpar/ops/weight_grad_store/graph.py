"""Where a backward is cut in two: which uses of a parameter can wait, found in the autograd graph of a forward.

Note: how a backward is cut. A use of a parameter can wait if it is an operand of a product
(matmuls.py), straight or through views and casts. The engine is asked for the gradients of the stage's
inputs, and nodes compute what leads to what was asked for only: the products compute dx and no dW. Before each runs, a
hook on the node keeps dout and the operand that dW takes; everything else that forward has saved is freed as usual.
Nodes that nothing else hangs on, such as embeddings, or a first layer whose input needs no gradient, need not run at
all: their dout is asked for instead.

What is left are the direct uses: norms, scales, whatever multiplies a parameter by hand, functions that torch does not
know. They run undivided, once; the engine is asked for the sum at each such parameter, and it is held back. A product
with a parameter that has a direct use as well runs undivided too: asking for the sum at the parameter asks for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fastpar.ops.weight_grad_store.matmuls import (
    PRODUCTS,
    STRAIGHT,
    THROUGH_NODES,
    TRANSPOSED,
    Entry,
    Target,
    can_read,
    has_hooks,
)

# Nodes that take a parameter to what is multiplied: they have one input that needs gradients, save no tensor and cost
# next to nothing in backward.
_VIEWS = """
    Alias AsStrided Clone Expand Narrow Permute Reshape ReshapeAlias Select Slice Split SplitWithSizes Squeeze T ToCopy
    Transpose Unbind UnsafeSplit UnsafeSplitWithSizes UnsafeView Unsqueeze View ViewAs
"""
_UNWRAPPING = ("_UnwrapBackward", "_ToTorchTensorBackward", "_FromTorchTensorBackward")  # of DTensors, by functions
_LINKS = frozenset((*(f"{name}Backward{version}" for name in _VIEWS.split() for version in range(3)), *_UNWRAPPING))

_TABLES = frozenset({"EmbeddingBackward0"})
_UNDIVIDED = frozenset({"CompiledFunctionBackward", "CheckpointFunctionBackward"})  # run when their turn comes


class Waiting(NamedTuple):
    """Uses of parameters that can wait: some edges of a node. `is_last`: all that it has, so it need not run."""

    node: Any
    edges: list[int]
    targets: list[Target]
    is_last: bool


class GraphCut(NamedTuple):
    """What can wait in one graph.

    products  nodes that run with a hook
    last      nodes that do not run
    direct    the parameters (nodes that accumulate their gradients) with a direct use
    whole     (name of a node, node of a parameter) for the uses that do not wait
    """

    products: list[Waiting]
    last: list[Waiting]
    direct: list[Any]
    whole: list[tuple[str, Any]]


def edge_of(tensor: Tensor | torch.autograd.graph.GradientEdge) -> tuple[Any, int]:
    """Where the gradient of a tensor goes: a node of the autograd graph, and which of its inputs."""
    edge = torch.autograd.graph.get_gradient_edge(tensor) if isinstance(tensor, Tensor) else tensor
    return edge.node, edge.output_nr


def parameter_of(node: Any) -> Any:
    """The AccumulateGrad node that a chain of links leads to from `node`; None if it is anything else."""
    while True:
        name = type(node).__name__
        if name == "AccumulateGrad":
            return node
        if name not in _LINKS:
            return None
        following = [function for function, _ in node.next_functions if function is not None]
        if len(following) != 1:
            return None
        (node,) = following


def target_of(node: Any, index: int, parameter: Any) -> Target:
    """The target at an edge that leads to `parameter`."""
    if node is parameter:
        way = STRAIGHT
    elif type(node).__name__ == "TBackward0" and node.next_functions[0][0] is parameter:
        way = TRANSPOSED
    else:
        way = THROUGH_NODES
    return Target(node, index, parameter, way)


# ---- the search ------------------------------------------------------------------------------------------------------


class _GraphSearch:
    """One walk over a graph, from its outputs to its inputs and parameters."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self.known: dict[Any, Any] = {}
        self.stops = {edge_of(x)[0] for x in inputs}
        self.direct: dict[Any, None] = {}
        self.waiting: list[Waiting] = []
        self.whole: list[tuple[str, Any]] = []

    def walk(self, roots: Iterable[Any]) -> None:
        stack = [(root, "an output") for root in roots]
        seen = set(self.stops)
        while stack:
            node, user = stack.pop()
            if node in seen:
                continue
            name = type(node).__name__
            if name == "AccumulateGrad":
                self.use_directly(node, user)
                continue
            seen.add(node)
            following = node.next_functions
            waiting = self.waiting_edges(node, name, following)
            user = user if name in _LINKS else name  # what a parameter goes through is not what uses it
            for i, (function, _) in enumerate(following):
                if function is not None and i not in waiting:
                    stack.append((function, user))

    def waiting_edges(self, node: Any, name: str, following: Any) -> Sequence[int]:
        """The edges of a node that can wait, for the time being."""
        kind = PRODUCTS.get(name)
        if kind is None and not _may_be_last(node, name):
            return ()
        edges, targets, is_last = [], [], True
        for i, (function, index) in enumerate(following):
            if function is None:
                continue
            parameter = self.parameter(function) if kind is None or i in kind.reads else None
            if parameter is None:
                is_last = False
                continue
            edges.append(i)
            targets.append(target_of(function, index, parameter))
        if not edges:
            return ()
        if kind is None or is_last:
            if not is_last or len(node._input_metadata) != 1 or has_hooks(node):
                return ()
        elif not all(can_read(node, name) for name in map(kind.reads.get, edges) if name is not None):
            return ()
        self.waiting.append(Waiting(node, edges, targets, is_last))
        return edges

    def parameter(self, node: Any) -> Any:
        """What a chain leads to; not an input of the stage, nor a tensor that is there to make a function run."""
        if node not in self.known:
            found = parameter_of(node)
            if found is not None and (found in self.stops or found.variable.numel() == 0):
                found = None
            self.known[node] = found
        return self.known[node]

    def use_directly(self, parameter: Any, user: str) -> None:
        self.direct[parameter] = None
        if parameter.variable.numel() > 0:
            self.whole.append((user, parameter))

    def result(self) -> GraphCut:
        stuck = self.waiting if self.direct else []
        while stuck:  # until nothing waits for a parameter that has become direct
            stuck = [each for each in self.waiting if any(t.parameter in self.direct for t in each.targets)]
            self.waiting = [each for each in self.waiting if each not in stuck]
            for each in stuck:
                self.withdraw(each)
        products = [each for each in self.waiting if not each.is_last]
        return GraphCut(products, [each for each in self.waiting if each.is_last], list(self.direct), self.whole)

    def withdraw(self, each: Waiting) -> None:
        """Run a node after all; a product can still wait for its other operands."""
        name = type(each.node).__name__
        pairs = list(zip(each.edges, each.targets, strict=True))
        if name in PRODUCTS:
            left = [(i, target) for i, target in pairs if target.parameter not in self.direct]
            if left:
                self.waiting.append(Waiting(each.node, [i for i, _ in left], [t for _, t in left], False))
            pairs = [(i, target) for i, target in pairs if target.parameter in self.direct]
        for _, target in pairs:
            self.use_directly(target.parameter, name)


def _may_be_last(node: Any, name: str) -> bool:
    """Nodes with a backward worth putting off when nothing but parameters hangs on them."""
    return name in _TABLES or (isinstance(node, BackwardCFunction) and name not in _LINKS and name not in _UNDIVIDED)


def find_cut(roots: Iterable[Any], inputs: Iterable[Tensor]) -> GraphCut:
    """See the note above; `roots` are the nodes of a stage's outputs."""
    search = _GraphSearch(inputs)
    search.walk(roots)
    return search.result()


# ---- what is kept ----------------------------------------------------------------------------------------------------


class Capture:
    """The hook on a product: hands over what its weight gradient takes.

    It and its node hold each other, a cycle that the collector of Python does not see as a whole: `release` it.
    """

    __slots__ = ("keep", "waiting")

    def __init__(self, waiting: Waiting, keep: Callable[[Entry], None]) -> None:
        self.waiting: Waiting | None = waiting
        self.keep = keep
        waiting.node.register_prehook(self)

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        waiting, dout = self.waiting, grads[0]
        if waiting is not None and dout is not None:
            node = waiting.node
            self.keep(PRODUCTS[type(node).__name__].entry(node, waiting.edges, waiting.targets, dout))

    def release(self) -> None:
        self.waiting = None


class _LastNode(Entry):
    """A node that did not run, and what it was to run with."""

    __slots__ = ("dout", "edges", "node")

    def __init__(self, waiting: Waiting, dout: Tensor) -> None:
        self.node, self.edges, self.dout = waiting.node, waiting.edges, dout
        super().__init__(waiting.targets, self.node._sequence_nr(), not isinstance(self.node, BackwardCFunction))

    def compute(self) -> list[Tensor | None]:
        if isinstance(self.node, BackwardCFunction):
            found = _as_tuple(cast(Any, self.node).apply(self.dout))
            grads = [grad for grad, needs in zip(found, self.node.needs_input_grad, strict=False) if needs]
        else:
            found = _as_tuple(self.node(self.dout))
            grads = [found[i] for i in self.edges]
        return [_fitted(grad, target) for grad, target in zip(grads, self.targets, strict=True)]


def entry_of_last(waiting: Waiting, dout: Tensor) -> Entry:
    """The entry of a node that did not run."""
    kind = PRODUCTS.get(type(waiting.node).__name__)
    if kind is None:
        return _LastNode(waiting, dout)
    return kind.entry(waiting.node, waiting.edges, waiting.targets, dout)


def _as_tuple(found: Any) -> tuple[Tensor | None, ...]:
    return found if isinstance(found, tuple) else (found,)


def _fitted(grad: Tensor | None, target: Target) -> Tensor | None:
    """The gradient fitted to its input, as the engine fits what a function has returned."""
    if grad is None:
        return None
    shape = target.node._input_metadata[target.input_nr].shape
    return grad if grad.shape == shape else grad.sum_to_size(shape)
