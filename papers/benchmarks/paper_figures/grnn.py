"""GRNN (EuroSys 2019)."""

from __future__ import annotations

from typing import Any, Final

from paper_figures.entry import Figure, result

TITLE: Final = "GRNN: low-latency and scalable RNN inference on GPUs (EuroSys 2019)"
GPU: Final = (
    "On an H200, of 2024, not a TITAN V; cuDNN is torch's nn.LSTM and nn.GRU in the same run, padded or packed, "
    "whichever is faster. "
)
H200_TFLOPS: Final = 67
"""Float32 without tensor cores, data sheet."""


def _candidates() -> str:
    rows = [row for row in result("kernel-configurations.json")["rows"] if row["arch"] == "sm_90"]
    sizes = sorted({(row["cell"], row["hidden"], row["batch"], row["num_candidates"]) for row in rows
                    if row["dtype"] == "float32" and row["batch"] in (1, 10, 20)})  # fmt: skip
    return "; ".join(f"{cell} {hidden}/{batch}: {count:,}" for cell, hidden, batch, count in sizes if cell == "lstm")


def _rows(section: str) -> list[dict[str, Any]]:
    return list(result("gpu-kernels.json")["sections"][section]["rows"])


def _table1() -> str:
    rows = [row for row in _rows("table1") if row["cell"] == "lstm" and row["dtype"] == "float32"]
    (one,) = (row for row in rows if (row["hidden"], row["batch"]) == (256, 10))
    over = sorted(
        (min(row["padded_ms"], row["packed_ms"]) / row["kernel_ms"], f"{row['hidden']}/{row['batch']}") for row in rows
    )
    module = sorted(min(row["padded_ms"], row["packed_ms"]) / row["persistent_ms"] for row in rows)
    cudnn_ms = min(one["padded_ms"], one["packed_ms"])
    return (
        f"LSTM 256/10, float32: {one['kernel_ms']:.2f} ms against {cudnn_ms:.2f} (cuDNN); "
        f"cuDNN over the kernel {over[0][0]:.2f} ({over[0][1]}) to {over[-1][0]:.1f} ({over[-1][1]}), with the host's "
        f"part of a call {module[0]:.2f} to {module[-1]:.1f}"
    )


def _table3() -> str:
    return "; ".join(
        f"{row['hidden']}/{row['batch']}: {row['one_ms']:.2f} and {row['two_ms']:.2f} ms" for row in _rows("table3")
    )


def _figures() -> str:
    (most,) = (
        row for row in _rows("table1")
        if (row["cell"], row["dtype"], row["hidden"], row["batch"]) == ("lstm", "float32", 1024, 64)
    )  # fmt: skip
    tflops = 2 * 4 * 1024**2 * 64 * most["steps"] / most["kernel_ms"] / 1e9
    tuned = _rows("tuner")
    first, five = (max(row[f"top{count}_over_best"] for row in tuned) for count in (1, 5))
    networks = [row for row in _rows("networks") if row["dtype"] == "float32"]
    over = {name: sorted(row["padded_ms"] / row["persistent_ms"] for row in networks if row["network"] == name)
            for name in dict.fromkeys(row["network"] for row in networks)}  # fmt: skip
    return (
        f"LSTM 1024/64: {tflops:.0f} TFLOP/s, {tflops / H200_TFLOPS:.0%} of peak; top 1 within {first - 1:.1%}, top 5 "
        f"within {five - 1:.1%} of the best of {tuned[0]['measured']}; networks, cuDNN over ours: "
        + ", ".join(f"{name} {ratios[0]:.2f} to {ratios[-1]:.2f}" for name, ratios in over.items())
    )


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
        "in part",
        "LSTM 256/10: 0.38 ms against 1.28 and 1.89 (cuDNN); up to 17.5 times DeepCPU",
        _table1,
        "gpu",
        GPU + "DeepCPU is not there to be run. At hidden 64 cuDNN has a persistent kernel of its own.",
        picture="gpu.png",
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
        "in part",
        "one is faster up to hidden 256",
        _table3,
        "gpu",
        "One exchange is PyTorch's GRU, two the canonical one. The method that gives the canonical GRU one exchange is "
        "compiled and emulated, and has not been timed.",
    ),
    Figure(
        "Figures 13, 14, 15",
        "achieved throughput, top 1 and 5 against the best, two real models",
        "in part",
        "15.7 % of peak; top 1 within 3 %",
        _figures,
        "gpu",
        GPU + "The best is that of the model's first 40 configurations, of three layers, not of all that fit.",
    ),
)
