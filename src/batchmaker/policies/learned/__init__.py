"""Batching policies that are learnt from closed mini-batches, by Q-learning, for the scheduler (ED-Batch, 2023)."""

from batchmaker.policies.learned.policy import LearnedPolicy
from batchmaker.policies.learned.policy_file import CellRow, LearntFrom, PolicyFile

__all__ = ["CellRow", "LearnedPolicy", "LearntFrom", "PolicyFile"]
