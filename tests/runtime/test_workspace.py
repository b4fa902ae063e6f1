"""Buffers are reused, and stay for as long as a user that may come back to them lives."""

import weakref

import torch

from ultraattn.runtime.workspace import Workspace


class User:
    pass


def lend(workspace, user, *sizes):
    workspace.user = weakref.ref(user)
    leases = [workspace.borrow(size) for size in sizes]
    for lease in leases:
        workspace.give_back(lease)
    return {lease.whole.data_ptr() for lease in leases}


def test_a_free_buffer_is_lent_again():
    workspace, user = Workspace(torch.device("cpu")), User()
    assert lend(workspace, user, 1000) == lend(workspace, user, 900)
    assert workspace.bytes_held == 1024


def test_trimming_frees_what_users_that_are_gone_used():
    workspace = Workspace(torch.device("cpu"))
    first, second = User(), User()
    lend(workspace, first, 1000, 50_000)
    shared = lend(workspace, second, 1000)
    workspace.trim()
    assert workspace.bytes_held == 1024 + 50_048
    del first
    workspace.trim()
    assert workspace.bytes_held == 1024
    assert lend(workspace, second, 1000) == shared
    del second
    workspace.trim()
    assert workspace.bytes_held == 0


def test_trimming_leaves_what_is_lent():
    workspace, user = Workspace(torch.device("cpu")), User()
    workspace.user = weakref.ref(user)
    lease = workspace.borrow(100)
    del user
    workspace.trim()
    assert workspace.bytes_held == workspace.bytes_lent == 128
    workspace.give_back(lease)
    workspace.trim()
    assert workspace.bytes_held == 0
