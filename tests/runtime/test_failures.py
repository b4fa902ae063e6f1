"""A rank that fails, dies, hangs or stays away: the others end in time and name it, task and cause.

A chain of ranks that wait for each other must blame the rank at its end, so the mask here is one
over which each rank needs something of every other.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest

import ultraattn as ua
from tests.runtime import workers
from ultraattn import masks
from ultraattn.runtime.local import Failure, LocalRanks

TIMEOUT_S = 2.0
GRACE_S = 6.0
"""What finding the culprit may take on top of the timeout, on busy cores."""


@pytest.fixture
def ranks():
    with LocalRanks(4, timeout_s=60) as made:
        yield made


def make_plan(mask=None, ranks=4) -> ua.Plan:
    return ua.plan(
        mask or masks.full(), seqlen=32, heads=2, head_dim=8, dtype="float32", ranks=ranks,
        strategy="rows",
    )  # fmt: skip


def assert_blamed(answers, culprit, within_s, *texts):
    """Every other rank raised RunError in time, with these texts in it."""
    for rank, answer in enumerate(answers):
        if rank == culprit:
            continue
        seconds, text = answer
        assert seconds < within_s, text
        assert text.startswith("RunError"), text
        for wanted in texts:
            assert re.search(wanted, text), text


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_rank_that_raises_is_named_at_once_with_task_and_cause(ranks, pass_):
    answers = ranks.run(workers.broken_rank, make_plan(), 2, "raises", pass_, 30.0)
    cause = rf"rank 2 failed in {pass_} task \d+ \(compute\): ValueError: a kernel that does not"
    assert_blamed(answers, 2, GRACE_S, cause)
    assert re.search(cause, answers[2][1])


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_rank_that_dies_is_named_with_its_task(ranks, pass_):
    answers = ranks.attempt(workers.broken_rank, make_plan(), 1, "dies", pass_, 30.0)
    assert isinstance(answers[1], Failure)
    assert "exit code 17" in answers[1].text
    assert_blamed(answers, 1, GRACE_S + 2, rf"rank 1 died .* in {pass_} task \d+ \(compute\)")


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_rank_that_hangs_is_named_with_its_task(ranks, pass_):
    answers = ranks.run(workers.broken_rank, make_plan(), 3, "hangs", pass_, TIMEOUT_S)
    wanted = rf"rank 3 is alive and hangs in {pass_} task \d+ \(compute\)"
    assert_blamed(answers, 3, TIMEOUT_S + GRACE_S, wanted)


def chunks_see(table) -> masks.Mask:
    """Chunk i of 4 sees the chunks table[i]."""
    return masks.from_blocks([[int(j in row) for j in range(4)] for row in table])


def test_a_chain_of_waits_blames_the_rank_at_its_end(ranks):
    """Rank 2 waits for rank 3's share of its dK; rank 1 waits for rank 2 to send keys.

    First plan: rank 3 computes over rank 2's keys, rank 1 over its own. Second: rank 1 needs rank
    2's keys, but rank 2 is in the first one still.
    """
    plans = [
        make_plan(chunks_see([[0], [1], [2], [2, 3]])),
        make_plan(chunks_see([[0], [1, 2], [2], [3]])),
    ]
    answers = ranks.run(workers.broken_in_a_row, plans, 3, TIMEOUT_S)
    cause = r"rank 3 is alive and hangs in backward task \d+ \(compute\)"
    assert re.search(f"waiting for rank 3: {cause}", answers[2][0][1]), answers[2]
    assert answers[1][0][1] == "nothing was raised"
    assert re.search(f"waiting for rank 2: {cause}", answers[1][1][1]), answers[1]


def test_a_rank_that_never_calls_is_named(ranks):
    answers = ranks.run(workers.absent_call, make_plan(), 0, TIMEOUT_S)
    wanted = "rank 0 is alive but between calls: it did not join forward of plan"
    assert_blamed(answers, 0, TIMEOUT_S + GRACE_S, wanted)


@pytest.mark.parametrize("planning_fails", [False, True])
def test_a_rank_that_never_makes_its_attention_is_named(ranks, planning_fails):
    answers = ranks.run(workers.absent_module, make_plan(), 1, TIMEOUT_S, planning_fails)
    assert_blamed(answers, 1, TIMEOUT_S + GRACE_S, "rank 1 did not bring a plan within 2 s")
    if planning_fails:
        assert answers[1][1].startswith("InputError")


def test_a_rank_with_another_batch_is_named(ranks):
    answers = ranks.run(workers.other_batch, make_plan(), 2, TIMEOUT_S)
    for seconds, text in answers:
        assert seconds < TIMEOUT_S + GRACE_S
        assert text.startswith("RunError"), text
    assert any("with batch 3" in text and "with batch 2" in text for _, text in answers), answers


def test_a_group_that_failed_refuses_further_calls(ranks):
    for first, again, module in ranks.run(workers.broken_then_again, make_plan(), 1):
        assert "a kernel that does not like" in first[1]
        for seconds, text in (again, (0.0, module)):
            assert seconds < 1.0
            assert "the process group failed in an earlier call" in text
            assert "a kernel that does not like" in text


def test_a_stopped_rank_is_named(ranks):
    """SIGSTOP: alive for the operating system, but it gives no sign any more."""
    plan = make_plan()
    ranks.run(workers.once, plan, 1)
    victim = ranks._processes[1].pid
    os.kill(victim, signal.SIGSTOP)
    try:
        for pipe in ranks._pipes:
            pipe.send((workers.constructed, (plan, {"timeout_s": TIMEOUT_S})))
        answers = [ranks._pipes[rank].recv() for rank in (0, 2, 3)]
    finally:
        os.kill(victim, signal.SIGCONT)
    assert all("rank 1 did not bring a plan" in text for text in answers), answers


def test_local_ranks_leave_no_process_behind():
    before = {child.pid for child in multiprocessing.active_children()}
    with LocalRanks(3, timeout_s=2.0) as ranks:
        pids = [process.pid for process in ranks._processes]
        answers = ranks.attempt(sleep_if_last, 3)
        assert [answer.kind for answer in answers if isinstance(answer, Failure)] == ["no answer"]
        with pytest.raises(ua.RunError, match="did not answer an earlier call"):
            ranks.run(sleep_if_last, 0)
    time.sleep(0.1)
    assert not [pid for pid in pids if _runs(pid)]
    assert {child.pid for child in multiprocessing.active_children()} == before


def test_local_ranks_end_when_their_parent_is_killed():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    parent = context.Process(target=hold_ranks, args=(theirs,))
    parent.start()
    pids = ours.recv()
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    end = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in pids if _runs(pid)]


def test_local_ranks_name_every_rank_that_failed():
    with LocalRanks(3, timeout_s=30) as ranks, pytest.raises(ua.RunError) as caught:
        ranks.run(divide, 6)
    assert "rank 0: ZeroDivisionError" in str(caught.value)
    assert "rank 1" not in str(caught.value)


def divide(rank, number):
    return number / rank


def sleep_if_last(rank, ranks):
    if rank == ranks - 1:
        time.sleep(600)


def hold_ranks(pipe):
    ranks = LocalRanks(2)
    pipe.send([process.pid for process in ranks._processes])
    ranks.run(sleep_if_last, 2)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
