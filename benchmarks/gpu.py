"""Everything that needs a GPU, built, checked and timed in one call of under nine minutes.

    python benchmarks/gpu.py [--seconds 510] [--only SECTION ...] [--json FILE] [--png FILE] [--page docs/gpu.md]

Sections do not depend on each other: one that fails is written down as failed and the next begins. Each has a share of
the seconds; what no longer fits into it is written down as not run. The JSON is written after every section. Without a
GPU it says so, and the exit status is 0. --page puts the tables between the page's markers.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from batchmaker.cli.bench.report import commit, machine
from batchmaker.errors import DeviceError
from batchmaker.kernels.found import found_device
from gpu_page import draw, tables

Row = dict[str, Any]
NO_GPU: Final = "not run: no GPU"


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time by which a section should have ended. clock: seconds."""

    at_s: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        return self.at_s - self.clock()

    @property
    def passed(self) -> bool:
        return self.left_s <= 0


@dataclass(frozen=True, slots=True)
class Section:
    """share: of all seconds. run: gets its deadline and returns its rows."""

    name: str
    share: float
    run: Callable[[Deadline], list[Row]]


def sections() -> list[Section]:
    """Return all sections, the cheapest proof first."""
    import gpu_engine
    import gpu_kernels

    return [
        Section("executor", 0.06, gpu_engine.agreement),
        Section("correctness", 0.10, gpu_kernels.correctness),
        Section("table1", 0.27, gpu_kernels.table1),
        Section("table3", 0.07, gpu_kernels.table3),
        Section("networks", 0.05, gpu_kernels.networks),
        Section("lstm", 0.17, gpu_engine.lstm),
        Section("seq2seq", 0.08, gpu_engine.seq2seq),
        Section("treelstm", 0.08, gpu_engine.treelstm),
        Section("tuner", 0.12, gpu_kernels.tuner),
    ]


def run_all(
    wanted: Sequence[Section], seconds: float, flush: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:  # fmt: skip
    """Run sections one after the other and return what became of each, by name; `flush` gets it after each.

    What a section leaves of its share goes to those after it, and nothing begins once all seconds are over.
    """
    end_s = clock() + seconds
    whole = sum(section.share for section in wanted)
    results: dict[str, Any] = {}
    for section in wanted:
        left_s, begin_s = end_s - clock(), clock()
        if left_s <= 0:
            results[section.name] = {"state": "not run: out of time", "seconds": 0.0, "rows": []}
            continue
        allowed_s = left_s * section.share / whole
        whole -= section.share
        try:
            rows, state = section.run(Deadline(begin_s + allowed_s, clock)), "ran"
        except Exception as error:  # whatever a device that nobody has tried before does
            traceback.print_exc()
            rows, state = [], f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        results[section.name] = {"state": state, "seconds": clock() - begin_s, "rows": rows}
        flush(results)
    return results


def why_no_gpu() -> str | None:
    """Return why nothing can be run here, None if it can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU that it can use"
    try:
        found_device()
    except DeviceError as error:
        return str(error)
    return None


def about(seconds: float) -> dict[str, Any]:
    """Return what the results were made with and on."""
    made = {
        "commit": commit(), "machine": machine(), "torch": torch.__version__, "seed": 0, "seconds": seconds,
        "command": "python benchmarks/gpu.py", "device": None, "driver": None, "sms": None,
    }  # fmt: skip
    if why_no_gpu() is None:
        identity = found_device().identity
        made |= {"device": identity.name, "driver": identity.driver, "sms": identity.sms}
    return made


def put(page: Path, content: dict[str, Any]) -> None:
    """Replace what stands between the page's markers."""
    text = page.read_text(encoding="utf-8")
    made = f"\\g<1>{tables(content)}\n\\g<2>"
    page.write_text(
        re.sub(r"(<!-- results -->\n).*?(<!-- /results -->)", made, text, flags=re.DOTALL), encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=510.0, help="for everything")
    parser.add_argument("--only", nargs="+", help="these sections")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    content: dict[str, Any] = {**about(options.seconds), "state": "ran", "sections": {}}

    def flush(results: dict[str, Any]) -> None:
        content["sections"] = results
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    missing = why_no_gpu()
    if missing is not None:
        content |= {"state": NO_GPU, "why": missing}
        print(f"{NO_GPU} ({missing})")
        flush({})
    else:
        torch.manual_seed(0)
        wanted = [section for section in sections() if not options.only or section.name in options.only]
        flush(run_all(wanted, options.seconds, flush))
    print(tables(content))
    if options.png:
        draw(options.png, content)
    if options.page:
        put(options.page, content)


if __name__ == "__main__":
    main()
