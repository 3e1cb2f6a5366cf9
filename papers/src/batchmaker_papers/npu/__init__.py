"""A systolic-array accelerator: the work of a cell on it, and its cost (LazyBatching, HPCA 2021)."""

from batchmaker_papers.npu.accelerator import (
    Activations,
    Npu,
    Operation,
    OwnGemm,
    SharedGemm,
    Streamed,
    VectorWork,
    Weights,
)
from batchmaker_papers.npu.systolic import Gemm, dataflow_named, scalesim_os, scalesim_ws, tpu

__all__ = [
    "Activations",
    "Gemm",
    "Npu",
    "Operation",
    "OwnGemm",
    "SharedGemm",
    "Streamed",
    "VectorWork",
    "Weights",
    "dataflow_named",
    "scalesim_os",
    "scalesim_ws",
    "tpu",
]
