"""The result of planning: its data, its checks, and its file."""

from ultraattn.plans.account import Account
from ultraattn.plans.builder import ProgramBuilder
from ultraattn.plans.check import check_program
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.plan import Bounds, PassPlan, Place, Plan, RankPlan
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import (
    Block,
    Collective,
    CollectiveOp,
    Compute,
    Local,
    LocalOp,
    Merge,
    Program,
    Stream,
    StreamKind,
    Task,
    TaskKind,
    Transfer,
    Value,
)
from ultraattn.plans.rank_program import RankProgram
from ultraattn.plans.tensors import Tensor

__all__ = [
    "Account",
    "Block",
    "Bounds",
    "Collective",
    "CollectiveOp",
    "Compute",
    "Layout",
    "Local",
    "LocalOp",
    "Merge",
    "Pass",
    "PassPlan",
    "Place",
    "Plan",
    "Problem",
    "Program",
    "ProgramBuilder",
    "RankPlan",
    "RankProgram",
    "Stream",
    "StreamKind",
    "Task",
    "TaskKind",
    "Tensor",
    "Transfer",
    "Value",
    "check_program",
]
