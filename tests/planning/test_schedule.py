from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraattn.errors import InputError
from ultraattn.planning import list_schedule
from ultraattn.planning import schedule as schedules
from ultraattn.planning import schedule_kernels as kernels
from ultraattn.planning.list_schedule import Lists, backwards, by_load, by_rules
from ultraattn.planning.schedule import (
    Jobs,
    Schedule,
    baseline,
    check_schedule,
    schedule,
    to_integer_durations,
)
from ultraattn.planning.schedule_bounds import lower_bound, one_stream_bound, stream_bound
from ultraattn.planning.tiling import Effort

RECEIVE, COMPUTE, SEND, OTHER_RECEIVE = range(4)
NAMES = ("Q3", "KV3", "A0", "A1", "A2", "O3")
DURATIONS = (20, 10, 10, 20, 10, 10)
STREAMS = ((RECEIVE,), (RECEIVE,), (COMPUTE,), (COMPUTE,), (COMPUTE,), (SEND,))
DEPENDS = ((), (), (), (1,), (0, 1), (4,))


def worked_example(extra: dict[str, tuple[int, ...]] | None = None) -> Jobs:
    """The jobs of the design's schedule example, with further dependencies."""
    depends = [(*d, *(extra or {}).get(n, ())) for n, d in zip(NAMES, DEPENDS, strict=True)]
    return Jobs.of(DURATIONS, STREAMS, depends, NAMES)


@st.composite
def some_jobs(draw: st.DrawFn, most: int = 12) -> Jobs:
    count = draw(st.integers(1, most))
    durations = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    streams = [
        draw(st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True)) for _ in durations
    ]
    label = draw(st.permutations(range(count)))
    depends: list[list[int]] = [[] for _ in durations]
    for at in range(1, count):
        chosen = draw(st.lists(st.integers(0, at - 1), max_size=3, unique=True))
        depends[label[at]] = [label[other] for other in chosen]
    return Jobs.of(durations, streams, depends)


def by_enumeration(jobs: Jobs) -> int:
    """The least makespan, over every order of the jobs."""
    lists = Lists(jobs)
    before = jobs.depends_on.rows()
    best = int(jobs.duration.sum())
    for order in itertools.permutations(range(len(jobs))):
        place = {job: at for at, job in enumerate(order)}
        if all(place[o] < place[j] for j, row in enumerate(before) for o in row):
            best = min(best, lists.makespan(lists.append(order)))
    return best


@pytest.mark.parametrize("effort", [Effort.FAST, Effort.NORMAL, Effort.BEST])
def test_the_worked_example_takes_50_proved(effort: Effort) -> None:
    found = schedule(worked_example(), effort)
    check_schedule(worked_example(), found)
    assert (found.makespan, found.lower_bound, found.proved) == (50, 50, True)
    start = dict(zip(NAMES, found.start.tolist(), strict=True))
    assert start["KV3"] < start["Q3"]


def test_receiving_q3_first_takes_60_with_a2_before_a1() -> None:
    found = schedule(worked_example({"KV3": (0,)}), Effort.BEST)
    start = dict(zip(NAMES, found.start.tolist(), strict=True))
    assert (found.makespan, found.proved) == (60, True)
    assert start["A0"] < start["A2"] < start["A1"]


def test_receiving_q3_first_takes_70_in_the_order_a0_a1_a2() -> None:
    found = schedule(worked_example({"KV3": (0,), "A1": (2,), "A2": (3,)}), Effort.BEST)
    assert (found.makespan, found.proved) == (70, True)


def test_the_three_timelines_end_in_the_order_of_the_figure() -> None:
    """Figure 5(c): received at once (0), Q3 first (1), KV3 first (2).

    Received at once, both share the link for as long as both take one after the other, and the
    contention costs something on top.
    """
    lost = 2
    at_once = Jobs.of(
        [20 + 10 + lost, 20 + 10 + lost, *DURATIONS[2:]],
        [(RECEIVE,), (OTHER_RECEIVE,), *STREAMS[2:]],
        DEPENDS,
        NAMES,
    )
    both, q_first, kv_first = (
        schedule(jobs, Effort.BEST)
        for jobs in (at_once, worked_example({"KV3": (0,)}), worked_example({"Q3": (1,)}))
    )
    assert all(found.proved for found in (both, q_first, kv_first))
    assert both.makespan > q_first.makespan > kv_first.makespan == 50
    a1, a2 = NAMES.index("A1"), NAMES.index("A2")
    firsts = [int(min(s.start[a1], s.start[a2])) for s in (both, q_first, kv_first)]
    assert firsts == sorted(firsts, reverse=True)


def test_plain_critical_path_priority_can_give_70() -> None:
    jobs = worked_example({"KV3": (0,)})
    lists = Lists(jobs)
    start = lists.dispatch(list_schedule.rules(jobs)["longest tail"])
    assert lists.makespan(start) == 70


@settings(deadline=None, derandomize=True, max_examples=60)
@given(some_jobs())
def test_every_way_to_schedule_is_sound_and_none_beats_the_bound(jobs: Jobs) -> None:
    bound = lower_bound(jobs)
    lists = Lists(jobs)
    first = lists.append(jobs.order)
    starts = {**by_rules(lists), **by_load(lists), **backwards(lists)}
    starts |= {"search": lists.search(first, 0, 50), "shaken": lists.shake(first, 0, 8)}
    for name, start in starts.items():
        makespan = lists.makespan(start)
        check_schedule(jobs, Schedule(start, makespan, bound, makespan == bound, name))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(some_jobs())
def test_more_effort_is_never_worse_and_never_worse_than_the_baseline(jobs: Jobs) -> None:
    made = [schedule(jobs, effort) for effort in Effort]
    for found in made:
        check_schedule(jobs, found)
    lengths = [found.makespan for found in made]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] <= baseline(jobs).makespan


@settings(deadline=None, derandomize=True, max_examples=25)
@given(some_jobs(most=6))
def test_best_effort_finds_the_optimum_of_all_orders(jobs: Jobs) -> None:
    found = schedule(jobs, Effort.BEST)
    assert found.proved
    assert found.makespan == by_enumeration(jobs)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(some_jobs())
def test_plain_python_and_compiled_loops_give_the_same_schedules(jobs: Jobs) -> None:
    if not kernels.COMPILED:
        pytest.skip("numba is not installed: there is one way only")
    compiled = _all_ways(jobs)
    names = (
        "append",
        "insert",
        "dispatch",
        "dispatch_loaded",
        "_pull",
        "_push",
        "improve",
        "_draw",
    )
    names = [name for name, made in vars(kernels).items() if hasattr(made, "py_func")]
    assert len(names) == 8
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(kernels, name, getattr(kernels, name).py_func)
        patch.setattr(kernels, "COMPILED", False)
        plain = _all_ways(jobs)
    assert compiled == plain


def _all_ways(jobs: Jobs) -> dict[str, list[int]]:
    lists = Lists(jobs)
    found = {name: start.tolist() for name, start in by_rules(lists).items()}
    searched = lists.search(lists.append(jobs.order), 0, 100)
    found |= {name: start.tolist() for name, start in by_load(lists).items()}
    shaken = lists.shake(lists.append(jobs.order), 0, 6)
    return {**found, "search": searched.tolist(), "shaken": shaken.tolist()}


def test_local_search_shortens_a_bad_order() -> None:
    jobs = worked_example()
    lists = Lists(jobs)
    bad = lists.append([0, 1, 2, 3, 4, 5])
    assert lists.makespan(bad) == 70
    assert lists.makespan(lists.search(bad, 0, 200)) == 50


def test_the_one_stream_bound_is_the_preemptive_optimum() -> None:
    # Carlier's example of a job with a long tail that interrupts another.
    assert one_stream_bound([(0, 10, 1), (2, 3, 20)]) == 25
    assert one_stream_bound([(5, 1, 0)]) == 6


def test_heads_count_all_jobs_of_a_stream_that_a_job_waits_for() -> None:
    jobs = Jobs.of([4, 5, 6, 1], [(0,), (0,), (0,), (1,)], [(), (), (), (0, 1, 2)])
    assert lower_bound(jobs) == 16


def test_a_launch_beside_a_longer_one_delays_what_comes_before_it_or_after_it() -> None:
    names = ("needed by c", "needed by x", "c", "x", "given by c", "given by x")
    streams = ((RECEIVE,), (RECEIVE,), (COMPUTE,), (COMPUTE,), (SEND,), (SEND,))
    jobs = Jobs.of([10, 6, 10, 1, 10, 4], streams, [(), (), (0,), (1,), (2,), (3,)], names)
    assert lower_bound(jobs) == 10 + 10 + 10 + min(6, 4)
    assert schedule(jobs, Effort.FAST).makespan == by_enumeration(jobs) == lower_bound(jobs)


@st.composite
def some_launches(draw: st.DrawFn) -> Jobs:
    """Launches of one rank, after receives that wait for others, before sends of own or shared."""
    counts = [draw(st.integers(1, 3)) for _ in range(4)]
    kinds = [
        k
        for k, n in zip((OTHER_RECEIVE, RECEIVE, COMPUTE, SEND), counts, strict=True)
        for _ in range(n)
    ]
    durations = draw(st.lists(st.integers(1, 20), min_size=len(kinds), max_size=len(kinds)))
    depends: list[list[int]] = [[] for _ in kinds]
    first = counts[0]
    for at in range(1, 4):
        before = range(first - counts[at - 1], first)
        for job in range(first, first + counts[at]):
            depends[job] = draw(st.lists(st.sampled_from(before), max_size=3, unique=True))
        first += counts[at]
    return Jobs.of(durations, [(kind,) for kind in kinds], depends)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.one_of(some_launches(), some_jobs()))
def test_no_schedule_beats_the_bound_whatever_launches_wait_for(jobs: Jobs) -> None:
    found = schedule(jobs, Effort.FAST)
    check_schedule(jobs, found)  # which refuses a bound above the makespan
    shortest = Lists(jobs).makespan(Lists(jobs).search(found.start, 0, 300))
    assert lower_bound(jobs) <= shortest


def test_a_launch_that_receives_nothing_may_be_the_first_of_all() -> None:
    streams = ((COMPUTE,), (COMPUTE,), (SEND,), (RECEIVE,), (OTHER_RECEIVE,))
    jobs = Jobs.of([2, 3, 20, 8, 7], streams, [(), (3,), (0,), (4,), ()])
    assert lower_bound(jobs) == by_enumeration(jobs) == 22


def test_a_job_without_a_stream_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="KV3 has no stream"):
        Jobs.of([1, 1], [(0,), ()], [(), ()], ("Q3", "KV3"))


def test_a_cycle_is_named() -> None:
    with pytest.raises(InputError, match="cycle: b waits for d waits for c waits for b"):
        Jobs.of([1] * 4, [(0,)] * 4, [(), (3,), (1,), (2,)], tuple("abcd"))


@pytest.mark.parametrize(
    ("durations", "depends", "words"),
    [
        ([0], [()], "lasts 0: expected at least 1"),
        ([1], [(7,)], "depends on job 7"),
        ([2**31], [()], "beyond the horizon"),
    ],
)
def test_jobs_that_cannot_be_scheduled_are_refused(
    durations: list[int], depends: list[tuple[int, ...]], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        Jobs.of(durations, [(0,)] * len(durations), depends)


def test_a_schedule_that_breaks_a_rule_is_refused() -> None:
    jobs = Jobs.of([2, 2, 2], [(0,), (0,), (1,)], [(), (), (1,)])
    good = np.array([0, 2, 4])
    check_schedule(jobs, Schedule(good, 6, 4, False, "test"))
    for start, words in (([0, 1, 4], "at once"), ([0, 2, 3], "before job 1"), ([-1, 2, 4], "time")):
        with pytest.raises(InputError, match=words):
            check_schedule(jobs, Schedule(np.array(start), 6, 4, False, "test"))
    with pytest.raises(InputError, match="makespan 7"):
        check_schedule(jobs, Schedule(good, 7, 4, False, "test"))
    with pytest.raises(InputError, match="proved is True"):
        check_schedule(jobs, Schedule(good, 6, 4, True, "test"))


def test_durations_count_256ths_of_the_shortest() -> None:
    counted, quantum = to_integer_durations([2e-6, 3e-6, 0.0])
    assert counted.tolist() == [256, 384, 1]
    assert quantum == pytest.approx(2e-6 / 256)


def test_durations_far_apart_stay_below_the_horizon() -> None:
    counted, quantum = to_integer_durations([1e-9, 100.0])
    assert int(counted.sum()) < 2**31
    assert counted[1] * quantum == pytest.approx(100.0)


def test_parts_that_share_nothing_are_scheduled_apart() -> None:
    one = worked_example()
    count = len(one)
    streams = [*one.streams.rows(), *([s + 5 for s in row] for row in one.streams.rows())]
    depends = [*one.depends_on.rows(), *([d + count for d in row] for row in DEPENDS)]
    jobs = Jobs.of([*DURATIONS, *(3 * d for d in DURATIONS)], streams, depends)
    found = schedule(jobs, Effort.BEST)
    check_schedule(jobs, found)
    assert (found.makespan, found.proved) == (150, True)
    assert int((found.start + jobs.duration)[:count].max()) == 50


def test_parts_that_repeat_are_scheduled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = worked_example()
    count, made = len(one), []
    streams = [*one.streams.rows(), *([s + 5 for s in row] for row in one.streams.rows())]
    depends = [*one.depends_on.rows(), *([d + count for d in row] for row in DEPENDS)]
    monkeypatch.setattr(
        schedules, "stream_bound", lambda *given: made.append(given) or stream_bound(*given)
    )
    found = schedule(Jobs.of([*DURATIONS, *DURATIONS], streams, depends), Effort.FAST)
    assert found.start[:count].tolist() == found.start[count:].tolist()
    assert len(made) == 1


def test_no_jobs_take_no_time() -> None:
    found = schedule(Jobs.of([], [], []), Effort.FAST)
    assert (found.makespan, found.proved) == (0, True)


def test_every_rule_has_a_priority_for_every_job() -> None:
    jobs = worked_example()
    assert {len(priority) for priority in list_schedule.rules(jobs).values()} == {len(jobs)}
