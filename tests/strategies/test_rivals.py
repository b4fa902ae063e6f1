"""Rivals as data: sound for any mask and shape, traffic by formula, waste from the account."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from tests.strategies.rival_plans import rival_plan
from ultraattn import masks
from ultraattn.errors import InputError
from ultraattn.masks import Mask
from ultraattn.plans import Pass, Plan
from ultraattn.strategies import NAMES, build_pass, by_name, key_receives

MASKS: tuple[Mask, ...] = (
    masks.full(),
    masks.causal(),
    masks.star(),
    masks.sliding_window(5),
    masks.document([3, 11, 2, 9]),
    masks.global_local(),
)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    name=st.sampled_from(sorted(NAMES)),
    mask=st.integers(0, len(MASKS) - 1),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 3),
    layout=st.sampled_from(["contiguous", "zigzag", "striped"]),
    kv_heads=st.sampled_from([1, 3, 9]),
    data=st.data(),
)
def test_every_variant_is_sound(
    name: str,
    mask: int,
    nodes: int,
    per_node: int,
    layout: str,
    kv_heads: int,
    data: st.DataObject,
) -> None:
    plan = rival_plan(
        name,
        MASKS[mask],
        seqlen=25,
        heads=9,
        kv_heads=kv_heads,
        nodes=nodes,
        per_node=per_node,
        layout=layout,
    )
    variants = by_name(name).variants(plan.problem, plan.ranks)
    chosen = data.draw(st.sampled_from(variants))
    rival_plan(
        chosen.label,
        MASKS[mask],
        seqlen=25,
        heads=9,
        kv_heads=kv_heads,
        nodes=nodes,
        per_node=per_node,
        layout=layout,
    ).check()


def test_fewer_tokens_than_ranks_and_unequal_lengths_are_served() -> None:
    for name in NAMES:
        rival_plan(name, masks.causal(), seqlen=3).check()
        rival_plan(name, masks.full(), seqlen=24, kv_seqlen=7).check()


class TestRingWaste:
    """The worked example: four chunks, first column and diagonal, one chunk a rank."""

    mask = masks.from_blocks([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]])
    plan = rival_plan("ring", mask, seqlen=16)

    def test_nine_of_twelve_receives_are_useless(self) -> None:
        found = key_receives(self.plan.forward.program)
        assert (found.total, found.useless) == (12, 9)

    def test_the_account_counts_all_twelve(self) -> None:
        problem = self.plan.problem
        chunk = 4 * problem.kv_heads * (problem.head_dim + problem.value_dim) * 8
        assert self.plan.forward_account.received.tolist() == [3 * chunk] * 4

    def test_rows_receive_only_what_they_need(self) -> None:
        rows = ua.plan(
            self.mask, seqlen=16, heads=4, kv_heads=2, head_dim=8, ranks=4, strategy="rows",
            layout="contiguous",
        )  # fmt: skip
        found = key_receives(rows.forward.program)
        assert (found.total, found.useless) == (3, 0)


def key_bytes(plan: Plan, element: int) -> int:
    """All keys and values (or their gradients)."""
    p = plan.problem
    return p.kv_len * p.kv_heads * (p.head_dim + p.value_dim) * element


def query_bytes(plan: Plan, element: int) -> int:
    p = plan.problem
    return p.q_len * p.heads * p.head_dim * element


def sent(plan: Plan, pass_: Pass) -> int:
    return int(plan.account(pass_).sent.sum())


class TestTraffic:
    """bfloat16: 2 bytes an element, 4 in the accumulation dtype."""

    @pytest.mark.parametrize("name", ["ring", "zigzag", "stripe"])
    @pytest.mark.parametrize("mask", [masks.full(), masks.sliding_window(3)], ids=str)
    def test_rings_send_all_keys_past_all_ranks_whatever_the_mask(
        self, name: str, mask: Mask
    ) -> None:
        plan = rival_plan(name, mask, seqlen=48, dtype="bfloat16", per_node=6)
        assert sent(plan, Pass.FORWARD) == 5 * key_bytes(plan, 2)
        assert sent(plan, Pass.BACKWARD) == 5 * key_bytes(plan, 2) + 6 * key_bytes(plan, 4)

    def test_allgather_sends_keys_to_all_and_gradients_back(self) -> None:
        plan = rival_plan("allgather", masks.causal(), seqlen=48, dtype="bfloat16", per_node=6)
        assert sent(plan, Pass.FORWARD) == 5 * key_bytes(plan, 2)
        assert sent(plan, Pass.BACKWARD) == 10 * key_bytes(plan, 2)

    def test_heads_move_all_but_their_own_share(self) -> None:
        plan = rival_plan(
            "heads", masks.causal(), seqlen=48, dtype="bfloat16", heads=8, kv_heads=8, per_node=4
        )
        p = plan.problem
        out = p.q_len * p.heads * (p.value_dim * 2 + 4)
        whole = query_bytes(plan, 2) + key_bytes(plan, 2) + out
        assert sent(plan, Pass.FORWARD) == whole * 3 // 4
        sums = p.q_len * p.heads * (p.value_dim * 2 + 8)  # dO, LSE and delta
        whole = 2 * query_bytes(plan, 2) + 2 * key_bytes(plan, 2) + sums
        assert sent(plan, Pass.BACKWARD) == whole * 3 // 4

    def test_heads_copy_key_heads_where_ranks_outnumber_them(self) -> None:
        plan = rival_plan(
            "heads", masks.full(), seqlen=48, dtype="bfloat16", heads=8, kv_heads=2, per_node=4
        )
        p = plan.problem
        queries = query_bytes(plan, 2) + p.q_len * p.heads * (p.value_dim * 2 + 4)
        copies = 2  # each key head serves two ranks
        assert sent(plan, Pass.FORWARD) == (queries + copies * key_bytes(plan, 2)) * 3 // 4

    def test_double_ring_enters_each_node_once(self) -> None:
        plan = rival_plan(
            "double_ring", masks.full(), seqlen=48, dtype="bfloat16", nodes=3, per_node=2,
            layout="contiguous",
        )  # fmt: skip
        account = plan.forward_account
        assert int(account.sent_between_nodes.sum()) == 2 * key_bytes(plan, 2)
        inside = int(account.sent.sum() - account.sent_between_nodes.sum())
        assert inside == 3 * key_bytes(plan, 2)
        back = int(plan.backward_account.sent_between_nodes.sum())
        assert back == 2 * key_bytes(plan, 2) + 3 * key_bytes(plan, 4)

    @pytest.mark.parametrize("shape", [(1, 6), (2, 3), (3, 2), (6, 1)])
    def test_mesh_moves_queries_along_rows_and_keys_along_columns(
        self, shape: tuple[int, int]
    ) -> None:
        r, c = shape
        plan = rival_plan(f"mesh:{r}x{c}", masks.full(), seqlen=48, dtype="bfloat16", per_node=6)
        p = plan.problem
        query = 8 * p.heads * p.head_dim * 2
        key = 8 * p.kv_heads * (p.head_dim + p.value_dim) * 2
        out = 8 * p.heads * (p.value_dim * 2 + 4)
        each = (c - 1) * (query + out) + (r - 1) * key
        assert plan.forward_account.received.tolist() == [each] * 6
        assert plan.forward_account.sent.tolist() == [each] * 6

    def test_heads_ring_passes_keys_in_rings_of_lanes(self) -> None:
        plan = rival_plan(
            "heads_ring:2x3", masks.full(), seqlen=48, dtype="bfloat16", per_node=6, kv_heads=2,
            layout="contiguous",
        )  # fmt: skip
        p = plan.problem
        out = p.q_len * p.heads * (p.value_dim * 2 + 4)
        exchanged = (query_bytes(plan, 2) + key_bytes(plan, 2) + out) // 2
        assert sent(plan, Pass.FORWARD) == exchanged + 2 * key_bytes(plan, 2)


class TestRefusals:
    def test_heads_fewer_than_ranks_says_what_would_fit(self) -> None:
        plan = rival_plan("ring", masks.causal(), seqlen=24, heads=2, kv_heads=1, per_node=4)
        refusal = by_name("heads").refusal(plan.problem, 4)
        assert refusal is not None
        assert "strategy heads with 2 heads over 4 ranks" in refusal
        assert "at most 2 ranks, or heads_ring" in refusal
        assert by_name("heads").variants(plan.problem, 4) == ()
        with pytest.raises(InputError, match=re.escape(refusal)):
            build_pass(
                "heads", Pass.FORWARD, plan.problem, plan.q_layout, plan.kv_layout, plan.place,
                plan.forward.program.block_views,
            )  # fmt: skip

    def test_variants_leave_out_more_lanes_than_heads(self) -> None:
        plan = rival_plan("ring", masks.causal(), seqlen=24, heads=2, kv_heads=1, per_node=4)
        shapes = [s.shape for s in by_name("heads_ring").variants(plan.problem, 4)]
        assert shapes == [(1, 4), (2, 2)]
        assert by_name("heads_ring").resolved(plan.problem, 4) == (1, 4)

    def test_blocks_of_all_heads_are_refused_with_the_cut_they_need(self) -> None:
        plan = rival_plan("ring", masks.causal(), seqlen=24, per_node=4)
        with pytest.raises(InputError, match="cut the blocks into 4 head groups"):
            build_pass(
                "heads", Pass.FORWARD, plan.problem, plan.q_layout, plan.kv_layout, plan.place,
                plan.forward.program.block_views,
            )  # fmt: skip

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("rings", "expected one of ring, zigzag, stripe"),
            ("ring:2x2", "only after one of heads_ring, mesh"),
            ("mesh:2", "expected a shape of two numbers"),
        ],
    )
    def test_unknown_names_list_the_valid_ones(self, name: str, said: str) -> None:
        with pytest.raises(InputError, match=said):
            by_name(name)

    def test_a_shape_for_another_number_of_ranks_is_refused(self) -> None:
        plan = rival_plan("mesh", masks.full(), seqlen=24, per_node=4)
        refusal = by_name("mesh:2x3").refusal(plan.problem, 4)
        assert refusal is not None
        assert "1x4, 2x2, 4x1 would fit" in refusal
