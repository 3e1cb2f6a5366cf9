"""How long things take: latency tables, length profiles, the NPU model. No torch."""

from batchmaker.cost.latency import CellLatency, LatencyTable, OnlineCorrection, Quantile
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.npu import (
    Activations,
    Npu,
    Operation,
    OwnGemm,
    SharedGemm,
    Streamed,
    VectorWork,
    Weights,
)
from batchmaker.cost.profile import CostProfile, Overhead, PredictedLength, ProfileOptions
from batchmaker.cost.systolic import Gemm, dataflow_named, scalesim_os, scalesim_ws, tpu

__all__ = [
    "Activations",
    "CellLatency",
    "CostProfile",
    "Gemm",
    "LatencyTable",
    "LengthProfile",
    "Npu",
    "OnlineCorrection",
    "Operation",
    "Overhead",
    "OwnGemm",
    "PredictedLength",
    "ProfileOptions",
    "Quantile",
    "SharedGemm",
    "Streamed",
    "VectorWork",
    "Weights",
    "dataflow_named",
    "scalesim_os",
    "scalesim_ws",
    "tpu",
]
