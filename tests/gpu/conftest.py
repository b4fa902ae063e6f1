"""Leaves these tests out where there is no CUDA device; lets them try kernels yet to be proved."""

import os

import torch

from ultraattn.runtime.kernels.rows import ALLOW_UNPROVED, UNPROVED

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
os.environ[ALLOW_UNPROVED] = ",".join(UNPROVED)
