"""What a test needs, found from what it can reach.

A helper says it once, where it is: `@needs("ranks")` on `run_ranks`, `@needs("device")` on what compiles, emulates or
interprets device code. Every test from which that helper can be reached gets the marker while it is collected: from its
own code, its fixtures, its parameters, or any function, class or table of tests/ that these mention. `clock` comes from
looking at a clock, from `assert_within`, and from a deadline of less than ten seconds (`timeout=2.0`), which a busy
machine may pass by itself.

A mention is enough, so a test may get a marker that it does not need. Where code hides from this (a string that another
process runs), `@pytest.mark.ranks` and so on say it by hand, as `expensive` always does: more than about a second of
processor time. `Watch` fails the tests that do what their markers deny.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pytest

RANKS, CLOCK, DEVICE, EXPENSIVE = "ranks", "clock", "device", "expensive"
CLOCKS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
SHORT_S = 10.0  # a deadline below it may pass because of what else the machine does
CHEAP_S = 15.0  # of processor time: seven times what the dearest unmarked test takes on a quiet machine
_DEADLINES = {"timeout", "timeout_s", "seconds"}
_PACKAGES = ("tests.",)  # the code that tests are made of
_LARGEST = 64  # entries of a table that are looked at
_DEVICE_PROGRAMS = {"nvcc", "ptxas"}
_DEVICE_VARIABLES = {"TRITON_INTERPRET", "FASTPAR_EMULATED_TESTS"}

_CACHED = type(functools.cache(len))

_T = TypeVar("_T")


def needs(*markers: str) -> Callable[[_T], _T]:
    """Every test that can reach the decorated function or class gets these markers, and none for what is inside."""

    def mark(target: _T) -> _T:
        target.__needs__ = frozenset(markers)  # type: ignore[attr-defined]
        return target

    return mark


def markers_of(item: pytest.Function) -> frozenset[str]:
    """The markers among RANKS, CLOCK and DEVICE of what a test, its fixtures and its parameters can reach."""
    roots: list[Any] = [item.function]
    fixtures = item._fixtureinfo.name2fixturedefs
    roots += [definition[-1].func for definition in fixtures.values()]
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        roots += callspec.params.values()
    found: set[str] = set()
    for root in roots:
        found |= _reach_of_function(root) if isinstance(root, FunctionType) else reach(root)
    return frozenset(found)


@functools.cache
def _reach_of_function(function: FunctionType) -> frozenset[str]:
    """Looked for once, and not once for each of a test's parameters."""
    return reach(function)


def reach(root: Any) -> frozenset[str]:
    """The markers of everything that can be reached from an object."""
    found: set[str] = set()
    seen: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None))):
            continue
        seen.add(id(value))
        own, mentioned = _look_at(value)
        found |= own
        todo += mentioned
    return frozenset(found)


def _look_at(value: Any) -> tuple[frozenset[str], list[Any]]:
    """The markers of an object itself, and the objects that it mentions."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return frozenset(), list(value)[:_LARGEST]
    if isinstance(value, Mapping):
        return frozenset(), list(value.values())[:_LARGEST]
    if isinstance(value, functools.partial):
        return frozenset(), [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (staticmethod, classmethod)) or inspect.ismethod(value):
        return frozenset(), [value.__func__]
    if isinstance(value, property):
        return frozenset(), [value.fget]
    if isinstance(value, FunctionType):
        return _of_function(value)
    if not hasattr(value, "__dict__"):
        return frozenset(), []
    if said := vars(value).get("__needs__"):
        return said, []
    if isinstance(value, type):
        return frozenset(), [*vars(value).values(), *value.__bases__] if _is_ours(value) else []
    if isinstance(value, _CACHED):
        return frozenset(), [value.__wrapped__]
    return frozenset(), [type(value), *vars(value).values()] if _is_ours(type(value)) else []


def sample(names: Sequence[str], at_most: int) -> set[str]:
    """No more than `at_most` of each test's parameters: those whose names ("test[a-b]") have the smallest checksums.

    Checksums and not every n-th, which may have the same value of one parameter every time.
    """
    of_test: dict[str, list[str]] = defaultdict(list)
    for name in names:
        of_test[name.partition("[")[0]].append(name)
    return {
        name for cases in of_test.values() for name in sorted(cases, key=lambda x: zlib.crc32(x.encode()))[:at_most]
    }


def in_shard(file: Path, files: Sequence[Path], shard: str) -> bool:
    """Whether a file is in the I-th of N parts, "I/N", of files in the order of their sizes: dealt to and fro, as the
    last of a round always has the largest."""
    index, count = map(int, shard.split("/"))
    turn, place = divmod(files.index(file), count)
    return (place if turn % 2 == 0 else count - 1 - place) == index - 1


@functools.cache
def _of_function(function: FunctionType) -> tuple[frozenset[str], list[Any]]:
    if said := function.__dict__.get("__needs__"):
        return said, []
    own: set[str] = set()
    mentioned: list[Any] = []
    if inner := getattr(function, "hypothesis", None):  # what @given wraps
        mentioned.append(inner.inner_test)
    if wrapped := getattr(function, "__wrapped__", None):
        mentioned.append(wrapped)
    for cell in function.__closure__ or ():
        try:
            mentioned.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    if not _is_ours(function):
        return frozenset(own), mentioned
    names = _names(function.__code__)
    for name in names:
        value = _module(name) if name.startswith(_PACKAGES) else function.__globals__.get(name)
        if value is time and not names.isdisjoint(CLOCKS):
            own.add(CLOCK)
        elif isinstance(value, ModuleType):
            inside = vars(value) if value.__name__.startswith(_PACKAGES) else {}
            mentioned += [inside[other] for other in names & inside.keys()]
        elif value is not None:
            mentioned.append(value)
    if function.__code__.co_firstlineno in _short_deadlines(function.__code__.co_filename):
        own.add(CLOCK)
    return frozenset(own), mentioned


def _module(name: str) -> ModuleType | None:
    """What a function imports when it runs."""
    try:
        return importlib.import_module(name)
    except ImportError:  # a package that may be missing
        return None


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith(_PACKAGES)


def _names(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function and in the functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


@functools.cache
def _short_deadlines(filename: str) -> frozenset[int]:
    """The first lines of the functions of a file in which some deadline is short."""
    try:
        text = Path(filename).read_text()
        if not any(word in text for word in _DEADLINES):  # parsing takes longer than all the rest
            return frozenset()
        tree = ast.parse(text)
    except (OSError, SyntaxError):
        return frozenset()
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    numbers = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    short = {value.lineno for value in _deadlines(tree) if _is_short(value, numbers)}
    first_lines = {
        node: min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) for node in functions
    }
    return frozenset(
        first for node, first in first_lines.items() if any(first <= line <= (node.end_lineno or 0) for line in short)
    )


def _deadlines(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in _DEADLINES:
            yield node.value
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (value for key, value in pairs if isinstance(key, ast.Constant) and key.value in _DEADLINES)
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            defaults = [*zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True)]
            defaults += [(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d is not None]
            yield from (default for argument, default in defaults if argument.arg in _DEADLINES)


def _is_short(value: ast.expr, numbers: Mapping[str, ast.expr]) -> bool:
    if isinstance(value, ast.Name):
        value = numbers.get(value.id, value)
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) and value.value < SHORT_S


class Watch:
    """Notes what tests do. Made once: a process cannot take back its audit hook."""

    def __init__(self, runs: Callable[[], int]) -> None:
        """`runs` counts the runs of ranks so far."""
        self._runs = runs
        self._seen: set[str] = set()
        self._before = (0, 0.0)
        self._clocks = {name: getattr(time, name) for name in CLOCKS}
        sys.addaudithook(self._hear)

    def begin(self) -> None:
        self._seen.clear()
        self._before = self._runs(), _processor_time()
        for name, clock in self._clocks.items():
            setattr(time, name, functools.partial(self._look, clock))

    def end(self) -> None:
        for name, clock in self._clocks.items():
            setattr(time, name, clock)

    def denied(self, markers: Set[str]) -> list[str]:
        """What the test did and has no marker for, each as a sentence."""
        runs, seconds = self._before
        spent = _processor_time() - seconds
        said = {
            RANKS: "starts ranks" if self._runs() != runs else "",
            CLOCK: "looks at a clock" if CLOCK in self._seen else "",
            DEVICE: "runs the tools of device code" if DEVICE in self._seen else "",
            EXPENSIVE: f"took {spent:.1f} s of processor time, above {CHEAP_S:g}" if spent > CHEAP_S else "",
        }
        # What is not for `make check` anyway; and what runs instrumented, which takes several times as long.
        if not markers.isdisjoint({RANKS, CLOCK, DEVICE, "slow", "gpu"}) or "FASTPAR_LIBRARY" in os.environ:
            said[EXPENSIVE] = ""
        if "gpu" in markers:  # where there is a device Triton calls ptxas in whatever test comes first
            said[DEVICE] = ""
        return [f"it {what}, and has no marker {name}" for name, what in said.items() if what and name not in markers]

    def _look(self, clock: Callable[[], float]) -> float:
        caller = sys._getframe(1).f_code.co_filename
        if f"{os.sep}tests{os.sep}" in caller and not caller.endswith("dist.py"):
            self._seen.add(CLOCK)
        return clock()

    def _hear(self, event: str, details: tuple[Any, ...]) -> None:
        if event != "subprocess.Popen":
            return
        program, _, _, variables = details
        is_device_program = os.path.basename(os.fsdecode(program)) in _DEVICE_PROGRAMS
        if is_device_program or not _DEVICE_VARIABLES.isdisjoint(variables or ()):
            self._seen.add(DEVICE)


def _processor_time() -> float:
    """Seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])
