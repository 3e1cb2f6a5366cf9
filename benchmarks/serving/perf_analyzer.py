"""Triton's perf_analyzer, unmodified, against the server: the LSTM at Poisson rates.

    python benchmarks/serving/perf_analyzer.py BINARY [--rates 50 100 200]

BINARY: perf_analyzer, which older wheels carry (tritonclient 2.46.0 under data/bin; it needs libb64-0d and
nvidia-cuda-runtime-cu12 on the library path). Sentences of 25 words, one to a request.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import processes
import wire
from report import write

WORDS = [list(range(number, number + 25)) for number in range(0, 5000, 50)]


def run(binary: Path, server: processes.Server, rates: list[float], folder: Path) -> dict[str, Any]:
    """Return what perf_analyzer says of each rate, and the end of what it printed."""
    data = folder / "input.json"
    data.write_text(json.dumps({"data": [{"input_0": {"content": words, "shape": [25]}} for words in WORDS]}))
    lines: dict[str, Any] = {}
    for rate in rates:
        table = folder / "out.csv"
        command = [
            str(binary), "-m", "lstm", "-u", f"{server.host}:{server.port}", "-i", "http", "-b", "1",
            "--request-rate-range", f"{rate:g}", "--request-distribution", "poisson", "--input-data", str(data),
            "--shape", "input_0:25", "--measurement-interval", "3000", "--stability-percentage", "50", "-r", "4",
            "--percentile", "90", "-f", str(table), "--max-threads", "16",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        rows = list(csv.DictReader(table.open())) if table.exists() else []
        lines[f"{rate:g}"] = {
            "exit": done.returncode,
            "row": rows[0] if rows else done.stdout[-600:] + done.stderr[-300:],
        }
        table.unlink(missing_ok=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[50.0, 100.0, 200.0])
    given = parser.parse_args()
    with (
        processes.batchmaker("lstm:hidden=1024,dtype=bfloat16") as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        processes.warm_up(server, wire.infer_binary("lstm", {"input_0": WORDS[0]}))
        results = run(given.binary, server, given.rates, Path(folder))
    write("perf-analyzer", {"model": "lstm, hidden 1024, bfloat16", "words": 25, "threads": 1}, results)


if __name__ == "__main__":
    main()
