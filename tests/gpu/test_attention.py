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


def over(transport, graph):
    """NCCL needs a GPU for each rank; symmetric memory takes several on one, to test with."""
    needs = pytest.mark.skipif(transport == "nccl" and GPUS < 2, reason="needs two GPUs")
    return pytest.param(transport, graph, marks=needs)


EVERY = [over("symmetric", False), over("symmetric", True), over("nccl", False)]


@pytest.mark.parametrize(("transport", "graph"), EVERY)
def test_two_ranks_are_exact(transport, graph):
    run("exact", 2, transport, graph)


@pytest.mark.parametrize(("transport", "graph"), EVERY)
def test_two_ranks_that_keep_what_forward_received_are_exact(transport, graph):
    run("exact", 2, transport, graph, True)


@pytest.mark.parametrize(("transport", "graph"), EVERY)
def test_lengths_head_dims_and_batches(transport, graph):
    run("shapes", 2, transport, graph)


@pytest.mark.parametrize(("transport", "graph"), EVERY)
def test_two_layers_under_activation_checkpointing(transport, graph):
    run("checkpointed", 2, transport, graph)


@pytest.mark.parametrize(("transport", "graph"), [over("symmetric", True), over("nccl", False)])
def test_a_thousand_calls_with_ranks_out_of_step_are_right(transport, graph):
    run("replays", 2, transport, graph, 1000)


@pytest.mark.parametrize(("transport", "graph"), [over("symmetric", True), over("nccl", False)])
def test_a_thousand_calls_take_no_more_memory(transport, graph):
    run("memory", 2, transport, graph, 1000)


def test_ranks_whose_tensors_move_and_ranks_whose_tensors_stay_fit():
    run("apart", 2, "symmetric", True)


@pytest.mark.parametrize(("transport", "graph"), EVERY)
def test_deterministic_calls_are_bit_equal(transport, graph):
    run("deterministic", 2, transport, graph, 50 if graph else 10)


@pytest.mark.parametrize("graph", [False, True])
def test_a_peer_that_stops_is_named_with_the_transfer_it_owes(graph):
    run("stops", 2, "symmetric", graph)


@pytest.mark.parametrize("ranks", [1, 2])
def test_graphs_hold_copies_for_tensors_that_move_alone(ranks):
    run("copies", ranks)
