"""How a launch's blocks become calls of a kernel."""

import torch

import ultraattn as ua
from ultraattn.plans.program import Compute
from ultraattn.runtime import tiles
from ultraattn.runtime.dense import dense_attention
from ultraattn.runtime.together import Together


def plan_with_head_ranges(tokens=256, heads=4):
    """Causal on two ranks: chunk 0's rank computes half of the heads of chunk 1."""
    return ua.plan(
        ua.masks.causal(), seqlen=tokens, heads=heads, head_dim=8, dtype="float64", head_groups=2,
        cluster=ua.Cluster.load("h200").resize(nodes=1, gpus_per_node=2), effort="instant",
    )  # fmt: skip


def test_neighbouring_head_ranges_of_one_tile_are_one_call(monkeypatch):
    plan = plan_with_head_ranges()
    programs = [plan.for_rank(rank).forward for rank in range(2)]
    tiles_of = [
        [program.blocks[block] for block in task.tile]
        for program in programs
        for task in program.tasks
        if isinstance(task, Compute)
    ]
    pairs = sum(len({(b.q_chunk, b.kv_chunk) for b in tile}) for tile in tiles_of)
    assert pairs < sum(map(len, tiles_of))  # a launch holds two head ranges of a pair of chunks
    heads = []
    inner = tiles.forward_row

    def counted(q, pieces, *args, **kwargs):
        heads.extend([q.shape[1]] * len(pieces))
        return inner(q, pieces, *args, **kwargs)

    monkeypatch.setattr(tiles, "forward_row", counted)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 256, 8, dtype=torch.float64, generator=generator) for _ in "qkv")
    out, _ = Together(plan).forward(q, k, v)
    assert sum(heads) == 3 * 4  # three pairs of chunks, each head once
    assert len(heads) == pairs
    seen = torch.ones(1, 256, 256, dtype=torch.bool).tril()
    wanted = dense_attention(q, k, v, seen)[0]
    assert float((out - wanted).norm() / wanted.norm()) < 1e-12
