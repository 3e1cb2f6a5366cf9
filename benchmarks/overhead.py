"""What the engine costs: it and hand-written batching of the same networks, in one run, beside what was asked for.

    python benchmarks/overhead.py --data DATA [--json FILE] [--png FILE] [--page PAGE] [--only LINE ...]
    python benchmarks/overhead.py --show --json FILE --png FILE --page PAGE   # from an earlier run

PAGE is papers/docs/benchmarks-in-full.md; the README gets its table at the same time.

DATA is the folder that has europarl_deen/raw5k.en, sst/train.txt, lattice_edbatch/train.txt and
ud_english_ewt/en_ewt-ud-dev.conllu.gz. Every line measures
both sides of its ratio in turn, with one compute thread each, and says the median of the ratios. That both give the
same answers is asserted first. A line that fails says why in the results, and the others go on. All lines take about a
quarter of an hour; the machine should have nothing else to do: its load before and after is in the results.

Peers are optional. DyNet and LitServe live in environments of their own, named by their interpreters:

    python -m venv dynet && dynet/bin/pip install dyNET38 "numpy<2"
    python -m venv litserve && litserve/bin/pip install litserve numpy "torch>=2.11,<2.14"

ONNX Runtime, beside which one request alone is measured, and CTranslate2 are in this one: pip install
'batchmaker[onnx]' ctranslate2.

Lines:
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: both sides have one compute thread

import torch

from batchmaker.cli.bench.report import commit
from engine_cost import (
    beam,
    chains,
    childsum,
    decisions,
    languages,
    over_http,
    page,
    picture,
    processors,
    scheduling,
    streams,
    translation,
    translators,
    trees,
)
from engine_cost.measuring import NotRunError, Row, Settings, facts, load_average, say, stolen_s
from provenance import CPU_EXECUTOR, ROOT, digest

LINES: Final[dict[str, Callable[[Settings], Iterator[Row]]]] = {
    "alone": chains.alone,
    "by-hand": chains.by_hand,
    "sorted": chains.sorted_batches,
    "moderate": chains.moderate,
    "buckets": chains.buckets,
    "streams": streams.streams,
    "decoder": translators.decoder,
    "tagger": translators.tagger,
    "exits": decisions.exits,
    "experts": decisions.experts,
    "transducer": decisions.transducer,
    "diffusion": decisions.diffusion,
    "rwkv": languages.rwkv,
    "mamba": languages.mamba,
    "trees": trees.by_hand,
    "childsum": childsum.childsum,
    "beam": beam.beam,
    "translation": translation.translation,
    "dynet": trees.dynet,
    "lattices": trees.lattices,
    "scheduler": scheduling.scheduler,
    "queueing": scheduling.queueing,
    "budgets": scheduling.budgets,
    "workers": processors.workers,
    "processes": processors.processes,
    "http-trivial": over_http.trivial,
    "http-lstm": over_http.lstm,
}
Result = dict[str, Any]
PEERS: Final = ("dynet", "litserve")
MEASURES: Final = (
    "benchmarks/overhead.py", "benchmarks/engine_cost", "src/batchmaker/compile", "src/batchmaker/engine",
    *CPU_EXECUTOR, "src/batchmaker/kernels/cpu", "src/batchmaker/lab/zoo", "src/batchmaker/model",
    "src/batchmaker/policies/auto.py", "src/batchmaker/core", "src/batchmaker/server",
)  # fmt: skip


def measured(name: str, settings: Settings) -> Result:
    """Measure one line: its rows, how long it took and under which load, and what went wrong, if anything did.

    stolen: the share of all processors that other machines of the same host took meanwhile.
    """
    before, begin_s, stolen = load_average(), time.perf_counter(), stolen_s()
    rows: list[Result] = []
    result: Result = {"line": name, "about": about(name), "rows": rows, "error": None, "not_run": None}
    try:
        for row in LINES[name](settings):
            rows.append(row.to_json())
            say(f"  {row.work}, {row.figure}: {shown(row)}")
    except NotRunError as reason:
        result["not_run"] = str(reason)
    except Exception as error:
        result["error"] = "".join(traceback.format_exception_only(error)).strip()
        say(traceback.format_exc())
    seconds = time.perf_counter() - begin_s
    share = (stolen_s() - stolen) / (seconds * (os.cpu_count() or 1))
    took = {"seconds": round(seconds, 1), "load_average": [before, load_average()], "stolen": round(share, 3)}
    return {**result, **took, "commit": commit(), "quick": settings.quick}


def shown(row: Row) -> str:
    """Return a row's figures in words."""
    theirs = "" if row.theirs is None else f" beside {row.theirs:,.4g} ({row.baseline}), ratio {row.ratio:.3g}"
    wanted = "" if row.target is None else f", asked {row.target:g}"
    return f"{row.ours:,.4g} {row.unit}{theirs}{wanted}"


def about(name: str) -> str:
    """Return what a line measures, in a sentence."""
    return (LINES[name].__doc__ or "").strip().partition("\n")[0]


def read(path: Path | None) -> Result:
    """Return what an earlier run has written; no lines if there is none."""
    return json.loads(path.read_text("utf-8")) if path is not None and path.exists() else {"lines": []}


def kept(found: Result, line: Result) -> Result:
    """Return the results with this line in place of what there was of it, lines in their order."""
    rest = [other for other in found["lines"] if other["line"] != line["line"]]
    return {**found, "lines": sorted([*rest, line], key=lambda each: list(LINES).index(each["line"]))}


def run(options: argparse.Namespace) -> Result:
    """Measure the lines asked for and keep each as soon as it is done, beside others of an earlier run."""
    settings = Settings(options.data, options.quick, options.dynet_python, options.litserve_python)
    measures = {"paths": list(MEASURES), "digest": digest(MEASURES)}
    found = read(options.json) if options.only else {"lines": [], "measures": measures}
    if found.get("measures") != measures:
        found.pop("measures", None)  # lines that stay are of other code
    command = " ".join(["python", "benchmarks/overhead.py", *command_line(options)])
    found = {"command": command, "machine": facts(), "threads": 1, "load_average": [load_average(), None], **found}
    for number, name in enumerate(options.only or LINES, 1):
        say(f"{number}/{len(options.only or LINES)} {name}: {about(name)}")
        found = kept(found, measured(name, settings))
        found["load_average"][1] = load_average()
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return found


def command_line(options: argparse.Namespace) -> list[str]:
    """Return what was asked for, without the folders of this machine."""
    words = ["--data DATA"]
    words += [f"--only {' '.join(options.only)}"] if options.only else []
    words += ["--quick"] if options.quick else []
    words += [f"--{name}-python PYTHON" for name in PEERS if getattr(options, f"{name}_python") is not None]
    return words


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    lines = "\n".join(f"  {name:12} {about(name)}" for name in LINES)
    made = argparse.ArgumentParser(
        description=(__doc__ or "") + lines, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--data", type=Path, help="the folder of the data sets")
    made.add_argument(
        "--only", nargs="+", choices=LINES, metavar="LINE", help="these lines; the others stay as they are"
    )
    made.add_argument("--quick", action="store_true", help="so little of everything that figures mean nothing")
    made.add_argument("--show", action="store_true", help="measure nothing: picture and page from --json")
    made.add_argument("--json", type=Path, help="write the results here, line by line")
    made.add_argument("--png", type=Path, help="draw all ratios beside their targets here")
    made.add_argument("--page", type=Path, help="put the tables between this page's markers, and the README's")
    made.add_argument("--readme", type=Path, default=ROOT / "README.md", help="where --page puts the short table")
    made.add_argument("--dynet-python", type=Path, metavar="PYTHON", help="interpreter of an environment with DyNet")
    made.add_argument(
        "--litserve-python", type=Path, metavar="PYTHON", help="interpreter of an environment with LitServe"
    )
    return made


def main() -> None:
    reader = parser()
    options = reader.parse_args()
    if options.show == (options.data is not None):
        reader.error("give --data DATA to measure, or --show to draw what --json has")
    torch.set_num_threads(1)
    found = read(options.json) if options.show else run(options)
    if options.png is not None:
        picture.draw(options.png, found)
    if options.page is not None:
        page.show(found, options.page, options.readme, options.png)
    if options.json is None:
        json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
