"""Costs: latency tables and length profiles. No torch."""

from batchmaker.cost.latency import CellLatency, LatencyTable, OnlineCorrection, Quantile
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.profile import CostProfile, Overhead, PredictedLength, ProfileOptions

__all__ = [
    "CellLatency",
    "CostProfile",
    "LatencyTable",
    "LengthProfile",
    "OnlineCorrection",
    "Overhead",
    "PredictedLength",
    "ProfileOptions",
    "Quantile",
]
