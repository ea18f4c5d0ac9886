"""Timelines: what they count, their text picture, traces that read back, merging, comparing, and the drawings."""

import json
import random
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from fastpar.pipeline import (
    Action,
    ActionType,
    Costs,
    Event,
    Timeline,
    add_communication,
    compare,
    make_schedule,
    simulate,
)
from fastpar.pipeline.simulation.plot import boxes, plot


def of_words(words: dict[str, tuple], unit: str = "unit") -> Timeline:
    """{"rank action": (start, end)}."""
    events = []
    for word, (start, end) in words.items():
        rank, action = word.split()
        events.append(Event(int(rank), Action.parse(action), start, end))
    return Timeline(tuple(events), unit)


SMALL = {
    "0 0F0": (1, 3),
    "0 0SEND_F0": (3, 4),
    "1 1RECV_F0": (1, 4),
    "1 1F0": (4, 6),
    "1 1B0": (6, 9),
    "0 0B0": (10, 11),
}


def test_idle_time_is_what_no_action_occupies() -> None:
    timeline = of_words(SMALL)
    assert (timeline.start, timeline.end, timeline.makespan, timeline.num_ranks) == (1, 11, 10, 2)
    assert [timeline.busy(rank) for rank in (0, 1)] == [3, 5]
    assert [timeline.idle(rank) for rank in (0, 1)] == [7, 5]
    assert [timeline.inner_idle(rank) for rank in (0, 1)] == [7, 0]
    assert timeline.bubble == Fraction(12, 20)
    assert timeline.shares(1) == {
        ActionType.RECV_F: Fraction(3, 10),
        ActionType.FORWARD: Fraction(2, 10),
        ActionType.BACKWARD: Fraction(3, 10),
    }


def test_a_timeline_without_events_or_time_divides_by_nothing() -> None:
    assert (Timeline(()).makespan, Timeline(()).bubble, Timeline(()).num_ranks) == (0, 0, 0)
    instant = of_words({"0 0STEP": (3, 3)})
    assert (instant.bubble, instant.shares(0), instant.to_text()) == (0, {ActionType.STEP: 0}, "rank 0")


# ----------------------------------------------------------------------------------------------------------------- text


def test_the_text_picture_is_to_scale() -> None:
    timeline = simulate(make_schedule("zb_h1", 3, 4)).timeline
    assert timeline.to_text().splitlines() == [
        "rank 0  F0 F1 F2 ····· I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "rank 1  ·· F0 F1 ·· I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "rank 2  ····· F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_chunks_are_primed_and_overlaps_joined() -> None:
    timeline = of_words({"0 0F10": (0, 1), "0 (2F0;0B10)OVERLAP_F_B": (1, 4), "0 2W0": (5, 6)})
    assert timeline.to_text() == "rank 0  F10 F0'+B10━━━━ ··· W0'"


def test_a_long_picture_is_squeezed_and_keeps_letters() -> None:
    timeline = simulate(make_schedule("1f1b", 4, 8), Costs(1, 1, 1)).timeline
    lines = timeline.to_text(width=98).splitlines()
    assert lines[3] == "rank 3  ····· F0B0━ F1B1━ F2B2━ F3B3━ F4B4━ F5B5━ F6B6━ F7B7━ ···········"
    assert timeline.to_text(width=33).splitlines()[3] == "rank 3  ·· FB0FB1FB2FB3FB4FB5FB6FB7·····"
    assert timeline.to_text(width=20).splitlines()[3] == "rank 3  ·FBFBFBB3BFBFBFB···"
    # never the first digit alone
    assert of_words({"0 0F10": (0, 2), "0 0B10": (2, 4)}).to_text(width=4) == "rank 0  FFBB"


def test_measured_times_are_drawn_too() -> None:
    text = of_words({"0 0F0": (100.25, 100.75), "0 0B0": (100.75, 102.25)}, "s").to_text(width=16)
    assert text == "rank 0  F0─ B0━━━━━━━━━"


# --------------------------------------------------------------------------------------------------------------- traces


def odd_timelines() -> list[Timeline]:
    draw = random.Random(3)
    exact = simulate(add_communication(make_schedule("1f1b", 4, 6)), Costs(Fraction(1, 3), 2, Fraction(8, 7), hop=1))
    floats = simulate(make_schedule("zb_h1", 3, 5), Costs(0.1, 0.2, 0.3, hop=1e-3))
    words = {"0 (0F1;1B3)OVERLAP_F_B": (draw.random(), 1e9 + draw.random()), "0 0STASH@2": (2, 2), "2 2F0@7": (1, 2)}
    return [exact.timeline, floats.timeline, of_words(words, "s"), Timeline((), "ms", "empty")]


@pytest.mark.parametrize("index", range(4))
def test_a_trace_reads_back_without_loss(index: int, tmp_path: Path) -> None:
    timeline = odd_timelines()[index]
    path = tmp_path / "trace.json"
    assert timeline.to_chrome_trace(path) == json.loads(path.read_text())
    found = Timeline.from_chrome_trace(path)
    assert found == timeline == Timeline.from_chrome_trace(timeline.to_chrome_trace())
    for event, read in zip(timeline.events, found.events, strict=True):
        assert (type(event.start), type(event.end)) == (type(read.start), type(read.end))


def test_a_trace_is_laid_out_for_perfetto() -> None:
    timeline = of_words({word: (start / 2, end / 2) for word, (start, end) in SMALL.items()}, "s")
    events = timeline.to_chrome_trace()["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (slices["1F0"]["pid"], slices["1F0"]["ts"], slices["1F0"]["dur"]) == (1, 2e6, 1e6)
    assert [slices[name]["tid"] for name in ("0F0", "0SEND_F0", "1RECV_F0", "1B0")] == [0, 1, 1, 0]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    assert names[1, None] == "rank 1"
    assert (names[1, 0], names[1, 1]) == ("compute", "communication 1")
    begin, end = (event for event in events if event["ph"] in "sf")
    assert (begin["pid"], begin["tid"], end["pid"], end["tid"]) == (0, 1, 1, 1)
    assert slices["0SEND_F0"]["ts"] <= begin["ts"] < slices["0SEND_F0"]["ts"] + slices["0SEND_F0"]["dur"]
    assert slices["1RECV_F0"]["ts"] <= end["ts"] < slices["1RECV_F0"]["ts"] + slices["1RECV_F0"]["dur"]


def test_slices_of_a_thread_never_overlap() -> None:
    timeline = simulate(add_communication(make_schedule("1f1b", 4, 8)), Costs(hop=7)).timeline
    threads: dict[tuple[int, int], list[dict]] = {}
    for event in timeline.to_chrome_trace()["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert max(thread for _, thread in threads) > 1
    for own in threads.values():
        own.sort(key=lambda event: (event["ts"], event["dur"]))
        for one, other in pairwise(own):
            assert one["ts"] + one["dur"] <= other["ts"]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv"])
def test_arrows_lead_from_every_message_to_who_needs_it(name: str, explicit: bool) -> None:
    schedule = make_schedule(name, 4, 8)
    found = simulate(add_communication(schedule) if explicit else schedule, Costs(1, 1, 1, hop=1))
    flows = found.timeline.flows
    assert len(flows) == found.num_messages
    for producer, consumer in flows:
        assert producer.rank != consumer.rank
        assert producer.action.microbatch == consumer.action.microbatch
        stages = (producer.action.stage, consumer.action.stage)
        forward = producer.action.type in (ActionType.FORWARD, ActionType.SEND_F)
        assert stages[1] - stages[0] == (1 if forward else -1)
        assert producer.end <= consumer.end if explicit else producer.end + 1 <= consumer.start


def test_events_of_a_profiler_in_the_trace_are_skipped_and_other_traces_refused() -> None:
    timeline = of_words(SMALL)
    trace = timeline.to_chrome_trace()
    trace["traceEvents"].append({"ph": "X", "name": "aten::mm", "pid": 0, "tid": 0, "ts": 0, "dur": 1, "args": {}})
    assert Timeline.from_chrome_trace(trace) == timeline
    with pytest.raises(ValueError, match="the trace was not written by fastpar"):
        Timeline.from_chrome_trace({"traceEvents": []})


# ------------------------------------------------------------------------------------------------ merging and comparing


def test_files_of_ranks_merge_with_the_offsets_of_their_clocks(tmp_path: Path) -> None:
    whole = simulate(add_communication(make_schedule("1f1b", 3, 4)), Costs(hop=1)).timeline
    offsets = [5, -2, Fraction(1, 2)]
    read = []
    for rank, own in enumerate(whole.by_rank):
        Timeline(own, whole.unit, whole.name).shifted(-offsets[rank]).to_chrome_trace(tmp_path / f"{rank}.json")
        read.append(Timeline.from_chrome_trace(tmp_path / f"{rank}.json"))
    assert Timeline.merge(read, offsets) == whole
    assert Timeline.merge(read[::-1], offsets[::-1]) == whole
    assert Timeline.merge([t.shifted(o + 7) for t, o in zip(read, offsets, strict=True)]).from_zero() == whole


@pytest.mark.parametrize(
    ("timelines", "offsets", "says"),
    [
        ([], None, "there are no timelines"),
        ([of_words(SMALL)], [1, 2], "1 timelines need as many offsets, got 2"),
        ([of_words(SMALL), of_words(SMALL)], None, "timelines 0 and 1 both have events of rank"),
        ([of_words({"0 0F0": (0, 1)}, "s"), of_words({"1 1F0": (0, 1)})], None, "one unit, got s, unit"),
    ],
)
def test_timelines_that_do_not_fit_are_not_merged(timelines: list, offsets: list | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Timeline.merge(timelines, offsets)


def test_a_prediction_is_compared_rank_by_rank() -> None:
    schedule = make_schedule("1f1b", 2, 3)
    predicted = simulate(schedule, Costs(1.0, 1.0, 1.0))
    measured = simulate(schedule, Costs(1.0, 1.0, 2.0))
    found = compare(predicted.timeline, measured.timeline)
    assert found.makespan == (12, 16)
    assert found.error == pytest.approx(-0.25)
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert found.ranks[1].idle == (0.25, 0.25)
    assert found.ranks[1].shares == {
        ActionType.FORWARD: (0.25, 0.1875),
        ActionType.BACKWARD: (0.5, 0.5625),
    }
    assert found.to_text() == (
        "makespan: 12 unit predicted (-25.0%), 16 unit measured\n"
        "rank         idle            F            B\n"
        "0     25.0 / 25.0  25.0 / 18.8  50.0 / 56.2\n"
        "1     25.0 / 25.0  25.0 / 18.8  50.0 / 56.2"
    )


def test_makespans_of_different_units_have_no_error_and_ranks_must_match() -> None:
    one, other = of_words({"0 0F0": (0, 1)}, "s"), of_words({"0 0W0": (0, 3)})
    found = compare(one, other)
    assert found.error is None
    assert found.ranks[0].shares == {ActionType.FORWARD: (1, 0), ActionType.BACKWARD_WEIGHT: (0, 1)}
    with pytest.raises(ValueError, match="1 ranks were predicted and 2 measured"):
        compare(one, of_words(SMALL))


# ------------------------------------------------------------------------------------------------------------- pictures


def bars(figure) -> list:  # type: ignore[no-untyped-def]
    from matplotlib.collections import PolyCollection

    return [
        (path.get_extents(), tuple(colour))
        for axes in figure.axes
        for drawn in axes.collections
        if isinstance(drawn, PolyCollection)
        for path, colour in zip(drawn.get_paths(), drawn.get_facecolors(), strict=True)
    ]


def test_a_picture_has_one_bar_per_action_where_it_happened() -> None:
    timeline = simulate(make_schedule("zb_h1", 3, 4), Costs(2, 3, 1, hop=1)).timeline.shifted(100)
    drawn = bars(plot(timeline))
    assert len(drawn) == len(timeline.events) == 3 * 4 * 3
    for event, (box, _) in zip(timeline.events, drawn, strict=True):
        assert (box.x0 + 100, box.x1 + 100) == (event.start, event.end)
        assert event.rank < box.y0 < box.y1 < event.rank + 1
    assert len({colour for _, colour in drawn}) == 3


def test_a_picture_says_which_microbatch_makespan_and_bubble() -> None:
    axes = plot(simulate(make_schedule("1f1b", 2, 12)).timeline).axes[0]
    assert sorted(int(text.get_text()) for text in axes.texts) == sorted(4 * [*range(12)])
    assert axes.get_title("left") == "1f1b"
    assert axes.get_title("right") == "makespan 39, bubble 7.7 %"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.yaxis_inverted()
    assert plot(simulate(make_schedule("1f1b", 2, 12)).timeline, titles=["mine"]).axes[0].get_title("left") == "mine"


def test_numbers_that_do_not_fit_are_left_out() -> None:
    timeline = simulate(make_schedule("1f1b", 4, 100)).timeline
    few, all_of_them = (len(plot(timeline, width=inches).axes[0].texts) for inches in (4, 200))
    assert all_of_them == 4 * 2 * 100
    assert few < all_of_them / 4


def test_an_overlap_shares_its_row_and_transfers_have_no_bar() -> None:
    timeline = of_words({"0 0RECV_F0": (0, 1), "0 (0F0;1B3)OVERLAP_F_B": (1, 3), "0 0STEP": (3, 3)})
    (upper, _), (lower, _) = bars(plot(timeline))
    assert (upper.x0, upper.x1, lower.x0, lower.x1) == (1, 3, 1, 3)
    assert upper.y1 == lower.y0
    ticks = [line for line in plot(timeline).axes[0].lines if line.get_marker() == "v"]
    assert list(ticks[0].get_xdata()) == [3]


def test_backwards_are_darker_than_forwards_and_later_stages_paler() -> None:
    schedule = make_schedule("interleaved_1f1b", 2, 4, stages_per_rank=3)
    shades: dict[tuple[str, int], float] = {}
    for box in boxes(simulate(schedule).timeline):
        red, green, blue = box.colour
        shades[box.action.type.value, box.action.stage // 2] = 0.299 * red + 0.587 * green + 0.114 * blue
    assert len(set(shades.values())) == 6
    for chunk in range(3):
        assert shades["B", chunk] < shades["F", chunk] - 0.2
    for kind in "FB":
        assert shades[kind, 0] < shades[kind, 1] < shades[kind, 2]


def test_timelines_of_one_unit_share_their_axis_and_others_do_not() -> None:
    short, long = (simulate(make_schedule(name, 3, 6)).timeline for name in ("zb_h1", "naive"))
    figure = plot([short, long])
    assert [axes.get_xlim() for axes in figure.axes] == [(0, float(long.makespan))] * 2
    assert len(bars(figure)) == len(short.events) + len(long.events)
    seconds = Timeline(long.events, "s")
    assert [axes.get_xlim()[1] for axes in plot([short, seconds]).axes] == [float(short.makespan), float(long.makespan)]
    assert plot(seconds).axes[0].get_xlabel() == "time [s]"


@pytest.mark.parametrize("explicit", [False, True])
def test_arrows_are_drawn_on_request(explicit: bool) -> None:
    from matplotlib.collections import LineCollection

    schedule = make_schedule("1f1b", 3, 4)
    found = simulate(add_communication(schedule) if explicit else schedule, Costs(hop=2))
    (lines,) = (
        drawn for drawn in plot(found.timeline, arrows=True).axes[0].collections if isinstance(drawn, LineCollection)
    )
    segments = lines.get_segments()
    assert len(segments) == found.num_messages
    # drawn from when a message leaves to when it is there, or (without a RECV) to when it is used
    assert min(end[0] - start[0] for start, end in segments) == 2
    assert not any(isinstance(drawn, LineCollection) for drawn in plot(found.timeline).axes[0].collections)


def test_pictures_are_files_that_do_not_change_from_run_to_run(tmp_path: Path) -> None:
    timeline = simulate(make_schedule("1f1b", 2, 3)).timeline
    for name in ("a.svg", "b.svg", "a.png", "a.pdf"):
        plot(timeline, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    assert ">rank 1</text>" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([], None, None), "there is no timeline"),
        ((Timeline(()), None, None), "or nothing in it"),
        ((of_words(SMALL), "a.gif", None), "written as .png, .svg, .pdf, got 'a.gif'"),
        ((of_words(SMALL), None, ["a", "b"]), "1 timelines need as many titles, got 2"),
    ],
)
def test_pictures_that_cannot_be_drawn_are_refused(arguments: tuple, says: str) -> None:
    timelines, path, titles = arguments
    with pytest.raises(ValueError, match=says):
        plot(timelines, path, titles=titles)
