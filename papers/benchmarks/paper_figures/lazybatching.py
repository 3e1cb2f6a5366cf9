"""LazyBatching (HPCA 2021). The numbers and how they were made are on the page lazybatching.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from paper_figures.entry import Figure, first, ranged, result
from shared import number

TITLE: Final = "LazyBatching: an SLA-aware batching system (HPCA 2021)"
OURS: Final = "lazy"
EQUATION_2: Final = "lazy:slack=literal,benefit=no,lengths=fixed"
"""Asked of all members, the strongest reading in most cases."""
PAGE: Final = "[LazyBatching](lazybatching.md)"
DATAFLOW: Final = (
    "The paper does not name the dataflow. Where the next weights are loaded while the present ones are used, a "
    "convolution of one image fills the array and batches gain nothing on ResNet; with `ws` they do. "
)
LENGTH: Final = "20 seeds of 10,000 requests; of 2,000 at 16 and 64 requests a second. "


def _row(part: str, model: str, policy: str, **wanted: Any) -> dict[str, Any]:
    return first(result("lazybatching.json")["rows"], part=part, model=model, policy=policy, **wanted)


def _graphs(part: str, model: str, **wanted: Any) -> list[dict[str, Any]]:
    rows = result("lazybatching.json")["rows"]
    return [
        row for row in rows
        if row.get("part") == part and row.get("model") == model and row.get("policy", "").startswith("graph:")
        and all(row.get(key) == value for key, value in wanted.items())
    ]  # fmt: skip


def _latency(model: str, part: str = "rates", **wanted: Any) -> str:
    """Say how many times lower the mean latency is than that of the best window, over seeds, at 1,000/s."""
    mine = np.array(_row(part, model, OURS, rate=1000, **wanted)["mean_ms"])
    best = min((np.array(row["mean_ms"]) for row in _graphs(part, model, rate=1000, **wanted)), key=np.mean)
    return f"{model} {ranged(best / mine)}"


def _p99() -> str:
    """Say the p99 of the Transformer at 1,000/s: ours, the best window's, and that of the paper's rule."""
    mine, rule = (np.mean(_row("rates", "transformer", policy, rate=1000)["p99_ms"]) for policy in (OURS, EQUATION_2))
    window = min(np.mean(row["p99_ms"]) for row in _graphs("rates", "transformer", rate=1000))
    return f"transformer p99 {number(mine)} ms, Equation 2 {number(rule)} ms, the best window {number(window)} ms"


def _in_the_text() -> str:
    """Say what four models on one device gain, and what dec_timesteps does to the strongest reading of Equation 2."""
    four = [row for row in result("lazybatching.json")["rows"] if row["part"] == "four models"]
    mine = np.array(first(four, policy=OURS)["mean_ms"])
    best = min((np.array(r["mean_ms"]) for r in four if r["policy"].startswith("graph:")), key=np.mean)
    late = [
        np.mean(_row("dec_timesteps", "gnmt", f"{EQUATION_2},hopeless=veto,percent={share}")["violation_share"])
        for share in (16, 90, 99)
    ]
    return (
        f"four models {ranged(best / mine)} times; dec_timesteps of GNMT that 16, 90 and 99 % of the lengths keep: "
        + ", ".join(f"{share:.1%}" for share in late) + " late"
    )  # fmt: skip


def _throughput(model: str) -> str:
    mine = np.array(_row("rates", model, OURS, rate=2000)["throughput_rps"])
    best = max((np.array(row["throughput_rps"]) for row in _graphs("rates", model, rate=2000)), key=np.mean)
    return f"{model} {ranged(mine / best)}"


def _violations(policy: str) -> Callable[[str], str]:
    def said(model: str) -> str:
        rows = [row for row in result("lazybatching.json")["rows"] if row.get("part") == "slas"]
        mine = [row for row in rows if row["model"] == model and row["policy"] == policy]
        return f"{model} " + ", ".join(
            f"{np.mean(row['violation_share']):.1%} at {row['sla_ms']:g}"
            for row in sorted(mine, key=lambda r: r["sla_ms"])
            if row["sla_ms"] <= 60
        )

    return said


def _gain_by_16() -> str:
    """Say how much more a batch of 16 images answers per second than single ones, with either dataflow."""
    networks = result("lazybatching.json")["networks"]
    gains = [
        f"{16 * ms[0] / ms[15]:.2f} times the throughput at 16 ({dataflow})"
        for model, dataflow in (("resnet50", "weights loaded meanwhile"), ("resnet50 (ws)", "weights loaded before"))
        for ms in [first(networks, model=model, costs="calibrated")["batch_ms"]]
    ]
    return ", ".join(gains)


def _on_a_cpu() -> str:
    """Say by how much GraphB's mean latency on the engine is above ours at each load, in the stronger of its forms."""
    rows = result("lazybatching-live.json")["ratios"]
    stronger = {
        load: min(
            (row for row in rows if (row["way"], row["load"]) == (OURS, load)), key=lambda r: np.median(r["best"])
        )
        for load in dict.fromkeys(row["load"] for row in rows)
    }
    best, every = (
        ", ".join(f"{ranged(row[which])} at {load:g}" for load, row in stronger.items()) for which in ("best", "all")
    )  # fmt: skip
    rule = ", ".join(
        number(np.median(first(rows, way="Eq. 2", load=load, computes=row["computes"])["best"]))
        for load, row in stronger.items()
    )
    return f"best window {best} of the capacity; all windows {every}; best window over Equation 2 {rule}"


def _each(said: Callable[[str], str], *models: str) -> Callable[[], str]:
    return lambda: "; ".join(said(model) for model in models)


def _table_two() -> str:
    rows = result("npu.json")["rows"]
    return "; ".join(f"{row['model']} {number(row['tpu_1'])} ({number(row['table_ii_ms'])})" for row in rows[:3])


THREE: Final = ("resnet50", "gnmt", "transformer")
FIGURES: Final = (
    Figure(
        "Table I",
        "the NPU's configuration",
        "reproduced",
        "128 x 128 array, 700 MHz, 8 and 4 MB, 360 GB/s",
        "the same; cycles equal SCALE-Sim's on 33 layers",
        where="`papers/tests/npu/test_systolic.py`",
    ),
    Figure(
        "Table II",
        "latency of one request, ms",
        "in part",
        "ResNet 1.1, GNMT 7.2, Transformer 2.4",
        _table_two,
        "npu",
        "The paper does not say enough of its accelerator; in brackets what it has. Results are given raw, and "
        "scaled to these latencies.",
    ),
    Figure("Figures 1, 2, 4 to 9", "execution, timelines, BatchTable", "explanation", where=PAGE),
    Figure(
        "Figure 3",
        "ResNet's throughput and latency by batch",
        "in part",
        "grows up to batch 16",
        _gain_by_16,
        "lazybatching",
        DATAFLOW,
        picture="lazybatching-batches.png",
    ),
    Figure(
        "Figure 10, Equations 1, 2",
        "the BatchTable, step by step",
        "reproduced",
        "a timeline",
        "the same timeline",
        where="`tests/core/test_lazy_batching.py`",
    ),
    Figure(
        "Figure 11",
        "lengths of translations",
        "reproduced",
        "90 % within 32 words, 16 % within 10",
        "drawn so that both hold",
        where="`tests/lab/datasets/test_generators.py`",
        picture="lazybatching-lengths.png",
    ),
    Figure(
        "Figure 12",
        "mean latency: best GraphB over it, 1,000/s",
        "in part",
        "ResNet 5.3, GNMT 2.7, Transformer 2.5 (over all loads)",
        _each(_latency, *THREE),
        "lazybatching",
        LENGTH + DATAFLOW + "*It* is this project's forecast; the paper's rule is on the page.",
        picture="lazybatching-latency.png",
    ),
    Figure(
        "Figure 13",
        "throughput: it over the best GraphB, 2,000/s",
        "in part",
        "ResNet 1.1, GNMT 1.3, Transformer 1.2",
        _each(_throughput, *THREE),
        "lazybatching",
        LENGTH
        + "*It* is this project's forecast. 2,000/s is above what ResNet can serve; below saturation everybody serves "
        "what is offered.",
        picture="lazybatching-throughput.png",
    ),
    Figure(
        "Figure 14",
        "CDF of latency at 1,000/s",
        "in part",
        "Transformer p99 54 against 123 ms",
        _p99,
        "lazybatching",
        LENGTH,
        picture="lazybatching-cdf.png",
    ),
    Figure(
        "Figure 15",
        "violations by SLA, 1,000/s",
        "in part",
        "none above 20, 40, 60 ms for ResNet, GNMT, Transformer",
        _each(_violations(OURS), "gnmt", "transformer"),
        "lazybatching",
        LENGTH + DATAFLOW + "Of this project's forecast; the paper's rule is on the page.",
        picture="lazybatching-violations.png",
    ),
    Figure(
        "Figure 16",
        "VGG, MobileNet, LAS, BERT",
        "in part",
        "1.5 times lower latency, 1.3 throughput, 2.9 SLA",
        lambda: (
            "mean latency, best window over it, 1,000/s: "
            + "; ".join(_latency(model, "others", sla_ms=100) for model in ("vgg16", "mobilenet", "las", "bert"))
        ),
        "lazybatching",
        LENGTH + "*It* is this project's forecast. Throughput, SLAs of 20, 60 and 100 ms and the readings of the "
        "paper's rule are on the page.",
    ),
    Figure(
        "Figure 17",
        "on a real device: mean latency of the Transformer, GraphB over it",
        "other outcome",
        "on a GPU: 1.4 to 56 times lower latency",
        _on_a_cpu,
        "lazybatching-live",
        "On a CPU, not on a GPU: a small Transformer on the engine, one thread. The windows are the paper's; a request "
        "alone takes longer than on its devices, so a window is a smaller part of the latency. Beside the stronger of "
        "two forms of GraphB: whole padded networks, or the engine's cells, whose rows have room for the longest "
        "sentence. The paper's own rule is behind the stronger form from 0.1 to 0.9, and ahead of the weaker one at "
        "0.1 and 0.9. A round at 0.1 has 30 requests.",
        picture="lazybatching-live.png",
    ),
    Figure(
        "6.3, in the text",
        "co-location, dec_timesteps, maximum batch, language pairs",
        "in part",
        "four models: 2.4 and 1.8 times; dec_timesteps 10: 36 % late",
        _in_the_text,
        "lazybatching",
        LENGTH + "All four are on the page.",
    ),
)
