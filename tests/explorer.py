"""An exhaustive explorer of small concurrent protocols: every interleaving, on memory that reorders stores.

A *process* is a list of operations on named locations, which hold 0 at first. A state is where each process is, what
memory holds, and the stores of each process that nobody else can see yet. `explore` visits every state that any
schedule can reach, breadth first, and stops at the first one that is wrong, with the shortest way there:

- a `Read` that finds something else than what the protocol promises (every read names it: the value of its own call);
- a deadlock: somebody is not done and nobody can take a step;
- a state that the caller's `invariant` rejects.

Example: rank 0 sends 7 through a mailbox, and rank 1 reads it.

    sender   = [Write("mail", 7), Publish("flag", 1)]
    receiver = [Await("flag", 1), Read("mail", 7)]
    explore({"rank 0": sender, "rank 1": receiver}).wrong            # ""
    sender   = [Publish("flag", 1), Write("mail", 7)]                # the flag is published early
    explore({"rank 0": sender, "rank 1": receiver}).wrong            # "rank 1: read of mail found 0, not 7"

Note: the memory model. Stores go into a buffer of their process and reach memory later, each at any time and in any
order, but for two stores to one location, and but for a `Publish` (a release), which follows every store before it.
Later stores may overtake a Publish, and later loads may overtake any store. A process sees its own stores at once.
Loads take place in program order, because every wait here is an acquire; a wait that is not one is written by putting
the load before it. About stores this is weaker than x86, which keeps their order, and as weak as C++ and GPUs are.

Note: what keeps it small. An operation that only fills its process's own store buffer commutes with whatever the
others do, so it is taken at once and alone. And reads need no local variables, since each names the value that it must
find: two histories that lead to the same place in every program are one state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Location = Hashable


class Write(NamedTuple):
    """A plain store."""

    loc: Location
    value: Any


class Publish(NamedTuple):
    """A release store: it reaches memory after every store before it."""

    loc: Location
    value: Any


class Fence(NamedTuple):
    """Goes on when every store of the process has reached memory: a full fence, or the end of a kernel."""


class Add(NamedTuple):
    """An atomic addition with release order; a relaxed one may overtake the plain stores before it."""

    loc: Location
    amount: int
    relaxed: bool = False


class Await(NamedTuple):
    """An acquire load, repeated until the location is `at_least`, `equal` to or `unlike` the value."""

    loc: Location
    value: Any
    test: str = "at_least"


class Read(NamedTuple):
    """A load that must find `value`."""

    loc: Location
    value: Any


class Sleep(NamedTuple):
    """futex_wait: gets into bed (bed = 1) unless the location is at least `value` by now; `Await(bed, 0, "equal")`
    follows."""

    loc: Location
    value: Any
    bed: Location


class WakeIf(NamedTuple):
    """futex_wake of whoever is in the bed (bed = 0), where `announced` is true."""

    announced: Location
    bed: Location


Op = Write | Publish | Fence | Add | Await | Read | Sleep | WakeIf
Program = Sequence[Op]


@dataclass(frozen=True)
class Faults:
    """What may go wrong, at most once: a process is killed at any moment (its flag in `dead` becomes 1), or, with
    `deadlines`, a wait gives up.

    A wait that gives up continues in the epilogue of its process, and so does one that finds one of the `signals` set:
    flags in `dead`, where the system tells of a death, and flags that epilogues publish.
    """

    dead: Mapping[str, Location] = field(default_factory=dict)
    deadlines: bool = False
    signals: Sequence[Location] = ()
    epilogues: Mapping[str, Program] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """`wrong` is empty when no schedule breaks the protocol, else it says what happened, and `trace` how."""

    wrong: str
    states: int
    finished: int  # states in which every process is done
    trace: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.wrong or 'nothing wrong'} ({self.states} states)", *self.trace])


class TooLarge(RuntimeError):
    """More states than the limit."""


class _Wrong(Exception):
    pass


# Positions, memory, store buffers [(location, value, is_release)], faults left.
_Buffer = tuple[tuple[int, Any, bool], ...]
_State = tuple[tuple[int, ...], tuple[Any, ...], tuple[_Buffer, ...], int]
_Step = tuple[str, _State]


def explore(
    processes: Mapping[str, Program],
    *,
    faults: Faults | None = None,
    initial: Mapping[Location, Any] | None = None,
    invariant: Callable[[Mapping[str, int]], str] | None = None,
    limit: int = 3_000_000,
) -> Result:
    """Visit every state that the processes can reach.

    initial    what locations hold at first, where it is not 0
    invariant  from the number of operations that each process has taken to what is wrong with that, or ""
    """
    machine = _Machine(processes, faults or Faults())
    start = machine.start(initial or {}, faults=int(faults is not None))
    parents: dict[_State, tuple[_State, str] | None] = {start: None}
    frontier, finished = [start], 0
    while frontier:
        reached = []
        for state in frontier:
            try:
                steps = list(machine.steps(state))
                if not steps:
                    machine.check_end(state)
                    finished += 1
                for text, after in steps:
                    if after in parents:
                        continue
                    parents[after] = (state, text)
                    reached.append(after)
                    if invariant is not None and (problem := invariant(machine.progress(after))):
                        state = after
                        raise _Wrong(problem)
            except _Wrong as error:
                return Result(str(error), len(parents), finished, _trace(parents, state))
        if len(parents) > limit:
            raise TooLarge(f"more than {limit} states")
        frontier = reached
    return Result("", len(parents), finished)


def _trace(parents: Mapping[_State, tuple[_State, str] | None], state: _State) -> list[str]:
    steps = []
    while (link := parents[state]) is not None:
        state, text = link
        steps.append(text)
    return steps[::-1]


class _Machine:
    """The transition relation."""

    def __init__(self, processes: Mapping[str, Program], faults: Faults) -> None:
        self.names = list(processes)
        # The program, an end, the epilogue, an end.
        self.ops = [(*ops, None, *faults.epilogues.get(name, ()), None) for name, ops in processes.items()]
        self.epilogue = [len(ops) + 1 for ops in processes.values()]
        self.deadlines = faults.deadlines
        used = [loc for ops in self.ops for op in ops if op is not None for loc in _locations(op)]
        self.locations = list(dict.fromkeys([*used, *faults.dead.values(), *faults.signals]))
        index = {loc: i for i, loc in enumerate(self.locations)}
        self.index = index
        self.dead = [index[faults.dead[name]] if name in faults.dead else None for name in self.names]
        self.signals = [index[loc] for loc in faults.signals]

    def start(self, initial: Mapping[Location, Any], faults: int) -> _State:
        if unknown := set(initial) - set(self.index):
            raise ValueError(f"no process uses {sorted(map(str, unknown))}")
        memory = tuple(initial.get(loc, 0) for loc in self.locations)
        return (0,) * len(self.ops), memory, ((),) * len(self.ops), faults

    def progress(self, state: _State) -> dict[str, int]:
        return {
            name: min(pc, self.epilogue[i] - 1) for i, (name, pc) in enumerate(zip(self.names, state[0], strict=True))
        }

    def check_end(self, state: _State) -> None:
        stuck = [(i, self.ops[i][pc]) for i, pc in enumerate(state[0]) if self.ops[i][pc] is not None]
        if stuck:
            raise _Wrong("deadlock: " + ", ".join(f"{self.names[i]} at {op}" for i, op in stuck))

    def steps(self, state: _State) -> Iterator[_Step]:
        """(what happens, the state after it) for whatever can happen next; _Wrong for a read of the wrong value."""
        pcs, memory, buffers, faults = state
        for i, pc in enumerate(pcs):
            op = self.ops[i][pc]
            if isinstance(op, (Write, Publish)):  # see the Note about size
                buffer = (*buffers[i], (self.index[op.loc], op.value, isinstance(op, Publish)))
                yield f"{self.names[i]}: stores", (_next(pcs, i), memory, _set(buffers, i, buffer), faults)
                return
        for i, pc in enumerate(pcs):
            if buffers[i]:
                yield from self._commits(state, i)
            op = self.ops[i][pc]
            if op is not None:
                yield from self._step(state, i, op)
                if faults:
                    yield from self._faults(state, i, op)

    def _commits(self, state: _State, i: int) -> Iterator[_Step]:
        pcs, memory, buffers, faults = state
        passed = set()
        for position, (loc, value, is_release) in enumerate(buffers[i]):
            if loc not in passed and not (is_release and position):
                rest = buffers[i][:position] + buffers[i][position + 1 :]
                text = f"{self.names[i]}: {self.locations[loc]} = {value}"
                yield text, (pcs, _set(memory, loc, value), _set(buffers, i, rest), faults)
            passed.add(loc)

    def _step(self, state: _State, i: int, op: Op) -> Iterator[_Step]:
        pcs, memory, buffers, faults = state
        name, after = self.names[i], _next(pcs, i)
        if isinstance(op, Await):
            if any(memory[loc] for loc in self.signals):
                yield f"{name}: sees a failure", (_set(pcs, i, self.epilogue[i]), memory, buffers, faults)
            if _holds(self._seen(state, i, op.loc), op):
                yield f"{name}: {op.loc} is {op.test} {op.value}", (after, memory, buffers, faults)
        elif isinstance(op, Read):
            found = self._seen(state, i, op.loc)
            if found != op.value:
                raise _Wrong(f"{name}: read of {op.loc} found {found}, not {op.value}")
            yield f"{name}: reads {op.loc}", (after, memory, buffers, faults)
        elif isinstance(op, Fence):
            if not buffers[i]:
                yield f"{name}: fence", (after, memory, buffers, faults)
        elif isinstance(op, Add):
            if op.relaxed or not buffers[i]:
                loc = self.index[op.loc]
                text = f"{name}: adds {op.amount} to {op.loc}"
                yield text, (after, _set(memory, loc, memory[loc] + op.amount), buffers, faults)
        elif isinstance(op, Sleep):
            sleeps = self._seen(state, i, op.loc) < op.value
            memory = _set(memory, self.index[op.bed], 1) if sleeps else memory
            yield f"{name}: {'falls asleep' if sleeps else 'need not sleep'}", (after, memory, buffers, faults)
        elif isinstance(op, WakeIf):
            wakes = self._seen(state, i, op.announced)
            memory = _set(memory, self.index[op.bed], 0) if wakes else memory
            yield f"{name}: {'wakes ' + str(op.bed) if wakes else 'wakes nobody'}", (after, memory, buffers, faults)

    def _seen(self, state: _State, i: int, loc: Location) -> Any:
        """The process's own latest store, or memory."""
        where = self.index[loc]
        for target, value, _ in reversed(state[2][i]):
            if target == where:
                return value
        return state[1][where]

    def _faults(self, state: _State, i: int, op: Op) -> Iterator[_Step]:
        pcs, memory, buffers, faults = state
        dead = self.dead[i]
        if dead is not None:
            gone = _set(pcs, i, len(self.ops[i]) - 1), _set(memory, dead, 1), _set(buffers, i, ())
            yield f"{self.names[i]}: is killed", (*gone, faults - 1)
        if self.deadlines and isinstance(op, Await):
            yield f"{self.names[i]}: gives up", (_set(pcs, i, self.epilogue[i]), memory, buffers, faults - 1)


def _locations(op: Op) -> list[Location]:
    if isinstance(op, Sleep):
        return [op.loc, op.bed]
    if isinstance(op, WakeIf):
        return [op.announced, op.bed]
    return [] if isinstance(op, Fence) else [op.loc]


def _holds(found: Any, op: Await) -> bool:
    if op.test == "at_least":
        return bool(found >= op.value)
    return bool((found == op.value) == (op.test == "equal"))


def _set(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


def _next(pcs: tuple[int, ...], i: int) -> tuple[int, ...]:
    return (*pcs[:i], pcs[i] + 1, *pcs[i + 1 :])
