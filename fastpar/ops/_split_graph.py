"""Where a backward is cut in two: which uses of a parameter can wait, found in the autograd graph of a forward.

Note: how a backward is cut. A use of a parameter can wait if it is an operand of a product
(fastpar.ops._split_products), straight or through views and casts. The engine is asked for the gradients of the stage's
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

from fastpar.ops._split_products import PRODUCTS, Compute, can_read, has_hooks

Edge = tuple[Any, int]  # an autograd node and the number of its input

# Nodes that take a parameter to what is multiplied: they have one input that needs gradients, save no tensor and cost
# next to nothing in backward.
_VIEWS = """
    Alias AsStrided Clone Expand Narrow Permute Reshape ReshapeAlias Select Slice Split SplitWithSizes Squeeze T ToCopy
    Transpose Unbind UnsafeSplit UnsafeSplitWithSizes UnsafeView Unsqueeze View ViewAs
"""
_LINKS = frozenset(
    (*(f"{name}Backward{version}" for name in _VIEWS.split() for version in range(3)),)
    + ("_UnwrapBackward", "_ToTorchTensorBackward", "_FromTorchTensorBackward")
)

_TABLES = frozenset({"EmbeddingBackward0"})
_UNDIVIDED = frozenset({"CompiledFunctionBackward", "CheckpointFunctionBackward"})  # run when their turn comes


class Cut(NamedTuple):
    """What can wait in one graph.

    products  nodes that run with a hook, and which of their edges wait
    last      nodes that do not run, and which of their edges wait (all that they have)
    direct    the parameters (nodes that accumulate their gradients) with a direct use
    whole     (name of the node, the parameter's node) for the uses that do not wait
    """

    products: list[tuple[Any, tuple[int, ...]]]
    last: list[tuple[Any, tuple[int, ...]]]
    direct: list[Any]
    whole: list[tuple[str, Any]]


class Captured(NamedTuple):
    """Gradients along `edges`, still to be computed. `is_fresh`: their memory belongs to nobody else."""

    edges: list[Edge]
    compute: Callable[[], Sequence[Tensor | None]]
    sequence_nr: int
    is_fresh: bool


def edge_of(tensor: Tensor | torch.autograd.graph.GradientEdge) -> Edge:
    """Where the gradient of a tensor goes."""
    edge = torch.autograd.graph.get_gradient_edge(tensor) if isinstance(tensor, Tensor) else tensor
    return edge.node, edge.output_nr


def parameter_of(node: Any, known: dict[Any, Any]) -> Any:
    """The AccumulateGrad node that a chain of links leads to from `node`; None if it is anything else."""
    passed = []
    while node not in known:
        passed.append(node)
        name = type(node).__name__
        if name == "AccumulateGrad":
            known[node] = node
            break
        following = [function for function, _ in node.next_functions if function is not None] if name in _LINKS else ()
        if len(following) != 1:
            known[node] = None
            break
        node = following[0]
    found = known[node]
    for each in passed:
        known[each] = found
    return found


# ---- the search ------------------------------------------------------------------------------------------------------


class _Search:
    """One walk over a graph, from its outputs to its inputs and parameters."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self.known: dict[Any, Any] = {}
        self.stops = {edge_of(x)[0] for x in inputs}
        self.direct: dict[Any, str] = {}
        self.waiting: list[tuple[Any, list[int], list[Any], bool]] = []  # node, edges, parameters, nothing else
        self.whole: list[tuple[str, Any]] = []

    def walk(self, roots: Iterable[Any]) -> None:
        stack = [(root, "an output") for root in roots]
        seen = set(self.stops)
        while stack:
            node, user = stack.pop()
            name = type(node).__name__
            if name == "AccumulateGrad":
                if node not in self.stops:
                    self.use_directly(node, user)
                continue
            if node in seen:
                continue
            seen.add(node)
            following = node.next_functions
            waiting = self.waiting_edges(node, name, following)
            # What a parameter goes through is not what uses it.
            user = user if name in _LINKS else name
            for i, (function, _) in enumerate(following):
                if function is not None and i not in waiting:
                    stack.append((function, user))

    def waiting_edges(self, node: Any, name: str, following: Any) -> Sequence[int]:
        product = PRODUCTS.get(name)
        if product is None:
            if name not in _TABLES and not (
                isinstance(node, BackwardCFunction) and name not in _LINKS and name not in _UNDIVIDED
            ):
                return ()
            edges = [i for i, (function, _) in enumerate(following) if function is not None]
            parameters = [self.parameter(following[i][0]) for i in edges]
            if not edges or None in parameters or len(node._input_metadata) != 1 or has_hooks(node):
                return ()
            self.waiting.append((node, edges, parameters, True))
            return edges
        edges, parameters, is_last = [], [], True
        for i, (function, _) in enumerate(following):
            if function is None:
                continue
            parameter = self.parameter(function) if i in product.operands else None
            if parameter is None:
                is_last = False
            else:
                saved = product.operands[i]
                if saved is not None and not can_read(node, saved):
                    return ()
                edges.append(i)
                parameters.append(parameter)
        if not edges or (is_last and has_hooks(node)):
            return ()
        self.waiting.append((node, edges, parameters, is_last))
        return edges

    def parameter(self, node: Any) -> Any:
        """What a chain leads to; not an input of the stage, nor a tensor that is there to make a function run."""
        found = parameter_of(node, self.known)
        return None if found is None or found in self.stops or found.variable.numel() == 0 else found

    def use_directly(self, parameter: Any, user: str) -> None:
        self.direct.setdefault(parameter, user)
        if parameter.variable.numel() > 0:
            self.whole.append((user, parameter))

    def result(self) -> Cut:
        while True:  # until nothing that has become direct is left to wait
            stuck = [each for each in self.waiting if any(parameter in self.direct for parameter in each[2])]
            if not stuck:
                break
            self.waiting = [each for each in self.waiting if each not in stuck]
            for node, edges, parameters, _ in stuck:
                keep = [(i, p) for i, p in zip(edges, parameters, strict=True) if p not in self.direct]
                if type(node).__name__ in PRODUCTS and keep:
                    self.waiting.append((node, [i for i, _ in keep], [p for _, p in keep], False))
                    parameters = [p for p in parameters if p in self.direct]
                for parameter in parameters:
                    self.use_directly(parameter, type(node).__name__)
        products = [(node, tuple(edges)) for node, edges, _, is_last in self.waiting if not is_last]
        last = [(node, tuple(edges)) for node, edges, _, is_last in self.waiting if is_last]
        return Cut(products, last, list(self.direct), self.whole)


def find_cut(roots: Iterable[Any], inputs: Iterable[Tensor]) -> Cut:
    """See the note above; `roots` are the nodes of a stage's outputs."""
    search = _Search(inputs)
    search.walk(roots)
    return search.result()


# ---- what is kept ----------------------------------------------------------------------------------------------------


def capture_products(cut: Cut, keep: Callable[[Captured], None]) -> None:
    """Have each product of the cut hand over what its weight gradient takes when it runs."""

    def hook(node: Any, edges: tuple[int, ...]) -> None:
        def before(grads: tuple[Tensor | None, ...]) -> None:
            (dout,) = grads
            if dout is not None:
                keep(_product(node, edges, dout))

        node.register_prehook(before)

    for node, edges in cut.products:
        hook(node, edges)


def captured_last(node: Any, edges: tuple[int, ...], dout: Tensor) -> Captured:
    """For a node that did not run."""
    if type(node).__name__ in PRODUCTS:
        return _product(node, edges, dout)
    targets = [node.next_functions[i] for i in edges]

    def compute() -> list[Tensor | None]:
        if isinstance(node, BackwardCFunction):
            found = cast(Any, node).apply(dout)
            found = found if isinstance(found, tuple) else (found,)
            grads = [grad for grad, needs in zip(found, node.needs_input_grad, strict=False) if needs]
        else:
            found = node(dout)
            found = found if isinstance(found, tuple) else (found,)
            grads = [found[i] for i in edges]
        return [_fitted(grad, *target) for grad, target in zip(grads, targets, strict=True)]

    return Captured(targets, compute, node._sequence_nr(), not isinstance(node, BackwardCFunction))


def _fitted(grad: Tensor | None, node: Any, index: int) -> Tensor | None:
    """As the engine fits what a function has returned to what was its input."""
    if grad is None:
        return None
    shape = node._input_metadata[index].shape
    return grad if grad.shape == shape else grad.sum_to_size(shape)


def _product(node: Any, edges: tuple[int, ...], dout: Tensor) -> Captured:
    compute: Compute = PRODUCTS[type(node).__name__].read(node, edges)
    following = node.next_functions
    return Captured([following[i] for i in edges], lambda: compute(dout), node._sequence_nr(), True)
