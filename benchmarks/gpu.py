"""Everything that needs a GPU, built, checked and timed in one call of under nine minutes.

    python benchmarks/gpu.py [--seconds 510] [--quick] [--only SECTION ...]
                             [--json GPU.json] [--png FILE] [--page papers/docs/gpu-results.md]
    python benchmarks/gpu.py --show --json GPU.json --page papers/docs/gpu-results.md    # measures nothing

Sections do not depend on each other: one that fails is written down as failed and the next begins. Each has a share of
the seconds; what no longer fits into it is written down as not run. They run in a process of their own, and another one
goes on where that one ends or stands still, for an error in a kernel is the end of a process's GPU. The JSON is written
after every section. What is measured of the kernels alone stands in a second file, GPU-kernels.json, which stays
current when the engine changes. Without a GPU it says so, and the exit status is 0. --page puts the tables between the
page's markers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from batchmaker.errors import DeviceError
from batchmaker.kernels.found import found_device
from gpu_deadline import Deadline
from gpu_page import draw, tables
from provenance import digest, made_by

Row = dict[str, Any]
OF_KERNELS: Final = (
    "src/batchmaker/kernels/configuration.py", "src/batchmaker/kernels/cost.py", "src/batchmaker/kernels/device.cuh",
    "src/batchmaker/kernels/devices.py", "src/batchmaker/kernels/fallback.py", "src/batchmaker/kernels/launch.py",
    "src/batchmaker/kernels/layer.py", "src/batchmaker/kernels/modules.py", "src/batchmaker/kernels/nvrtc.py",
    "src/batchmaker/kernels/recurrent.cu", "src/batchmaker/kernels/rows.py", "src/batchmaker/kernels/sequences.py",
    "src/batchmaker/kernels/source.py", "src/batchmaker/kernels/sums.cuh", "src/batchmaker/kernels/template.py",
    "src/batchmaker/kernels/tiling.py", "src/batchmaker/kernels/tuner.py",
)  # fmt: skip
MEASURES: Final = (
    "benchmarks/gpu_compile.py", "benchmarks/gpu_engine.py", "benchmarks/gpu_padded.py", "src/batchmaker/engine",
    "src/batchmaker/device", "src/batchmaker/device/steps.cu", "src/batchmaker/executor/cuda",
    "src/batchmaker/executor/cuda/rows.cu", *OF_KERNELS, "src/batchmaker/policies", "src/batchmaker/core",
)  # fmt: skip
KERNELS_MEASURE: Final = ("benchmarks/gpu_kernels.py", *OF_KERNELS)
KERNEL_SECTIONS: Final = ("correctness", "table1", "flashrnn", "table3", "networks", "tuner")
"""Those without an engine."""
NO_GPU: Final = "not run: no GPU"
RUNNING: Final = "running"
QUICK_S: Final = 60.0
GRACE_S: Final = 45.0
"""A section that is so much over its time stands still: that of all others together is less."""
LOOK_EVERY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Section:
    """share: of all seconds. run: gets its deadline and returns its rows."""

    name: str
    share: float
    run: Callable[[Deadline], list[Row]]


def sections() -> list[Section]:
    """Return all sections: what is compiled, what is right, the engine, its kernels."""
    import gpu_compile
    import gpu_engine
    import gpu_kernels

    return [
        Section("compile", 0.08, gpu_compile.compiling),
        Section("executor", 0.06, gpu_engine.agreement),
        Section("correctness", 0.06, gpu_kernels.correctness),
        Section("launches", 0.02, gpu_engine.launches),
        Section("lstm", 0.20, gpu_engine.lstm),
        Section("seq2seq", 0.12, gpu_engine.seq2seq),
        Section("treelstm", 0.09, gpu_engine.treelstm),
        Section("deadlines", 0.05, gpu_engine.deadlines),
        Section("in_flight", 0.05, gpu_engine.in_flight),
        Section("tasks", 0.05, gpu_engine.tasks),
        Section("table1", 0.11, gpu_kernels.table1),
        Section("flashrnn", 0.02, gpu_kernels.flashrnn),
        Section("table3", 0.03, gpu_kernels.table3),
        Section("networks", 0.03, gpu_kernels.networks),
        Section("tuner", 0.03, gpu_kernels.tuner),
    ]


def run_all(
    wanted: Sequence[Section], seconds: float, flush: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic, is_broken: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:  # fmt: skip
    """Run sections one after the other and return what became of each, by name; `flush` gets it before and after each.

    What a section leaves of its share goes to those after it, and nothing begins once all seconds are over. is_broken:
    whether this process can do no more; then those that are left are missing.
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
        flush({**results, section.name: {"state": RUNNING, "until_s": begin_s + allowed_s, "rows": []}})
        try:
            rows, state = section.run(Deadline(begin_s + allowed_s, clock)), "ran"
        except Exception as error:  # whatever a device that nobody has tried before does
            traceback.print_exc()
            rows, state = [], f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        results[section.name] = {"state": state, "seconds": clock() - begin_s, "rows": rows}
        flush(results)
        if is_broken():
            break
    return results


class Worker(Protocol):
    """A process that runs sections. results: as run_all's `flush` has got them."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def results(self) -> dict[str, Any]: ...


def supervised(
    names: Sequence[str], seconds: float, start: Callable[[list[str], float], Worker],
    flush: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> dict[str, Any]:  # fmt: skip
    """Let workers run sections until each has ended, and return what became of each, by name.

    A worker that stands still is ended; the section in which one ends is written down as failed, and the next goes on.
    start: (names, seconds) -> a worker.
    """
    end_s = clock() + seconds
    results: dict[str, Any] = {}
    while (left := [name for name in names if name not in results]) and clock() < end_s:
        worker, why = start(left, end_s - clock()), None
        while (status := worker.poll()) is None and why is None:
            pause(LOOK_EVERY_S)
            found = worker.results()
            flush({**results, **found})
            late = [each["until_s"] for each in found.values() if each["state"] == RUNNING]
            if late and clock() > late[0] + GRACE_S:
                worker.kill()
                why = f"failed: stood still, ended {GRACE_S:.0f} s after its time"
        found = worker.results()
        results |= {name: each for name, each in found.items() if each["state"] != RUNNING}
        running = [name for name, each in found.items() if each["state"] == RUNNING]
        stuck = running[0] if running else next((name for name in left if name not in results), None)
        if running or (stuck == left[0] and not found):  # it ended within a section, or before the first
            results[stuck] = {"state": why or f"failed: the process ended with {status}", "seconds": 0.0, "rows": []}
        flush(results)
    for name in names:
        results.setdefault(name, {"state": "not run: out of time", "seconds": 0.0, "rows": []})
    return {name: results[name] for name in names}


class Process:
    """A worker that is this script once more."""

    def __init__(self, names: Sequence[str], seconds: float) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "results.json"
        command = [sys.executable, __file__, "--worker", str(self._file), "--seconds", str(seconds), "--only", *names]
        self._process = subprocess.Popen(command)
        self.poll = self._process.poll

    def kill(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)  # so that its memory is free again

    def results(self) -> dict[str, Any]:
        return dict(json.loads(self._file.read_text(encoding="utf-8"))) if self._file.exists() else {}


def work(names: Sequence[str], seconds: float, file: Path) -> None:
    """Run sections in this process and write what becomes of them into a file."""
    from gpu_kernels import device_failure

    def flush(results: dict[str, Any]) -> None:
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(results), encoding="utf-8")
        fresh.replace(file)

    torch.manual_seed(0)
    wanted = [section for section in sections() if section.name in names]
    flush(run_all(wanted, seconds, flush, is_broken=lambda: device_failure() is not None))


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
        **made_by(MEASURES, "python benchmarks/gpu.py"), "torch": torch.__version__, "seed": 0, "seconds": seconds,
        "device": None, "driver": None, "sms": None, "packages": packages(),
    }  # fmt: skip
    if why_no_gpu() is None:
        identity = found_device().identity
        made |= {"device": identity.name, "driver": identity.driver, "sms": identity.sms}
    return made


def packages() -> dict[str, str | None]:
    """Return the versions of what compiles and launches the kernels, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def save(path: Path, content: dict[str, Any]) -> None:
    """Write the results of the engine into a file, and those of the kernels into another one, by what they measure.

    With sections of one kind only, as under --only, the other file stays as it is.
    """
    alone = {name: found for name, found in content["sections"].items() if name in KERNEL_SECTIONS}
    rest = {name: found for name, found in content["sections"].items() if name not in KERNEL_SECTIONS}
    measured = {"paths": list(KERNELS_MEASURE), "digest": digest(KERNELS_MEASURE)}
    if rest or not alone:
        _write(path, {**content, "sections": rest})
    if alone or not rest:
        _write(path.with_name(f"{path.stem}-kernels.json"), {**content, "measures": measured, "sections": alone})


def joined(path: Path) -> dict[str, Any]:
    """Return what `save` wrote: the results of the engine, then those of the kernels, with their own commit."""
    content, kernels = (
        dict(json.loads(file.read_text(encoding="utf-8")))
        for file in (path, path.with_name(f"{path.stem}-kernels.json"))
    )
    content["sections"] |= {name: {**found, "commit": kernels["commit"]} for name, found in kernels["sections"].items()}
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


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
    parser.add_argument("--quick", action="store_true", help="a minute for everything; what does not fit is not run")
    parser.add_argument("--only", nargs="+", help="these sections")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--show", action="store_true", help="show what is in the files of --json, and measure nothing")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seconds = min(options.seconds, QUICK_S) if options.quick else options.seconds
    if options.worker:
        work(options.only, options.seconds, options.worker)
        return
    if options.show:
        if not options.json:
            parser.error("--show: name the file to show with --json")
        show(joined(options.json), options)
        return
    content: dict[str, Any] = {**about(options.seconds), "state": "ran", "sections": {}}

    def flush(results: dict[str, Any]) -> None:
        content["sections"] = results
        if options.json:
            save(options.json, content)

    missing = why_no_gpu()
    if missing is not None:
        content |= {"state": NO_GPU, "why": missing}
        print(f"{NO_GPU} ({missing})")
        flush({})
    else:
        names = [section.name for section in sections() if not options.only or section.name in options.only]
        flush(supervised(names, options.seconds, Process, flush))
    show(content, options)


def show(content: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the tables, and put them and the picture where the options say."""
    print(tables(content))
    if options.png:
        draw(options.png, content)
    if options.page:
        put(options.page, content)


if __name__ == "__main__":
    main()
