"""Options become masks, clusters and plans; what cannot be served ends with exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from ultraattn import masks
from ultraattn.cli.arguments import cluster_of, make_plan, mask_of, tokens
from ultraattn.cli.options import PlanOptions
from ultraattn.errors import InputError

Call = Callable[..., tuple[int, str, str]]


def test_sizes_read_with_and_without_a_suffix():
    assert [tokens(text, "--seqlen") for text in ("65536", "64k", "64K", "65_536")] == [65536] * 4
    assert tokens("1m", "--seqlen") == 1048576


@pytest.mark.parametrize("text", ["", "k", "-5", "1.5k", "64 k tokens", "٣"])
def test_sizes_that_are_none_are_refused(text: str):
    with pytest.raises(InputError, match="expected tokens, as in 65536, 64k or 1m"):
        tokens(text, "--seqlen")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PlanOptions(), masks.causal()),
        (PlanOptions(mask="sliding_window", window=9), masks.sliding_window(9)),
        (PlanOptions(mask="document", lengths="4,2k"), masks.document([4, 2048])),
        (
            PlanOptions(mask="document", lengths="4,2", causal=False),
            masks.document([4, 2], causal=False),
        ),
        (PlanOptions(mask="strided", grid=8, period=2, width=1), masks.strided(8, 2, 1)),
        (PlanOptions(mask="global_local", globals=2, locals=2), masks.global_local(16, 2, 2)),
        (PlanOptions(mask="streaming", sink=2, local=2), masks.streaming(8, 2, 2)),
        (
            PlanOptions(mask="from_ranges", q_ranges="0:4,4:8", k_ranges="0:8,2:6", kinds="causal"),
            masks.from_ranges([(0, 4), (4, 8)], [(0, 8), (2, 6)], "causal"),
        ),
        (
            PlanOptions(
                mask="from_ranges", q_ranges="0:4,4:8", k_ranges="0:8,2:6", kinds="full,causal"
            ),
            masks.from_ranges([(0, 4), (4, 8)], [(0, 8), (2, 6)], ["full", "causal"]),
        ),
        (PlanOptions(mask="from_blocks", table="20/12"), masks.from_blocks([[2, 0], [1, 2]])),
    ],
)
def test_mask_options_make_the_mask_of_that_name(options: PlanOptions, expected: masks.Mask):
    assert mask_of(options).spec() == expected.spec()


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (PlanOptions(), (1, 4)),
        (PlanOptions(ranks=64), (1, 64)),
        (PlanOptions(nodes=2, gpus_per_node=3), (2, 3)),
        (PlanOptions(nodes=2, gpus_per_node=3, ranks=6), (2, 3)),
        (PlanOptions(cluster="h200"), (1, 8)),
        (PlanOptions(cluster="h200", ranks=2), (1, 2)),
        (PlanOptions(cluster="h200", ranks=64), (8, 8)),
        (PlanOptions(cluster="h200", nodes=4), (4, 8)),
    ],
)
def test_ranks_become_nodes_of_the_cluster(options: PlanOptions, shape: tuple[int, int]):
    cluster = cluster_of(options, 4)
    assert (cluster.nodes, cluster.gpus_per_node) == shape


def test_document_lengths_say_how_long_the_sequence_is():
    plan, _ = make_plan(PlanOptions(mask="document", lengths="5,9,3", ranks=2, strategy="rows"))
    assert plan.problem.q_len == 17


def test_key_value_heads_follow_heads_where_only_those_are_given():
    options = PlanOptions(seqlen="8", ranks=2, strategy="rows", heads=3)
    assert make_plan(options)[0].problem.kv_heads == 3
    assert make_plan(replace(options, heads=None))[0].problem.kv_heads == 2


def test_every_planning_option_reaches_the_plan(call: Call):
    code, out, _ = call(
        "plan", "--json", "--mask", "full", "--seqlen", 48, "--kv-seqlen", 30, "--heads", 4,
        "--kv-heads", 2, "--head-dim", 8, "--value-dim", 16, "--dtype", "float64", "--scale", 0.5,
        "--nodes", 2, "--gpus-per-node", 2, "--layout", "zigzag", "--kv-layout", "striped",
        "--chunks", 8, "--head-groups", 2, "--strategy", "tile", "--load-cap", 2.5,
        "--effort", "instant",
    )  # fmt: skip
    facts = json.loads(out)
    expected = {
        "mask": "full", "seqlen": 48, "kv_seqlen": 30, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "dtype": "float64", "ranks": 4, "nodes": 2, "layout": "zigzag", "chunks": 8,
        "head_groups": 2, "strategy": "tile", "units": "bytes",
    }  # fmt: skip
    assert code == 0
    assert {name: facts[name] for name in expected} == expected


def test_units_paper_states_volumes_in_the_papers_units(call: Call):
    arguments = ("plan", "--json", "--mask", "star", "--seqlen", 64, "--effort", "instant")
    facts = json.loads(call(*arguments, "--units", "paper", "--chunks", 4, "--head-groups", 1)[1])
    assert facts["units"] == "paper"
    # The worked example of star's 4 x 4 grid: 4 is the least for the busiest rank.
    assert facts["max_volume"] >= 4


BAD = [
    (["--heads", 6, "--kv-heads", 4], ["6", "4", "multiple", "divides"]),
    (["--heads", 0], ["--heads 0", "at least 1"]),
    (["--kv-heads", 0], ["--kv-heads 0", "at least 1"]),
    (["--seqlen", "lots"], ["'lots'", "65536"]),
    (["--mask", "diagonal"], ["'diagonal'", "causal", "choose"]),
    (["--mask", "causal", "--window", 3], ["causal", "'window'", "no parameters"]),
    (["--mask", "sliding_window"], ["sliding_window", "needs 'window'"]),
    (["--mask", "sliding_window", "--window", 0], ["0", "at least 1"]),
    (["--mask", "document", "--lengths", "5,6", "--seqlen", 12], ["11", "12", "add up"]),
    (["--mask", "document", "--lengths", "5;6"], ["--lengths", "5;6", "expected"]),
    (["--mask", "document", "--lengths", "5,6", "--kv-seqlen", 12], ["12", "equal lengths"]),
    (["--mask", "from_ranges", "--q-ranges", "0-4", "--k-ranges", "0:4"], ["0-4", "0:64,64:128"]),
    (["--mask", "from_blocks", "--table", "20/1x"], ["20/1x", "20/12"]),
    (["--ranks", 0], ["--ranks 0", "at least 1"]),
    (["--ranks", 5, "--nodes", 2, "--gpus-per-node", 2], ["--ranks 5", "expected 4"]),
    (["--cluster", "h200", "--ranks", 12], ["12", "8 ranks", "multiple"]),
    (["--cluster", "abacus"], ["'abacus'", "h200"]),
    (["--dtype", "int8"], ["'int8'", "float32"]),
    (["--layout", "spiral"], ["'spiral'", "zigzag"]),
    (["--layout", "zigzag", "--chunks", 6], ["6 chunks", "multiple of 8"]),
    (["--strategy", "luck"], ["'luck'", "tile"]),
    (["--effort", "heroic"], ["'heroic'", "fast"]),
    (["--units", "furlongs"], ["'furlongs'", "paper"]),
    (["--out", "/nowhere/at/all/plan.json", "--seqlen", 8, "--strategy", "rows"], ["/nowhere"]),
]


@pytest.mark.parametrize("command", ["plan", "show", "run"])
@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(map(str, a)) for a, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(
    call: Call, command: str, arguments: list[object], said: list[str]
):
    code, out, err = call(command, *arguments)
    line = err.strip().splitlines()[-1]
    assert (code, out) == (2, "")
    assert line.startswith("error: ")
    assert [word for word in said if word not in line] == []
    assert "Traceback" not in err


def test_an_option_of_another_type_is_exit_code_2(call: Call):
    code, out, err = call("plan", "--heads", "many")
    assert (code, out) == (2, "")
    assert "--heads" in err
    assert "integer" in err


@pytest.mark.parametrize("command", ["run", "plan", "show", "bench"])
def test_help_teaches_by_example(call: Call, command: str):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"ultraattn {command}" in out.split("Examples:")[1]
    for option in ("--mask", "--seqlen", "--ranks", "--effort", "--json", "--out"):
        assert option in out
