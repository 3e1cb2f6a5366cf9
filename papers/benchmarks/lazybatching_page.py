"""The tables and pictures of papers/docs/lazybatching.md, from papers/benchmarks/results/lazybatching.json.

Usage: python papers/benchmarks/lazybatching_page.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from batchmaker.lab.datasets import lazybatching_lengths
from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from batchmaker.lab.simulator.report import paired_difference
from shared import IMAGES, RESULTS, command_now, fill
from shared import table as markdown

PAGE = IMAGES.with_name("lazybatching.md")
OLDEST, ALL = "lazy:slack=oldest,benefit=no,lengths=fixed", "lazy:slack=literal,benefit=no,lengths=fixed"
ORACLE, IMPROVED, ORACLE_BENEFIT = "lazy:benefit=no,lengths=true", "lazy", "lazy:lengths=true"
GRAPHB = tuple(f"graph:window_ms={n}" for n in (5, 25, 45, 95))
LABELS = {
    "serial": "Serial", **{policy: f"GraphB({policy.partition('=')[2]})" for policy in GRAPHB},
    OLDEST: "Eq. 2, oldest", f"{OLDEST},hopeless=veto": "Eq. 2, oldest, late ones veto", ALL: "Eq. 2, all",
    f"{ALL},hopeless=veto": "Eq. 2, all, late ones veto", ORACLE: "Oracle", "cellular": "cellular", IMPROVED: "ours",
    ORACLE_BENEFIT: "Oracle + benefit", "lazy:slack=none,benefit=no": "greedy", "lazy:stack=recent": "ours, one stack",
}  # fmt: skip
READINGS = (OLDEST, f"{OLDEST},hopeless=veto", ALL, f"{ALL},hopeless=veto")
PUBLISHED = {"resnet50": (5.3, 1.1), "resnet50 (ws)": (5.3, 1.1), "gnmt": (2.7, 1.3), "transformer": (2.5, 1.2)}
DRAWN = (*GRAPHB[:3], OLDEST, f"{ALL},hopeless=veto", ORACLE, "cellular", IMPROVED)
"""The policies in pictures; the tables have all."""
Rows = list[dict[str, Any]]


def label(policy: str) -> str:
    """Return what the page calls a policy."""
    known, _, percent = policy.partition(",percent=")
    if percent and known in LABELS:
        return f"{LABELS[known]}, N = {percent} %"
    return LABELS.get(policy, f"`{policy}`")


def mean(row: dict[str, Any], key: str) -> float:
    """Return a number's mean over seeds."""
    return float(np.mean(row[key]))


def ranged(row: dict[str, Any], key: str, form: str = "{:.1f}", scale: float = 1.0) -> str:
    """Return a number's mean over seeds, and half of the range of 95 % of the resamples of the seeds."""
    numbers = scale * np.array(row[key])
    found = paired_difference(numbers, np.zeros(len(numbers)), resamples=1000)
    return f"{form.format(found.mean)} ± {form.format((found.high - found.low) / 2)}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first two are numbers. Says so where nothing was run."""
    return markdown(head, lines, texts=2) if lines else "Not run."


def where(rows: Rows, **wanted: Any) -> Rows:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def networks(results: dict[str, Any]) -> str:
    """What each network takes alone and serves at most."""
    head = ("network", "costs", "cells", "alone, mean ms", "alone, p99 ms", "capacity /s")
    lines = [
        (n["model"], n["costs"], str(n["cells"]), f"{n['single_ms']:.2f}", f"{n['single_p99_ms']:.2f}",
         f"{n['capacity_rps']:.0f}")
        for n in results["networks"]
    ]  # fmt: skip
    return table(head, lines)


def ratios(rows: Rows, policy: str) -> tuple[float, float, float, float]:
    """Return latency and throughput against the best GraphB at each rate, then against all: geometric means."""
    best_latency, best_throughput, all_latency, all_throughput = [], [], [], []
    for row in where(rows, policy=policy):
        graphs = [other for other in rows if other["policy"] in GRAPHB and other["rate"] == row["rate"]]
        latency = [mean(other, "mean_ms") / mean(row, "mean_ms") for other in graphs]
        throughput = [mean(row, "throughput_rps") / mean(other, "throughput_rps") for other in graphs]
        best_latency.append(min(latency))
        best_throughput.append(min(throughput))
        all_latency += latency
        all_throughput += throughput
    return tuple(
        float(np.exp(np.mean(np.log(x)))) for x in (best_latency, best_throughput, all_latency, all_throughput)
    )  # type: ignore[return-value]


def headlines(rows: Rows) -> str:
    """Ratios beside the paper's."""
    head = ("network", "policy", "latency: best GraphB / it", "paper", "throughput: it / best GraphB", "paper",
            "latency, all GraphB", "throughput, all GraphB")  # fmt: skip
    lines = []
    for model, (latency, throughput) in PUBLISHED.items():
        mine = where(rows, part="rates", model=model)
        if not mine:
            continue
        for policy in (*READINGS, ORACLE, "cellular", IMPROVED):
            a, b, c, d = ratios(mine, policy)
            lines.append(
                (model, label(policy), f"{a:.2f}", f"{latency}", f"{b:.2f}", f"{throughput}", f"{c:.1f}", f"{d:.2f}")
            )
    return table(head, lines)


def by_rate(rows: Rows, part: str, key: str, form: str, sla_ms: float = 100) -> str:
    """One number of every policy at every rate."""
    mine = where(rows, part=part, sla_ms=sla_ms)
    rates = sorted({row["rate"] for row in mine})
    lines = []
    for model in dict.fromkeys(row["model"] for row in mine):
        for policy in dict.fromkeys(row["policy"] for row in where(mine, model=model)):
            found = {row["rate"]: ranged(row, key, form) for row in where(mine, model=model, policy=policy)}
            lines.append((model, label(policy), *(found.get(rate, "-") for rate in rates)))
    return table(("network", "policy", *(f"{rate:g}/s" for rate in rates)), lines)


def violations(rows: Rows, part: str, rate: float) -> str:
    """Share of violations of every policy at every SLA, in per cent."""
    mine = where(rows, part=part, rate=rate)
    slas = sorted({row["sla_ms"] for row in mine})
    lines = []
    for model in dict.fromkeys(row["model"] for row in mine):
        for policy in dict.fromkeys(row["policy"] for row in where(mine, model=model)):
            found = {
                row["sla_ms"]: ranged(row, "violation_share", "{:.1f}", 100)
                for row in where(mine, model=model, policy=policy)
            }
            lines.append((model, label(policy), *(found.get(sla, "-") for sla in slas)))
    return table(("network", "policy", *(f"{sla:g} ms" for sla in slas)), lines)


def tails(rows: Rows) -> str:
    """The 99th percentile at 1000/s (Figure 14)."""
    mine = where(rows, part="rates", rate=1000)
    models = list(dict.fromkeys(row["model"] for row in mine))
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in mine):
        found = {row["model"]: ranged(row, "p99_ms") for row in where(mine, policy=policy)}
        lines.append(("p99, ms", label(policy), *(found.get(model, "-") for model in models)))
    return table(("", "policy", *models), lines)


def largest_batch(rows: Rows) -> str:
    """Ratios of mean latency, the best GraphB over the policy, by largest batch at 1000/s."""
    mine = [row for row in rows if row["part"] in ("rates", "largest batch") and row["rate"] == 1000]
    lines = []
    for model in ("resnet50", "gnmt", "transformer"):
        for policy in (*READINGS, ORACLE, IMPROVED):
            found = []
            for name in (f"{model} (batch 16)", f"{model} (batch 32)", model):
                here = where(mine, model=name)
                graphs = [mean(row, "mean_ms") for row in here if row["policy"] in GRAPHB]
                one = where(here, policy=policy)
                if not graphs or not one:
                    found += ["-", "-"]
                    continue
                own = mean(one[0], "mean_ms")
                found += [f"{min(graphs) / own:.2f}", f"{float(np.mean(graphs)) / own:.2f}"]
            lines.append((model, label(policy), *found))
    head = [f"{size}, {what}" for size in (16, 32, 64) for what in ("best GraphB", "mean GraphB")]
    return table(("network", "policy", *head), lines) if mine else table((), ())


def gates(results: dict[str, Any]) -> str:
    """The improved policy against the Oracle with the benefit test, and against the best reading of
    Equation 2, wherever both were run."""
    rows = results["rows"]
    single = {n["model"]: n["single_p99_ms"] for n in results["networks"] if n["costs"] == "calibrated"}
    head = ("network", "load", "SLA ms", "SLA / p99 alone", "goodput / Oracle's", "mean / Oracle's",
            "violations - best reading's (95 %)", "mean ms - best reading's (95 %)")  # fmt: skip
    lines = []
    mine = [*where(rows, part="gates", policy=IMPROVED), *where(rows, part="slas", policy=IMPROVED)]
    for row in mine:
        same = {key: row[key] for key in ("part", "model", "rate", "sla_ms")}
        oracles = where(rows, policy=ORACLE_BENEFIT, **same)
        readings = [found for policy in READINGS for found in where(rows, policy=policy, **same)]
        if not oracles or not readings or row["sla_ms"] not in (20, 40, 60, 100):
            continue
        oracle, best = oracles[0], min(readings, key=lambda found: mean(found, "violation_share"))
        late = paired_difference(row["violation_share"], best["violation_share"])
        best = min(readings, key=lambda found: mean(found, "mean_ms"))
        slower = paired_difference(row["mean_ms"], best["mean_ms"])
        lines.append((
            row["model"], f"{row['share_of_capacity']:.2f} of capacity ({row['rate']:.0f}/s)", f"{row['sla_ms']:g}",
            f"{row['sla_ms'] / single[row['model']]:.1f}",
            f"{mean(row, 'goodput_rps') / mean(oracle, 'goodput_rps'):.3f}",
            f"{mean(row, 'mean_ms') / mean(oracle, 'mean_ms'):.3f}",
            f"{100 * late.mean:+.1f} % ({100 * late.low:+.1f}, {100 * late.high:+.1f})",
            f"{slower.mean:+.1f} ({slower.low:+.1f}, {slower.high:+.1f})",
        ))  # fmt: skip
    return table(head, lines)


def all_numbers(rows: Rows, parts: Sequence[str]) -> str:
    """Mean, p99, goodput and violations of every policy in these parts."""
    head = ("part", "policy", "network", "rate /s", "SLA ms", "mean ms", "p99 ms", "goodput /s", "violations, %",
            "mean batch")  # fmt: skip
    mine = [row for row in rows if row["part"] in parts]
    mine.sort(key=lambda row: (parts.index(row["part"]), row["rate"], row["sla_ms"]))
    lines = [
        (row["part"], label(row["policy"]), row["model"], f"{row['rate']:.0f}", f"{row['sla_ms']:g}",
         ranged(row, "mean_ms"), f"{mean(row, 'p99_ms'):.1f}", f"{mean(row, 'goodput_rps'):.0f}",
         ranged(row, "violation_share", "{:.1f}", 100), f"{mean(row, 'mean_batch'):.1f}")
        for row in mine
    ]  # fmt: skip
    return table(head, lines)


def took(results: dict[str, Any]) -> str:
    """Seconds of processor time of every part."""
    rows = results["rows"]
    lines = [
        (part, f"{len(mine)} rows", f"{sum(row['cpu_s'] for row in mine):.0f}",
         f"{sum(row['seeds'] * row['requests'] for row in mine):,}")
        for part in dict.fromkeys(row["part"] for row in rows)
        if (mine := where(rows, part=part))
    ]  # fmt: skip
    return table(("part", "", "seconds of one core", "requests (of every SLA)"), lines)


def _lines(rows: Rows, x: str, key: str, scale: float = 1.0) -> list[Line]:
    found = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = sorted(where(rows, policy=policy), key=lambda row: row[x])
        quartiles = [np.percentile(row[key], (25, 75)) * scale for row in mine]
        found.append(Line(label(policy), [row[x] for row in mine], [scale * mean(row, key) for row in mine],
                          [q[0] for q in quartiles], [q[1] for q in quartiles]))  # fmt: skip
    return found


def draw(results: dict[str, Any]) -> None:
    """Draw the papers' figures."""
    rows = results["rows"]
    models = list(PUBLISHED)
    shown = [row for row in rows if row["policy"] in DRAWN]
    costs = "simulated NPU, costs scaled to Table II"
    under = f"{costs}; {results['seeds']} seeds, {results['requests']} requests; bands are quartiles"

    def panels(
        part: str, x: tuple[str, str], key: tuple[str, str], scale: float = 1.0, *, log: bool = False
    ) -> list[Panel]:
        chosen = {model: found for model in models if (found := where(shown, part=part, model=model))}
        return [Panel(m, x[1], key[1], _lines(mine, x[0], key[0], scale), log=log) for m, mine in chosen.items()]

    rate, sla = ("rate", "requests/s"), ("sla_ms", "SLA, ms")
    percent = range(100)
    curves = [
        Panel(model, "latency, ms", "requests, %", [
            Line(label(row["policy"]), row["quantiles_ms"][:100], percent, percent, percent)
            for row in where(shown, part="rates", model=model, rate=1000) if "quantiles_ms" in row])
        for model in models
    ]  # fmt: skip
    batches = [
        Panel(title, "batch", axis, [
            Line(net["model"], range(1, len(net["batch_ms"]) + 1), y := shape(net["batch_ms"]), y, y)
            for net in where(results["networks"], costs="calibrated") if net["model"] in PUBLISHED])
        for title, axis, shape in _BATCH_PANELS
    ]  # fmt: skip
    figures = (
        ("latency", "Mean latency against rate (Figure 12)", panels("rates", rate, ("mean_ms", "ms"), log=True), under),
        ("throughput", "Throughput against rate (Figure 13)", panels("rates", rate, ("throughput_rps", "1/s")), under),
        ("violations", "Violations against SLA at 1000/s (Figure 15)",
         panels("slas", sla, ("violation_share", "%"), 100), under),
        ("lengths", "Lengths of 30 000 pairs (Figure 11)", [_lengths()], "generated to meet the paper's two quantiles"),
        ("cdf", "Latency at 1000/s (Figure 14)", curves, costs),
        ("batches", "Throughput and latency against batch size (Figure 3)", batches, costs),
    )  # fmt: skip
    for name, title, drawn, subtitle in figures:
        if drawn:
            draw_panels(IMAGES / f"lazybatching-{name}.png", drawn, title, subtitle)


def _lengths() -> Panel:
    source, words = lazybatching_lengths(30_000, 1)
    steps = np.arange(81)
    shares = {"source": source, "words": words}
    cdfs = {name: [100 * float((lengths <= n).mean()) for n in steps] for name, lengths in shares.items()}
    lines = [Line(name, steps.tolist(), cdf, cdf, cdf) for name, cdf in cdfs.items()]
    return Panel("share of pairs with at most so many steps", "steps", "%", lines)


def _throughput(batch_ms: list[float]) -> list[float]:
    return [1e3 * (b + 1) / ms for b, ms in enumerate(batch_ms)]


_BATCH_PANELS: tuple[tuple[str, str, Callable[[list[float]], list[float]]], ...] = (
    ("throughput", "requests/s", _throughput),
    ("latency per request", "ms", lambda batch_ms: [ms / (b + 1) for b, ms in enumerate(batch_ms)]),
)


def sizes(rows: Rows) -> str:
    """Return how many seeds and requests the parts have, in words."""
    by_size: dict[tuple[int, int], list[str]] = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = where(rows, part=part)
        for seeds in sorted({row["seeds"] for row in mine}, reverse=True):
            most = max(row["requests"] for row in mine if row["seeds"] == seeds)
            by_size.setdefault((seeds, most), []).append(part)
    return "; ".join(
        f"{seeds} seeds of {most:,} requests: {', '.join(parts)}" for (seeds, most), parts in by_size.items()
    )


def write_page(results: dict[str, Any]) -> None:
    """Fill in the tables of the page between its markers, and draw its pictures."""
    rows = results["rows"]
    apart = ("rates", "slas", "gates", "rates raw", "others", "ablation", "dec_timesteps", "largest batch", "languages",
             "two models", "four models")  # fmt: skip
    stress = [part for part in dict.fromkeys(row["part"] for row in rows) if part not in apart]
    parts = {
        "run": f"`{command_now(results)}`: commit {results['commit']}, {results['machine']['cpu']}. {sizes(rows)}.",
        "networks": networks(results), "headlines": headlines(rows),
        "latency": by_rate(rows, "rates", "mean_ms", "{:.1f}"),
        "throughput": by_rate(rows, "rates", "throughput_rps", "{:.0f}"),
        "raw": by_rate(rows, "rates raw", "mean_ms", "{:.1f}"), "tails": tails(rows),
        "violations": violations(rows, "slas", 1000), "gates": gates(results),
        "others-latency": by_rate(rows, "others", "mean_ms", "{:.1f}"),
        "others-throughput": by_rate(rows, "others", "throughput_rps", "{:.0f}"),
        "others-violations": violations(rows, "others", 1000), "steps": violations(rows, "dec_timesteps", 1000),
        "largest-batch": largest_batch(rows), "languages": all_numbers(rows, ["languages"]),
        "together": all_numbers(rows, ["two models", "four models"]),
        "ablation": all_numbers(rows, ["ablation"]), "stress": all_numbers(rows, stress), "took": took(results),
    }  # fmt: skip
    fill(PAGE, {name: f"\n{content}\n" for name, content in parts.items()})
    draw(results)


if __name__ == "__main__":
    write_page(json.loads((RESULTS / "lazybatching.json").read_text("utf-8")))
