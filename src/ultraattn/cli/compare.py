"""Turns the results of a run into errors and their limits, by `ultraattn.runtime.verify`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ultraattn.cli.layer import Inputs
from ultraattn.masks import Lengths, Mask
from ultraattn.plans.problem import Problem
from ultraattn.runtime import verify
from ultraattn.runtime.pieces import DTYPES


@dataclass(frozen=True)
class Verdict:
    """How far out, dq, dk and dv are from dense attention, and how far they may be."""

    errors: verify.Errors
    limits: verify.Errors

    @property
    def faults(self) -> list[str]:
        """What is above its limit."""
        return verify.above(self.errors, self.limits)


class Judge:
    """Dense attention over whole inputs, computed once on this process, and what it says."""

    def __init__(self, problem: Problem, mask: Mask, x: Inputs) -> None:
        lengths = Lengths(problem.q_len, problem.kv_len)
        keys = np.arange(problem.kv_len, dtype=np.int64)

        def visible(rows: Tensor) -> Tensor:
            truth = mask.dense(rows.numpy(), keys, lengths, heads=problem.heads)[0]
            return torch.from_numpy(np.ascontiguousarray(truth))

        self._truth = verify.dense_results(x.q, x.k, x.v, x.dout, visible, problem.scale)
        device = self._truth
        if problem.dtype != "float64":
            whole = visible(torch.arange(problem.q_len))
            device = verify.device_results(x.q, x.k, x.v, x.dout, whole, problem.scale)
        alone = verify.compare(device, self._truth)
        self._limits = verify.limit(DTYPES[problem.dtype], alone)

    def verdict(self, results: verify.Results) -> Verdict:
        """Holds whole results against dense attention."""
        return Verdict(verify.compare(results, self._truth), self._limits)
