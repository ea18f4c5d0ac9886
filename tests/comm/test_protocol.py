"""The flag protocol of the shared-memory collectives, explored: every interleaving of small worlds.

What is explored is the protocol as the C++ in csrc/comm/ follows it, written down once more, call by call, in the
language of `tests.explorer`. W ranks; each owns a phase counter, two headers and two slots each of A and R, that only
it writes. `publish(p)` stores the phase, `wait_all(p)` waits until every peer's phase is at least p, and what phase p
publishes lies in the buffers of parity p & 1. Every read names the call, chunk and rank whose value it must find, so a
buffer that is reused too early, or read too early, shows as a wrong read in some interleaving.

The second half breaks the protocol, in each way in turn, and asserts that the explorer finds it. A mutation that
nothing finds would mean a rule that is not needed, or an explorer that does not look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from tests.explorer import (
    Add,
    Await,
    Faults,
    Fence,
    Location,
    Op,
    Program,
    Publish,
    Read,
    Result,
    Sleep,
    TooLarge,
    WakeIf,
    Write,
    explore,
)


@dataclass(frozen=True)
class Rules:
    """The protocol's rules; the defaults are the protocol, anything else is a mistake that the tests make.

    slots            of A and R per rank
    header_slots     of headers per rank
    equal_parity     flags hold p & 1 and are compared for equality
    restart          every call counts its phases from 1 again
    wait_for         the peers that a rank waits for: "all", or the "next" one only
    check_headers    the peers whose header a rank looks at: "all", or the "next" one only
    publish_first    the phase is stored before what it publishes
    start_again      who has shown chunk 0 in vain shows it again
    """

    slots: int = 2
    header_slots: int = 2
    equal_parity: bool = False
    restart: bool = False
    wait_for: str = "all"
    check_headers: str = "all"
    publish_first: bool = False
    start_again: bool = True


@dataclass
class Rank:
    """Writes down what one rank does, call after call. `starts[c]`: the number of operations before call c."""

    rank: int
    size: int
    rules: Rules = field(default_factory=Rules)
    ops: list[Op] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    phase: int = 0

    @property
    def call(self) -> int:
        return len(self.starts)

    @property
    def peers(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def slot(self, kind: str, rank: int, phase: int) -> Location:
        slots = self.rules.header_slots if kind == "header" else self.rules.slots
        return kind, rank, phase % slots

    def begin(self) -> int:
        """A new call; its first phase."""
        self.starts.append(len(self.ops))
        if self.rules.restart:
            self.phase = 0
        return self.phase + 1

    def exchange(self, stores: Sequence[Write] = ()) -> None:
        """Store, publish the next phase, wait for the peers."""
        self.phase += 1
        flag = self.phase & 1 if self.rules.equal_parity else self.phase
        publish = Publish(("phase", self.rank), flag)
        self.ops += [publish, *stores] if self.rules.publish_first else [*stores, publish]
        peers = self.peers if self.rules.wait_for == "all" else [(self.rank + 1) % self.size]
        test = "equal" if self.rules.equal_parity else "at_least"
        self.ops += [Await(("phase", r), flag, test) for r in peers]

    def header(self, text: str = "") -> Write:
        """A text of its own makes the headers differ, whatever the call is."""
        return Write(self.slot("header", self.rank, self.phase + 1), (self.call, text))

    def read_headers(self, texts: Callable[[int], str] = lambda rank: "") -> None:
        self.ops += [Read(self.slot("header", r, self.phase), (self.call, texts(r))) for r in self.checked()]

    def checked(self) -> list[int]:
        return self.peers if self.rules.check_headers == "all" else [(self.rank + 1) % self.size]

    # ---- the collectives

    def barrier(self) -> None:
        """What a rank has written before it enters is seen by all who have left."""
        self.begin()
        self.exchange([self.header(), Write(("work", self.rank), self.call)])
        self.read_headers()
        self.ops += [Read(("work", r), self.call) for r in self.peers]
        self.exchange()

    def one_shot(self) -> None:
        """All-reduce of a small tensor: everybody reads everybody's x."""
        phase = self.begin()
        self.exchange([Write(self.slot("A", self.rank, phase), (self.call, self.rank)), self.header()])
        self.read_headers()
        self.ops += [Read(self.slot("A", r, phase), (self.call, r)) for r in self.peers]

    def copies(self, chunks: int, sources: Sequence[int]) -> None:
        """All-gather, all-to-all (sources: all) and broadcast (one): chunk s is read in the phase that publishes it."""
        self.begin()
        for chunk in range(chunks):
            phase = self.phase + 1
            stores = [self.header()] if chunk == 0 else []
            if self.rank in sources:
                stores.append(Write(self.slot("A", self.rank, phase), (self.call, chunk, self.rank)))
            self.exchange(stores)
            if chunk == 0:
                self.read_headers()
            self.ops += [Read(self.slot("A", r, phase), (self.call, chunk, r)) for r in self.peers if r in sources]

    def all_gather(self, chunks: int = 2) -> None:
        self.copies(chunks, range(self.size))

    def broadcast(self, chunks: int = 2) -> None:
        self.copies(chunks, [0])

    def two_shot(self, chunks: int = 2) -> None:
        """All-reduce of a large tensor, and (without R) reduce-scatter: each owner reduces its part of chunk s - 1 from
        the A of all while chunk s is copied in."""
        self.begin()
        for step in range(chunks + 1):
            phase = self.phase + 1
            stores: list[Op] = [self.header()] if step == 0 else []
            if step < chunks:
                stores.append(Write(self.slot("A", self.rank, phase), (self.call, step, self.rank)))
            if step > 0:
                stores += [Read(self.slot("A", r, phase - 1), (self.call, step - 1, r)) for r in self.peers]
                stores.append(Write(self.slot("R", self.rank, phase), (self.call, "sum", step - 1, self.rank)))
            self.exchange(stores)
            if step == 0:
                self.read_headers()
            else:
                reads = [Read(self.slot("R", r, phase), (self.call, "sum", step - 1, r)) for r in self.peers]
                self.ops += reads

    def symmetric(self) -> None:
        """All-reduce of tensors that live in shared memory, X[rank][part]: the owner of a part reduces it and writes
        the sum into everybody's."""
        self.begin()
        parts = range(self.size)
        self.exchange([*(Write(("X", self.rank, q), (self.call, self.rank, q)) for q in parts), self.header()])
        self.read_headers()
        reads = [Read(("X", r, self.rank), (self.call, r, self.rank)) for r in self.peers]
        self.exchange([*reads, *(Write(("X", r, self.rank), (self.call, "sum", self.rank)) for r in parts)])
        self.ops += [Read(("X", self.rank, q), (self.call, "sum", q)) for q in parts]

    def partly_in_a_region(self, chunks: int = 2) -> None:
        """All-gather in which only rank 0's data lies in a region: it shows its header and waits to hear of the others,
        who have shown chunk 0 already. They start again with it."""
        phase = self.begin()
        hopes = self.rank == 0
        chunk_0 = [] if hopes else [Write(self.slot("A", self.rank, phase), (self.call, 0, self.rank))]
        self.exchange([*chunk_0, self.header("region" if hopes else "")])
        self.read_headers(lambda rank: "region" if rank == 0 else "")
        for chunk in range(0 if hopes or self.rules.start_again else 1, chunks):
            phase = self.phase + 1
            self.exchange([Write(self.slot("A", self.rank, phase), (self.call, chunk, self.rank))])
            self.ops += [Read(self.slot("A", r, phase), (self.call, chunk, r)) for r in self.peers]

    def mismatch(self) -> None:
        """Rank 0 calls something else than the others. Who sees it stops after the first phase."""
        phase = self.begin()
        own = "other" if self.rank == 0 else ""
        self.exchange([Write(self.slot("A", self.rank, phase), (self.call, 0, self.rank)), self.header(own)])
        self.read_headers(lambda rank: "other" if rank == 0 else "")
        seen = {own, *("other" if r == 0 else "" for r in self.checked())}
        if len(seen) == 1 and self.rank != 0:  # it saw nothing, and goes on with its two-shot
            self.exchange()
            self.ops += [Read(self.slot("R", r, self.phase), (self.call, "sum", 0, r)) for r in self.peers]


MIX = ("one_shot", "two_shot", "all_gather", "one_shot", "symmetric", "broadcast", "barrier", "one_shot")
SHORT = ("one_shot", "two_shot", "one_shot")


def world(size: int, calls: Sequence[str], rules: Rules | None = None) -> list[Rank]:
    ranks = [Rank(rank, size, rules or Rules()) for rank in range(size)]
    for rank in ranks:
        for call in calls:
            getattr(rank, call)()
    return ranks


def programs(ranks: Sequence[Rank]) -> dict[str, Program]:
    return {f"rank {rank.rank}": rank.ops for rank in ranks}


def never_two_calls_ahead(ranks: Sequence[Rank]) -> Callable[[Mapping[str, int]], str]:
    """The invariant: a rank that has entered call c has company in call c - 1 at least."""
    entered = {
        f"rank {rank.rank}": [sum(s < n for s in rank.starts) for n in range(len(rank.ops) + 1)] for rank in ranks
    }

    def check(done: Mapping[str, int]) -> str:
        calls = {name: entered[name][count] for name, count in done.items()}
        return f"a rank is two calls ahead: {calls}" if max(calls.values()) - min(calls.values()) > 1 else ""

    return check


def run(size: int, calls: Sequence[str], rules: Rules | None = None) -> Result:
    ranks = world(size, calls, rules)
    return explore(programs(ranks), invariant=never_two_calls_ahead(ranks))


# ---- the protocol is right


COLLECTIVES = (
    "one_shot",
    "two_shot",
    "all_gather",
    "broadcast",
    "symmetric",
    "partly_in_a_region",
    "barrier",
    "mismatch",
)


@pytest.mark.parametrize("size", [2, 3])
def test_every_read_sees_its_own_call_in_a_mix_of_collectives(size):
    result = run(size, MIX)
    assert not result.wrong, str(result)
    assert result.finished
    assert result.states > 1000  # it did look


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_two_collectives_follow_each_other(size):
    for calls in product(COLLECTIVES, repeat=2):
        result = run(size, [*calls, "one_shot"])
        assert not result.wrong, f"{calls}: {result}"


@pytest.mark.slow
def test_any_three_collectives_follow_each_other():
    for calls in product(COLLECTIVES, repeat=3):
        result = run(2, calls)
        assert not result.wrong, f"{calls}: {result}"


@pytest.mark.slow
@pytest.mark.parametrize("calls", [SHORT, ("one_shot", "mismatch", "one_shot")])
def test_four_ranks(calls):
    result = run(4, calls)
    assert not result.wrong, str(result)


def test_a_rank_may_be_one_call_ahead_of_a_straggler():
    ranks = world(2, ["one_shot"] * 3)
    starts = {f"rank {rank.rank}": rank.starts for rank in ranks}

    def lockstep(done: Mapping[str, int]) -> str:
        calls = {sum(s < done[name] for s in starts[name]) for name in done}
        return "a rank is one call ahead" if len(calls) > 1 and 0 not in calls else ""

    assert explore(programs(ranks), invariant=lockstep).wrong == "a rank is one call ahead"


# ---- each of its rules is needed


MUTATIONS = {
    "one slot instead of two": (Rules(slots=1), ["one_shot"] * 3),
    "one slot instead of two, two-shot": (Rules(slots=1), ["two_shot"]),
    "one header instead of two": (Rules(header_slots=1), ["one_shot"] * 3),
    "phases of one bit": (Rules(equal_parity=True), ["one_shot"] * 3),
    "phases that start again with every call": (Rules(restart=True), ["one_shot"] * 2),
    "waiting for the next rank only": (Rules(wait_for="next"), ["one_shot"] * 2),
    "the phase stored before what it publishes": (Rules(publish_first=True), ["one_shot"]),
    "going on with chunk 1 beside a rank in a region": (Rules(start_again=False), ["partly_in_a_region"]),
    "looking at one header only": (Rules(check_headers="next"), ["mismatch", "one_shot"]),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_breaking_a_rule_is_found(name):
    rules, calls = MUTATIONS[name]
    assert not run(3, calls).wrong
    assert run(3, calls, rules).wrong


def test_one_slot_is_found_as_a_read_of_the_next_call():
    result = run(2, ["one_shot"] * 2, Rules(slots=1, header_slots=1))
    assert "found (2," in result.wrong
    assert "not (1," in result.wrong


@pytest.mark.expensive
@pytest.mark.parametrize("call", ["one_shot", "two_shot", "all_gather", "symmetric", "barrier"])
def test_dropping_any_one_wait_is_found(call):
    """Of rank 0, in the second of three calls."""
    ranks = world(3, [call] * 3)
    ops, tried = ranks[0].ops, 0
    for i in range(ranks[0].starts[1], ranks[0].starts[2]):
        if isinstance(ops[i], Await):
            assert explore(programs(ranks) | {"rank 0": [*ops[:i], *ops[i + 1 :]]}).wrong, f"{i}: {ops[i]}"
            tried += 1
    assert tried >= 2


@pytest.mark.expensive
@pytest.mark.parametrize("call", ["one_shot", "two_shot", "all_gather", "symmetric", "barrier"])
def test_publishing_before_any_one_store_is_found(call):
    """Of those of rank 0 that a peer reads, in the first of two calls."""
    ranks = world(3, [call] * 2)
    ops, tried = ranks[0].ops, 0
    read_by_peers = {op.loc for rank in ranks[1:] for op in rank.ops if isinstance(op, Read)}
    for i in range(ranks[0].starts[1]):
        if isinstance(ops[i], Write) and ops[i].loc in read_by_peers:
            publish = next(j for j in range(i, len(ops)) if isinstance(ops[j], Publish))
            moved = [*ops[:i], *ops[i + 1 : publish + 1], ops[i], *ops[publish + 1 :]]
            assert explore(programs(ranks) | {"rank 0": moved}).wrong, f"{i}: {ops[i]}"
            tried += 1
    assert tried >= 2


def test_reading_before_the_wait_is_found():
    """What a wait without acquire order allows."""
    ranks = world(2, ["one_shot"] * 2)
    wait = next(i for i, op in enumerate(ranks[1].ops) if isinstance(op, Await))
    header, data = ranks[1].ops[wait + 1 : wait + 3]
    assert isinstance(data, Read)
    for early, late in ((header, data), (data, header)):
        hoisted = [*ranks[1].ops[:wait], early, ranks[1].ops[wait], late, *ranks[1].ops[wait + 3 :]]
        assert "found 0" in explore(programs(ranks) | {"rank 1": hoisted}).wrong


# ---- failure: a killed rank, a deadline


def faults(size: int, *, deadlines: bool = True, **changes: Any) -> Faults:
    """A rank that fails says so, once and for all; whoever waits looks at these flags and at who is dead."""
    dead = {f"rank {r}": ("dead", r) for r in range(size)}
    failed = [("failed", r) for r in range(size)]
    epilogues = {f"rank {r}": [Publish(failed[r], 1)] for r in range(size)}
    return replace(Faults(dead, deadlines, [*dead.values(), *failed], epilogues), **changes)


@pytest.mark.expensive
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_dies_or_gives_up_at_any_moment_ends_every_other_rank_and_spoils_no_result(size):
    result = explore(programs(world(size, SHORT[:2])), faults=faults(size))
    assert not result.wrong, str(result)
    assert result.finished > 1  # done by all, or ended early


def test_a_rank_that_gives_up_without_a_word_is_found():
    result = explore(programs(world(2, SHORT[:2])), faults=faults(2, epilogues={}))
    assert result.wrong.startswith("deadlock")


def test_a_death_that_nobody_looks_for_is_found():
    unwatched = faults(2, deadlines=False, signals=[])
    assert explore(programs(world(2, SHORT[:2])), faults=unwatched).wrong.startswith("deadlock")


def test_using_the_world_after_a_deadline_is_found():
    """The late rank is still reading when the one that gave up writes its next call into the same slot."""
    goes_on = {"rank 0": [Write(("A", 0, slot), "next") for slot in (0, 1)]}
    result = explore(programs(world(2, ["one_shot"] * 2)), faults=faults(2, dead={}, signals=[], epilogues=goes_on))
    assert "found next" in result.wrong


# ---- sleeping


def sleepy(
    rank: int, size: int, phases: int, *, announce: str = "atomic", fence: bool = True, late_look: bool = True
) -> list[Op]:
    """One-phase calls whose waits sleep at once, on the peer's phase. Sleepers are counted beside it; whoever publishes
    looks at that count when the phase can be seen (in C++: both sides sequentially consistent)."""
    ops: list[Op] = []
    peers = [r for r in range(size) if r != rank]
    for phase in range(1, phases + 1):
        ops += [Write(("A", rank, phase & 1), (phase, rank)), Publish(("phase", rank), phase)]
        ops += [Fence()] * fence
        ops += [WakeIf(("sleepers", rank), ("bed", peer, rank)) for peer in peers]
        for peer in peers:
            sleepers, bed = ("sleepers", peer), ("bed", rank, peer)
            ops += {"atomic": [Add(sleepers, 1)], "plain": [Write(sleepers, 1)], "never": []}[announce]
            ops += [Sleep(("phase", peer), phase if late_look else 10**9, bed), Await(bed, 0, "equal")]
            ops += {"atomic": [Add(sleepers, -1)], "plain": [Write(sleepers, 0)], "never": []}[announce]
            ops += [Await(("phase", peer), phase), Read(("A", peer, phase & 1), (phase, peer))]
    return ops


def explore_sleep(size: int = 2, phases: int = 3, **changes: Any) -> Result:
    return explore({f"rank {r}": sleepy(r, size, phases, **changes) for r in range(size)})


def test_no_wake_up_is_lost():
    assert not explore_sleep().wrong
    assert not explore_sleep(3, 2).wrong


@pytest.mark.parametrize(
    "changes",
    [
        {"fence": False},  # the publisher looks for sleepers before its phase can be seen
        {"announce": "plain"},  # the sleeper looks at the phase before its announcement can be seen
        {"announce": "never"},
        {"late_look": False},  # futex_wait without a look at the phase
    ],
    ids=str,
)
def test_a_lost_wake_up_is_found(changes):
    assert explore_sleep(**changes).wrong.startswith("deadlock")


# ---- the explorer itself


def test_explorer_example():
    """The numbers of the module docstring."""
    sender: list[Op] = [Write("mail", 7), Publish("flag", 1)]
    receiver = [Await("flag", 1), Read("mail", 7)]
    assert explore({"rank 0": sender, "rank 1": receiver}).wrong == ""
    result = explore({"rank 0": sender[::-1], "rank 1": receiver})
    assert result.wrong == "rank 1: read of mail found 0, not 7"
    assert "rank 0: flag = 1" in result.trace
    assert "rank 0: mail = 7" not in result.trace


def test_explorer_lets_plain_stores_overtake_each_other_but_not_those_to_one_location():
    reader = [Await("b", 1), Read("a", 1)]
    assert explore({"writer": [Write("a", 1), Write("b", 1)], "reader": reader}).wrong
    assert not explore({"writer": [Write("a", 1), Fence(), Write("b", 1)], "reader": reader}).wrong
    assert not explore({"writer": [Write("a", 2), Write("a", 1), Publish("b", 1)], "reader": reader}).wrong


def test_explorer_says_who_is_stuck_and_when_there_is_too_much_to_look_at():
    stuck = explore({"one": [Await("a", 1), Publish("b", 1)], "two": [Await("b", 1), Publish("a", 1)]})
    assert stuck.wrong.startswith("deadlock: one at Await(loc='a', value=1")
    with pytest.raises(TooLarge, match="more than 100 states"):
        explore(programs(world(3, SHORT)), limit=100)
