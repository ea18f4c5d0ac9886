"""Weight gradients put off: what a pipeline schedule with separate backward-input and backward-weight actions runs.

    forward   y  = f(x, W)
    I         dx = the gradient by a stage's inputs; frees what forward has saved, but for (x, dout) of each product
    W         dW = x.T @ dout of each product, and what I has computed anyway; every parameter's .grad

I and W together do what an undivided backward does: no product is computed twice, no function runs its backward twice,
nothing is recomputed twice, and the gradients have the same bits. How a graph is cut is said in
fastpar.ops.weight_grad_store.graph; forward runs as it always does, and pays nothing.

torch.distributed.pipelining (2.13) runs parts of the autograd graph twice for this, I with retain_graph=True. A custom
autograd.Function then runs all of its backward in both passes, a checkpoint is recomputed in both, weights used twice
cost a product more, and what forward has saved stays until W. Qi et al. 2023 (arXiv:2401.10241) and DeepSeek's DualPipe
replace the linear layers by ones that put closures into a queue, which needs one's own layers. Intercepting
torch.nn.functional.linear and its kin while forward runs would serve any model, but costs 1-2 us at every call of
anything, and has to repeat what each function does with its arguments.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.ops._autograd import own_grad
from fastpar.ops.weight_grad_store.graph import (
    Capture,
    GraphCut,
    edge_of,
    entry_of_last,
    find_cut,
    parameter_of,
    target_of,
)
from fastpar.ops.weight_grad_store.matmuls import STRAIGHT, THROUGH_NODES, TRANSPOSED, Entry, Target

_CURRENT: ContextVar[WeightGradStore | None] = ContextVar("fastpar_wgrad_store", default=None)
_FLUSH_BYTES = 32 << 20  # of gradients that wait for their turn to be accumulated


class Undivided(NamedTuple):
    """A use of a parameter whose gradient I computes, and W only hands to it.

    function   the autograd node that uses it
    parameter
    """

    function: str
    parameter: Tensor


class WeightGradStore:
    """The weight gradients of one microbatch of one stage that are still to be computed.

        store = WeightGradStore()
        with store.deferring():
            out = module(x)                                 # F, an ordinary forward
        (dx,) = store.backward([out], [dout], [x])          # I
        ...                                                 # send dx, run something else
        store.run()                                         # W: every parameter's .grad, with its hooks

    After I no parameter has got a gradient yet. W adds up the uses of a parameter first and accumulates once, as an
    undivided backward does, in the same order: the bits of .grad are the same.

    fastpar's linears put off their own weight gradients within `deferring()`; all other modules need no more than
    `backward`. Entries of tensor-parallel linears run collectives, so ranks must run the W of their stages in the same
    order. Instead of `deferring()` an op can be given the store as `wgrad_store`; then a plain `loss.backward()` leaves
    its weight gradient here, and those of all other parameters where they belong.

    Worked example: x [[1, 2]], W [[3, 4]], y = x @ W.T = [[11]], and dy = [[10]]: `backward` returns dx [[30, 40]], and
    W.grad is None; `run` makes it [[10, 20]].
    """

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._whole: list[Undivided] = []

    def __len__(self) -> int:
        """Entries that have not run."""
        return len(self._entries)

    @property
    def whole(self) -> tuple[Undivided, ...]:
        """The uses of parameters that could not wait in the last `backward`: norms and scales, functions that torch
        does not know, compiled modules, and products with a parameter that has such a use too. Their gradients were
        computed in I, once; this is of interest where a large weight is among them.
        """
        return tuple(self._whole)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[WeightGradStore]:
        """Around the forward of a microbatch: ops that can put off their weight gradients do so, into this store.

        Holds for the calling thread (or task), and may be nested: the innermost store counts.
        """
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    def put(
        self,
        compute: Callable[[], Sequence[Tensor | None] | None],
        parameters: Sequence[Tensor] = (),
        *,
        sequence_nr: int = -1,
        is_fresh: bool = False,
    ) -> None:
        """Add an entry; it runs once. `compute` returns the gradients of `parameters`, None for one that has none.

        For ops of one's own: put this in the backward of an autograd.Function that was given detached parameters.
        `sequence_nr` is that of the function's node, by which the order of sums is restored; `is_fresh` says that
        nobody else has the memory of the gradients, so that one of them may become `.grad` as it is.
        """
        edges = [edge_of(parameter) for parameter in parameters]
        targets = [target_of(node, index, parameter_of(node)) for node, index in edges]
        self._entries.append(_Given(targets, sequence_nr, is_fresh, compute))

    def backward(
        self,
        outputs: Sequence[Tensor | torch.autograd.graph.GradientEdge],
        grad_outputs: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of `inputs` from those of `outputs` (I); the parameters' are left to `run`.

        Args:
            outputs: of a stage, or their edges (so that the tensors may be freed); what needs no gradient is skipped.
            grad_outputs: one for each output; None: one, for a scalar loss.
            inputs: of a stage, leaves or not. Those that need no gradient, or that no output depends on, have None in
                the result. Every other leaf that needs a gradient counts as a parameter.

        Runs once, as any backward without retain_graph. The hooks of parameters run in W, those of other tensors here.
        Checkpoints (use_reentrant=False) are recomputed here, once, and not in W. May be called within the backward of
        an autograd.Function, for a graph that it has made anew.

        Raises:
            ValueError: numbers of outputs and gradients that differ.
            RuntimeError: what torch.autograd.grad raises; torch.utils.checkpoint with use_reentrant=True among it.
        """
        if len(outputs) != len(grad_outputs):
            raise ValueError(f"{len(outputs)} outputs need as many gradients, got {len(grad_outputs)}")
        pairs: Iterator[tuple[Any, Tensor | None]] = zip(outputs, grad_outputs, strict=True)
        given = [(out, grad) for out, grad in pairs if not isinstance(out, Tensor) or out.requires_grad]
        asked = [x for x in inputs if x.requires_grad]
        cut = find_cut([edge_of(out)[0] for out, _ in given], asked)
        direct = [node.variable for node in cut.direct]
        last = [torch.autograd.graph.GradientEdge(each.node, 0) for each in cut.last]
        targets = [*asked, *direct, *last]
        found: Sequence[Tensor | None] = ()
        before = len(self._entries)
        if given and targets:
            captures = [Capture(each, self._entries.append) for each in cut.products]
            try:
                with _without_hooks(direct):
                    found = torch.autograd.grad(
                        [out for out, _ in given], targets, [grad for _, grad in given], allow_unused=True
                    )
            finally:
                for capture in captures:
                    capture.release()
            self._hold(cut, found[len(asked) :], before)
        self._whole = [Undivided(function, node.variable) for function, node in cut.whole]
        by_input = iter(found)
        return tuple(next(by_input, None) if x.requires_grad else None for x in inputs)

    def _hold(self, cut: GraphCut, grads: Sequence[Tensor | None], before: int) -> None:
        """Add what the engine has returned to the entries that its hooks have made since `before`."""
        direct, last = grads[: len(cut.direct)], grads[len(cut.direct) :]
        for each, dout in zip(cut.last, last, strict=True):
            if dout is not None:
                entry = entry_of_last(each, dout)
                place = before  # where it would have run
                while place < len(self._entries) and self._entries[place].sequence_nr > entry.sequence_nr:
                    place += 1
                self._entries.insert(place, entry)
        held = [(node, grad) for node, grad in zip(cut.direct, direct, strict=True) if grad is not None]
        if held:
            targets, sums = [Target(node, 0, node, STRAIGHT) for node, _ in held], [grad for _, grad in held]
            self._entries.append(_Given(targets, -1, False, lambda: sums))

    def run(self, count: int | None = None) -> int:
        """Run the `count` oldest entries (None: all) and return how many ran (W).

        Uses of one parameter are summed over the entries of one call. An entry that raises is gone, and with it the
        gradients of this call that were not accumulated yet.
        """
        if count is not None and count < 0:
            raise ValueError(f"count must be None or >= 0, got {count}")
        ran = len(self._entries) if count is None else min(count, len(self._entries))
        entries = [self._entries.popleft() for _ in range(ran)]
        entries.reverse()
        _Accumulation(entries).run(entries)
        return ran

    def clear(self) -> None:
        """Forget what has not run, with the memory that it holds."""
        self._entries.clear()


def current_store() -> WeightGradStore | None:
    """The store of the innermost `deferring()`; None outside of it, and in compiled code, which cannot be cut."""
    return None if torch.compiler.is_compiling() else _CURRENT.get()


@contextlib.contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """The engine runs the hooks of a leaf where its gradient is asked for, and again where it is accumulated."""
    hooked = [(leaf._backward_hooks, dict(leaf._backward_hooks)) for leaf in leaves if leaf._backward_hooks]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """The dtypes were chosen in forward."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Given(Entry):
    """An entry from outside."""

    __slots__ = ("function",)

    def __init__(
        self,
        targets: Sequence[Target],
        sequence_nr: int,
        is_fresh: bool,
        function: Callable[[], Sequence[Tensor | None] | None],
    ) -> None:
        super().__init__(targets, sequence_nr, is_fresh)
        self.function = function

    def compute(self) -> Sequence[Tensor | None]:
        return self.function() or ()


# ---- on the way to the parameters ------------------------------------------------------------------------------------


class _Accumulation:
    """Runs entries and adds up what they give, parameter by parameter.

    The engine takes the sums from here: it runs the hooks and accumulates. All that leads to a parameter is given to it
    in one call; a few megabytes of gradients are collected first, since a call costs as much as a small product.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.left = Counter(target.parameter for entry in entries for target in entry.targets)
        self.by_nodes = {
            target.parameter for entry in entries for target in entry.targets if target.way == THROUGH_NODES
        }
        self.sums: dict[Any, Tensor] = {}
        self.paths: dict[Any, _Paths] = {}  # for the parameters in by_nodes
        self.ready: list[Any] = []
        self.ready_bytes = 0

    def run(self, entries: list[Entry]) -> None:
        """Run the entries, the last of the list first, and forget each as soon as it has run."""
        with torch.no_grad(), without_autocast():
            while entries:
                self.take(entries.pop())
                if self.ready_bytes >= _FLUSH_BYTES:
                    self.flush()
            self.ready = [*self.sums, *self.paths]
            self.flush()

    def take(self, entry: Entry) -> None:
        """Run one entry. Nobody holds on to its gradients: one that is held elsewhere would be copied."""
        grads = entry.compute()
        for target, grad in zip(entry.targets, grads, strict=bool(entry.targets)):
            self.add(target, grad, entry)

    def add(self, target: Target, grad: Tensor | None, entry: Entry) -> None:
        parameter = target.parameter
        if grad is None:
            pass
        elif parameter in self.by_nodes:
            self.paths.setdefault(parameter, _Paths()).add(target, grad, entry)
        else:
            if target.way == TRANSPOSED:
                grad = grad.t()
            before = self.sums.get(parameter)
            if before is not None:
                grad = before + grad
            elif not entry.is_fresh and own_grad(parameter.variable) is None:
                grad = grad.clone()
            self.sums[parameter] = grad
        self.left[parameter] -= 1
        # A weight that was computed from several parameters keeps all of them waiting for the end.
        if grad is not None and self.left[parameter] == 0 and None not in self.left:
            self.ready.append(parameter)
            self.ready_bytes += grad.nbytes

    def flush(self) -> None:
        straight = [parameter for parameter in self.ready if parameter in self.sums]
        roots: list[Any] = []
        grads: list[Tensor | None] = []
        if straight:
            box = [self.sums.pop(parameter) for parameter in straight]
            with torch.enable_grad():
                roots.append(_Deliver.apply(box, *(parameter.variable for parameter in straight)))
            grads.append(None)
        for parameter in self.ready:
            if parameter in self.paths:
                for root, grad in self.paths.pop(parameter).roots():
                    roots.append(root)
                    grads.append(grad)
        if roots:
            torch.autograd.backward(roots, grads)
        self.ready, self.ready_bytes = [], 0


class _Deliver(torch.autograd.Function):
    """Gives each of its inputs a gradient that is there already.

    As the root of a backward it costs a tenth of what a root for each of them does. A gradient that a function returns
    becomes `.grad` as it is; one that is given to torch.autograd.backward is copied, since its caller has it as well.
    """

    @staticmethod
    def forward(ctx: Any, box: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.box = box
        return torch.empty((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = (None, *ctx.box)
        ctx.box.clear()
        return found


class _Paths:
    """Gradients on several ways to one parameter (or to several: None), through nodes that the engine has to run."""

    def __init__(self) -> None:
        self.by_edge: dict[tuple[Any, int], Tensor] = {}
        self.at_leaf: list[tuple[Any, Tensor, Entry]] = []

    def add(self, target: Target, grad: Tensor, entry: Entry) -> None:
        edge = target.node, target.input_nr
        if target.way == STRAIGHT:
            self.at_leaf.append((target.node.variable, grad, entry))
        else:
            self.by_edge[edge] = self.by_edge[edge] + grad if edge in self.by_edge else grad

    def roots(self) -> Iterator[tuple[Any, Tensor]]:
        """What torch.autograd.backward starts at, and with what."""
        for leaf, grad, entry in self.at_leaf:
            yield _leaf_root(leaf, grad, entry)
        for edge, grad in self.by_edge.items():
            yield torch.autograd.graph.GradientEdge(*edge), grad


def _leaf_root(leaf: Tensor, grad: Tensor, entry: Entry) -> tuple[Tensor, Tensor]:
    """A view of the leaf whose node takes the place of the entry's in the order in which the engine adds."""
    if entry.sequence_nr < 0 or grad.layout != torch.strided:
        return leaf, grad
    with torch.enable_grad():
        view = leaf.view_as(leaf)
    node: Any = view.grad_fn
    node._set_sequence_nr(entry.sequence_nr)
    return view, grad if entry.is_fresh or leaf.grad is not None else grad.clone()
