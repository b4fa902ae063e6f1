"""Programs over gateways are sound, and a chunk crosses to a node once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.relayed_plans import ASSIGNMENTS, HOWS, LENGTH, MASKS, relayed_plan
from tests.plans.interpret import Interpreter

from ultraattn.plans import Pass
from ultraattn.plans.tensors import Tensor


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    mask=st.sampled_from(sorted(MASKS)),
    nodes=st.sampled_from([(2, 2), (2, 3), (4, 2), (3, 1)]),
    layout=st.sampled_from(["contiguous", "zigzag", "striped"]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 3), (2, 1)]),
    assignment=st.sampled_from(ASSIGNMENTS),
    how=st.sampled_from(sorted(HOWS)),
    seed=st.integers(0, 99),
)
def test_any_program_is_sound_and_crosses_no_more_than_direct_transfers(
    mask, nodes, layout, heads, assignment, how, seed
):
    more = {"nodes": nodes[0], "per_node": nodes[1], "layout": layout, "heads": heads}
    more |= {"assignment": assignment, "seed": seed}
    direct, relayed = relayed_plan(mask, **more), relayed_plan(mask, **more, how=HOWS[how])
    relayed.check()
    for pass_ in Pass:
        Interpreter(relayed, pass_, relayed.pass_plan(pass_).program, seed).run()
        ours, theirs = relayed.account(pass_), direct.account(pass_)
        assert ours.load.tolist() == theirs.load.tolist()
        assert ours.sent_between_nodes.sum() <= theirs.sent_between_nodes.sum()


def test_rows_bring_each_chunk_into_a_node_once():
    plan = relayed_plan("full", nodes=2, per_node=3, assignment="rows", how=HOWS["waves"])
    widths, kv_heads = plan.problem.widths, plan.problem.kv_heads
    row = sum(widths.row_bytes(t) for t in (Tensor.K, Tensor.V)) * kv_heads
    assert plan.forward_account.received_between_nodes.sum() == LENGTH * row
    # dQ stays; dK and dV of a foreign chunk are added up inside before they cross.
    back = sum(widths.row_bytes(t) for t in (Tensor.DK, Tensor.DV)) * kv_heads
    assert plan.backward_account.received_between_nodes.sum() == LENGTH * (row + back)


def test_a_hot_chunk_crosses_in_stripes_over_all_nics():
    plan = relayed_plan(
        "narrow", nodes=2, per_node=4, layout="contiguous", assignment="rows",
        how=HOWS["stripes"],
    )  # fmt: skip
    whole = relayed_plan(
        "narrow", nodes=2, per_node=4, layout="contiguous", assignment="rows",
        how=HOWS["waves"],
    )  # fmt: skip
    sent = plan.forward_account.sent_between_nodes
    assert (sent[:4] > 0).all()
    assert sent.max() < whole.forward_account.sent_between_nodes.max()
    assert sent.sum() == whole.forward_account.sent_between_nodes.sum()


def test_nics_of_a_dense_mask_carry_the_same():
    plan = relayed_plan("full", nodes=2, per_node=4, assignment="rows", how=HOWS["waves"])
    sent = plan.backward_account.sent_between_nodes
    assert sent.max() < 1.2 * sent.mean()


@pytest.mark.parametrize("how", ["grouped", "together"])
def test_collectives_spare_messages(how):
    waves, fewer = (relayed_plan("causal", per_node=4, how=HOWS[h]) for h in ("waves", how))
    for pass_ in Pass:
        tasks = [len(p.pass_plan(pass_).program.tasks.rank) for p in (waves, fewer)]
        assert tasks[1] < tasks[0]


def test_programs_are_the_same_every_time():
    plans = [relayed_plan("document", nodes=2, per_node=3, how=HOWS["stripes"]) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].digest == plans[1].digest


def test_values_inside_a_node_stay_wide_until_they_are_added_up():
    plan = relayed_plan("full", per_node=2, assignment="rows", how=HOWS["waves"], dtype="float16")
    values = plan.backward.program.value_views
    crossing = np.flatnonzero([v.tensor is Tensor.DK and not v.wide for v in values])
    assert crossing.size
    assert any(v.tensor is Tensor.DK and v.wide for v in values)
