"""The table and the picture of docs/which-models-gain.md, from what benchmarks/examples.py has written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import matplotlib

from pages import fill, table

Result = dict[str, Any]
SECTION: Final = "examples"
OURS, HAND, OWN = "batchmaker", "by hand", "package"
COMPILED: Final = "compiled"
"""What ways by hand begin with that are written for one network, and not of torch's layers."""
LATENCY_ASKED: Final = 2.0
LIVE_ASKED: Final = {HAND: 0.8, OWN: 3.0}
COLOURS: Final = {OURS: "#2da44e", HAND: "#0969da", OWN: "#8c959f"}
OTHER: Final = "#bf8700"


def measured(found: Result) -> list[tuple[str, Result]]:
    """Return name and figures of the examples that have any."""
    return [(one["example"], one["figures"]) for one in found["examples"] if one["figures"] is not None]


def rates_table(found: Result) -> str:
    """Return requests per CPU second of all sides, the ratio and what was asked for."""
    rows = []
    for name, figures in measured(found):
        per_s, peer = figures["per_s"], figures.get("peer")
        rows.append(
            [
                f"[`{name}`](../examples/{name}/README.md): {figures['about']}",
                number(per_s[OURS]),
                f"{number(per_s[HAND])} ({figures['by_hand']['best']})",
                with_torch(figures["by_hand"]["seen"]),
                f"{number(per_s[OWN])} ({figures['package']})",
                f"{number(per_s[peer['name']])} ({peer['name']}, {peer['setting']})" if peer else "",
                *(f"{per_s[OURS] / per_s[other]:.3g}" for other in (HAND, OWN)),
                f"{figures['ratio']:.3g}{' over ' + peer['name'] if peer else ''}, asked {figures['target']:g}: "
                + verdict(figures["ratio"] >= figures["target"]),
            ]
        )  # fmt: skip
    head = (
        "example",
        OURS,
        HAND,
        "by hand with torch's layers",
        "its package",
        "peer",
        "over by hand",
        "over the package",
        "target",
    )
    return table(head, rows)


def latency_table(found: Result) -> str:
    """Return p50 and p90 of all sides at each load."""
    rows = []
    for name, figures in measured(found):
        for load in figures["loads"]:
            times = load["latency_ms"]
            sides = [pair(times.get(side)) for side in (OURS, HAND, OWN)]
            ratio = load["ratio"]
            said = "" if ratio is None else f"{ratio:.3g}: {verdict(ratio <= LATENCY_ASKED)}"
            rows.append([f"`{name}`, {number(load['per_s'])}/s", *sides, load["by_hand"]["best"] or "", said])
    head = ("p50 / p90 in ms", OURS, HAND, "its package", "by hand is", f"p50 over by hand, asked {LATENCY_ASKED:g}")
    return table(head, rows)


def live_table(found: Result) -> str:
    """Return how many live streams a core holds, of all sides; nothing where no example has live streams."""
    rows = []
    for name, figures in measured(found):
        if (live := figures.get("live")) is None:
            continue
        per_core = live["per_core"]
        over = {side: per_core[OURS] / per_core[side] for side in (HAND, OWN)}
        said = [
            f"{over[side]:.3g}, asked {asked:g}: {verdict(over[side] >= asked)}" for side, asked in LIVE_ASKED.items()
        ]
        rows.append(
            [f"`{name}`, {live['streams']} streams", *(number(per_core[side]) for side in (OURS, HAND, OWN)), *said]
        )
    head = ("live streams a core", OURS, HAND, "its package", "over by hand", "over the package")
    return table(head, rows) if rows else ""


def agreement_lines(found: Result) -> str:
    """Return how many of the answers are the package's, an example to a line."""
    return "\n".join(
        f"- `{name}`, {figures['num_requests']} requests: "
        + ", ".join(f"{100 * share:.4g} % as {side}" for side, share in figures["agreement"].items())
        for name, figures in measured(found)
    )


def left_out(found: Result) -> str:
    """Return why examples have no figures, a line to an item; nothing if all have."""
    said = [(one["example"], one["not_run"] or one["error"]) for one in found["examples"]]
    return "\n".join(f"- `{name}` has not been measured: {why}" for name, why in said if why)


def machine_line(found: Result) -> str:
    """Return where and how the figures were taken, in a sentence."""
    about, examples = found["machine"], found["examples"]
    loads = [value for one in examples for value in one["load_average"] if value is not None]
    load = f"{min(loads):g} to {max(loads):g}" if loads else "unknown"
    commits = ", ".join(dict.fromkeys(one["commit"] for one in examples))
    quick = " Of a quick run: the figures mean nothing." if any(one["quick"] for one in examples) else ""
    return (
        f"{about['cpu']}, {about['cores']} cores, one compute thread, load average {load}, torch {about['torch']}, "
        f"commit {commits}: `{found['command']}`.{quick}"
    )


def show(found: Result, page: Path, png: Path | None) -> None:
    """Put tables and picture between the page's markers."""
    parts = [machine_line(found), "Requests per CPU second, all waiting:", rates_table(found)]
    if png is not None:
        parts.append(f"![Requests per CPU second of all sides]({os.path.relpath(png, page.parent)})")
    parts += ["Latency under a Poisson load:", latency_table(found)]
    if live := live_table(found):
        parts += ["Live streams, a frame of each in flight, by CPU time:", live]
    parts += ["Answers that agree with the engine's:", agreement_lines(found), left_out(found)]
    fill(page, {SECTION: "\n\n".join(filter(None, parts))})


def draw(path: Path, found: Result) -> None:
    """Write the picture as a PNG: for each example a bar for each side, as a share of the fastest."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    examples = measured(found)
    sides = [(name, figures, list(figures["per_s"].items())) for name, figures in examples]
    figure, ax = plt.subplots(figsize=(10, 1.2 + 0.32 * sum(len(each) + 1 for _, _, each in sides)))
    height, ticks, labels = 0.0, [], []
    for name, figures, each in sides:
        best = max(figures["per_s"].values())
        ticks.append(height + (len(each) - 1) / 2)
        labels.append(name)
        for side, rate in each:
            ax.barh(height, rate / best, color=COLOURS.get(side, OTHER), height=0.85)
            ax.annotate(f" {side} {number(rate)}/s", (rate / best, height), va="center", fontsize=8)
            height += 1
        height += 1
    ax.set_yticks(ticks, labels)
    ax.set_ylim(height - 0.6, -0.8)
    ax.set_xlim(0, 1.3)
    ax.set_xlabel("requests per CPU second, as a share of the fastest; right is better")
    ax.set_title("Trained models: the engine, batches by hand, the package", loc="left", fontweight="bold")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def with_torch(seen: dict[str, float]) -> str:
    """Return the best of the ways by hand that use torch's own layers."""
    plain = {name: rate for name, rate in seen.items() if not name.startswith(COMPILED)}
    best = max(plain, key=plain.__getitem__, default=None)
    return "" if best is None else f"{number(plain[best])} ({best})"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pair(times: dict[str, float] | None) -> str:
    return "cannot keep up" if times is None else f"{number(times['p50'])} / {number(times['p90'])}"


def verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"
