"""Attention on a CUDA group: graphs, autograd in every order; one rank, and two where there are."""

import socket

import pytest
import torch
import torch.multiprocessing

from tests.gpu import workers

GPUS = torch.cuda.device_count()


def run(worker, ranks, *args):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(workers.start, (ranks, port, worker, args), nprocs=ranks)


@pytest.mark.parametrize("graph", [False, True])
def test_one_rank_is_exact(graph):
    run("exact", 1, "auto", graph)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("transport", "graph"), [("symmetric", False), ("symmetric", True), ("nccl", False)]
)
def test_two_ranks_are_exact(transport, graph):
    run("exact", 2, transport, graph)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("transport", "graph"), [("symmetric", True), ("nccl", False)])
def test_a_thousand_calls_with_ranks_out_of_step_are_right(transport, graph):
    run("replays", 2, transport, graph, 1000)
