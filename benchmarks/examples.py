"""The examples beside the packages that they come from and beside batches by hand: which models gain, and which do not.

    python benchmarks/examples.py --data DATA [--json FILE] [--png FILE] [--page PAGE] [--only NAME ...]
    python benchmarks/examples.py --show --json FILE --png FILE --page PAGE   # from an earlier run

DATA is the folder that has europarl_deen/raw5k.en, weibo_ner/weiboNER_2nd_conll.train and
librispeech_durations/dev_clean.csv. The weights come by pip: pip install 'batchmaker[examples]'. Japanese
sentences come by pip too: jupyterlab-language-pack-ja-JP. Each example whose package is installed is measured: the
engine, batches by hand at their best settings, which are looked for first, and the package itself, in turn, with one
compute thread, from what a client sends to its answer. That the answers agree is counted.
DyNet lives in an environment of its own, named by its interpreter:

    python -m venv dynet && dynet/bin/pip install dyNET38 "nagisa<0.3" "numpy<2"
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: all sides have one compute thread

import torch

from batchmaker.cli.bench.report import commit
from engine_cost.measuring import NotRunError, facts, load_average, say
from real_models import (
    chinese_pronunciation,
    page,
    pronounce,
    reading,
    segment_japanese,
    speakers,
    voice_activity,
)  # fmt: skip
from real_models.case import Case, Data
from real_models.compare import compared

CASES: Final[dict[str, Callable[[Data], Case]]] = {
    "pronounce": pronounce.case,
    "chinese_pronunciation": chinese_pronunciation.case,
    "speakers": speakers.case,
    "segment_japanese": segment_japanese.case,
    "reading": reading.case,
    "voice_activity": voice_activity.case,
}
Result = dict[str, Any]


def measured(name: str, data: Data) -> Result:
    """Measure one example: its figures, or why there are none."""
    before, begin_s = load_average(), time.perf_counter()
    result: Result = {"example": name, "error": None, "not_run": None, "figures": None}
    try:
        result["figures"] = compared(CASES[name](data), data)
    except NotRunError as reason:
        result["not_run"] = str(reason)
        say(f"  {reason}")
    except Exception as error:
        result["error"] = "".join(traceback.format_exception_only(error)).strip()
        say(traceback.format_exc())
    took = {"seconds": round(time.perf_counter() - begin_s, 1), "load_average": [before, load_average()]}
    return {**result, **took, "commit": commit(), "quick": data.quick}


def read(path: Path | None) -> Result:
    """Return what an earlier run has written; no examples if there is none."""
    return json.loads(path.read_text("utf-8")) if path is not None and path.exists() else {"examples": []}


def kept(found: Result, one: Result) -> Result:
    """Return the results with this one in place of what there was of its example, examples in their order."""
    rest = [other for other in found["examples"] if other["example"] != one["example"]]
    order = list(CASES)
    return {**found, "examples": sorted([*rest, one], key=lambda each: order.index(each["example"]))}


def run(options: argparse.Namespace) -> Result:
    """Measure the examples asked for and keep each as soon as it is done, beside others of an earlier run."""
    data = Data(options.data, options.quick, options.dynet_python)
    found = read(options.json) if options.only else {"examples": []}
    command = " ".join(["python", "benchmarks/examples.py", *command_line(options)])
    found = {"command": command, "machine": facts(), "threads": 1, **found}
    names = options.only or list(CASES)
    for number, name in enumerate(names, 1):
        say(f"{number}/{len(names)} {name}: {about(name)}")
        found = kept(found, measured(name, data))
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return found


def about(name: str) -> str:
    """Return what an example's requests and network are, in a sentence."""
    return (CASES[name].__doc__ or "").strip().partition("\n")[0]


def command_line(options: argparse.Namespace) -> list[str]:
    """Return what was asked for, without the folders of this machine."""
    words = ["--data DATA"]
    words += [f"--only {' '.join(options.only)}"] if options.only else []
    words += ["--quick"] if options.quick else []
    words += ["--dynet-python PYTHON"] if options.dynet_python is not None else []
    return words


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, help="the folder of the data sets")
    made.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="these; the others stay as they are")
    made.add_argument("--quick", action="store_true", help="so little of everything that figures mean nothing")
    made.add_argument("--show", action="store_true", help="measure nothing: picture and page from --json")
    made.add_argument("--json", type=Path, help="write the results here, example by example")
    made.add_argument("--png", type=Path, help="draw the rates of all sides here")
    made.add_argument("--page", type=Path, help="put the tables between this page's markers")
    made.add_argument("--dynet-python", type=Path, metavar="PYTHON", help="interpreter of an environment with DyNet")
    return made


def main() -> None:
    reader = parser()
    options = reader.parse_args()
    if options.show == (options.data is not None):
        reader.error("give --data DATA to measure, or --show to draw what --json has")
    torch.set_num_threads(1)
    found = read(options.json) if options.show else run(options)
    if options.png is not None:
        page.draw(options.png, found)
    if options.page is not None:
        page.show(found, options.page, options.png)
    if options.json is None:
        json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
