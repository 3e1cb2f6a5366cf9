"""`auto` beside `cellular` on short requests of two types, where `auto` is behind: papers/docs/default-policy.md.

    python benchmarks/short_decoders.py --data DATA [--quick] [--json OUT.json] [--page papers/docs/default-policy.md]

The network is that of the line `decoder` of overhead.py: a GRU encoder-decoder of 256 that reads the 4 to 10 letters of
a word and writes sounds until a value ends it. DATA has europarl_deen/raw5k.en. Each policy has an engine with one
worker and one compute thread; both are measured in turn, with the same arrivals, at 0.2 and 0.4 of what `cellular`
answers with everything waiting. A number is the median over rounds; a ratio is that of both policies in the same round:
its median, the least and the most. Needs an otherwise idle machine, for a minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import torch
from numpy.typing import NDArray

import batchmaker as bm
from engine_cost.hand_decoders import Spoken
from engine_cost.measuring import Settings, at_rate, interleaved, per_second
from engine_cost.translators import spelled
from pages import fill, table
from provenance import ROOT, Result, made_by

OUT: Final = ROOT / "benchmarks" / "results" / "short-decoders.json"
OURS, OTHER = "auto", "cellular"
LOADS: Final = (0.2, 0.4)
"""Rates, as shares of what `cellular` answers with everything waiting."""
WORDS: Final = 2000
MEASURES: Final = (
    "benchmarks/short_decoders.py", "benchmarks/engine_cost/hand_decoders.py",
    "benchmarks/engine_cost/translators.py", "src/batchmaker/engine", "src/batchmaker/policies",
    "src/batchmaker/core",
)  # fmt: skip


def measured(data: Path, *, quick: bool) -> list[Result]:
    """Return a row for each figure: requests per second where all wait, and p50 and p90 in ms at each rate."""
    settings = Settings(data, quick)
    requests = spelled(settings, settings.of(WORDS, 200))
    model = Spoken(requests[:200])
    with ExitStack() as stack:
        engines = {name: stack.enter_context(bm.Engine(model, policy=name, threads=1)) for name in (OURS, OTHER)}
        for engine in engines.values():
            for _ in range(settings.of(3, 1)):
                engine.map(requests, progress=False)
        waiting = {
            name: partial(per_second, partial(engine.map, requests, progress=False), len(requests))
            for name, engine in engines.items()
        }
        answered = interleaved(waiting, settings.of(7, 2))
        rows = [row("all waiting, requests/s", answered)]
        for load in LOADS[: settings.of(2, 1)]:
            rate = round(load * float(np.median(answered[OTHER])), -2)
            sides = {
                name: at_rate(engine.submit, requests, rate, settings.of(2.0, 0.5)) for name, engine in engines.items()
            }
            found = interleaved(sides, settings.of(7, 1))
            for column, figure in enumerate(("p50", "p90")):
                taken = {name: values[:, column] for name, values in found.items()}
                rows.append(row(f"{figure} at {load} ({rate:,.0f}/s), ms", taken))
    return rows


def row(figure: str, found: dict[str, NDArray[np.float64]]) -> Result:
    """Return medians over rounds, and the ratio of both policies round by round: median, least, most."""
    ratios = found[OURS] / found[OTHER]
    over = [float(np.median(ratios)), float(ratios.min()), float(ratios.max())]
    return {"figure": figure, **{name: float(np.median(values)) for name, values in found.items()}, "over": over}


def number(value: float) -> str:
    """Return a rate in whole requests, a time in three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown(found: Result) -> str:
    """Return the table of the page, and what it was measured with."""
    lines: list[list[Any]] = [
        [one["figure"], number(one[OURS]), number(one[OTHER]), "{:.2f} ({:.2f} to {:.2f})".format(*one["over"])]
        for one in found["rows"]
    ]
    about = f"`{found['command']}`, commit {found['commit']}, {found['machine']['cpu']}; medians of seven rounds."
    return f"{table(('short encoder-decoder', f'`{OURS}`', f'`{OTHER}`', 'ratio'), lines)}\n\n{about}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of the data sets; without it nothing is measured")
    parser.add_argument("--quick", action="store_true", help="one round of half a second")
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--page", type=Path, help="put the table there")
    options = parser.parse_args()
    if options.data is not None:
        torch.set_num_threads(1)
        quick = " --quick" if options.quick else ""
        about = made_by(MEASURES, f"python benchmarks/short_decoders.py --data DATA{quick}")
        rows = measured(options.data, quick=options.quick)
        options.json.write_text(json.dumps({**about, "quick": options.quick, "rows": rows}, indent=1) + "\n", "utf-8")
    found = json.loads(options.json.read_text("utf-8"))
    print(shown(found))
    if options.page is not None:
        fill(options.page, {"short-decoders": shown(found)})


if __name__ == "__main__":
    main()
