"""Graph batching: whole requests, padded and computed together. The baseline of cellular batching."""

from typing import Final

from batchmaker.lab.baselines.buckets import PaddedPolicy, SerialPolicy
from batchmaker.lab.baselines.closed import ClosedPolicy
from batchmaker.lab.baselines.orloj import OrlojPolicy
from batchmaker.lab.baselines.window import WindowPolicy
from batchmaker.policies.base import CellPolicy, GraphPolicy

POLICIES: Final[dict[str, type[CellPolicy] | type[GraphPolicy]]] = {
    policy.name: policy for policy in (ClosedPolicy, OrlojPolicy, PaddedPolicy, SerialPolicy, WindowPolicy)
}

__all__ = ["POLICIES", "ClosedPolicy", "OrlojPolicy", "PaddedPolicy", "SerialPolicy", "WindowPolicy"]
