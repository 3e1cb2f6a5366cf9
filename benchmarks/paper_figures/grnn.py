"""GRNN (EuroSys 2019)."""

from __future__ import annotations

from typing import Final

from paper_figures.entry import Figure, result

TITLE: Final = "GRNN: low-latency and scalable RNN inference on GPUs (EuroSys 2019)"
GPU: Final = "Needs an Nvidia GPU: the kernels are compiled and run on an emulator, and have not been timed."


def _candidates() -> str:
    rows = [row for row in result("kernel-configurations.json")["rows"] if row["arch"] == "sm_90"]
    sizes = sorted({(row["cell"], row["hidden"], row["batch"], row["num_candidates"]) for row in rows
                    if row["dtype"] == "float32" and row["batch"] in (1, 10, 20)})  # fmt: skip
    return "; ".join(f"{cell} {hidden}/{batch}: {count:,}" for cell, hidden, batch, count in sizes if cell == "lstm")


FIGURES: Final = (
    Figure(
        "Figures 1 to 10",
        "cells, GPUs, tilings, synchronisation, the cost model",
        "explanation",
        where="[kernels](kernels.md)",
    ),
    Figure(
        "Table 1, Figures 11, 12",
        "LSTM and GRU against cuDNN and DeepCPU",
        "not reproduced",
        "LSTM 256/10: 0.38 ms against 1.28 and 1.89 (cuDNN); up to 17.5 times DeepCPU",
        "",
        "gpu",
        GPU,
    ),
    Figure(
        "Section 7, the space",
        "candidates that are ranked",
        "in part",
        "over 100,000 for hidden 256",
        _candidates,
        "kernel-configurations",
        "Those left after pruning, at hidden/batch, float32 on sm_90.",
    ),
    Figure(
        "Table 2",
        "cost and rank of five tilings at 256/20",
        "reproduced",
        "costs 449, 322, 252, 443, 561",
        "the same costs and the same order",
        where="[kernels](kernels.md), `tests/kernels`",
    ),
    Figure(
        "Table 3",
        "one and two exchanges a step for the GRU",
        "not reproduced",
        "one is faster up to hidden 256",
        "the cost model says the same",
        "gpu",
        GPU,
    ),
    Figure(
        "Figures 13, 14, 15",
        "achieved throughput, top 1 and 5 against the best, two real models",
        "not reproduced",
        "15.7 % of peak; top 1 within 3 %",
        "",
        "gpu",
        GPU,
    ),
)
