"""Triton's perf_analyzer, unmodified, against the server: the LSTM at Poisson rates.

    python benchmarks/serving/perf_analyzer.py BINARY [--rates 50 100 200]
    python benchmarks/serving/perf_analyzer.py BINARY --sequences 100 [--rates 200]

BINARY: perf_analyzer, which older wheels carry (tritonclient 2.46.0 under data/bin; it needs libb64-0d and
nvidia-cuda-runtime-cu12 on the library path). Sentences of 25 words, one to a request; or, over a stream of gRPC, as
many sequences at once as are asked for, of 25 chunks of four words each.
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


CHUNKS, CHUNK_WORDS = 25, 4
SERVED = """
[[models]]
source = "lstm"
options = {hidden = 128}
sequences_only = true  # else perf_analyzer sends whole requests
"""


def words_of(folder: Path, inputs: list[Any]) -> Path:
    """Write inputs as perf_analyzer reads them: requests, or lists of the chunks of a sequence."""
    data = folder / "input.json"
    data.write_text(json.dumps({"data": inputs}))
    return data


def content(words: list[int]) -> dict[str, Any]:
    return {"input_0": {"content": words, "shape": [len(words)]}}


def measured(command: list[str], table: Path) -> dict[str, Any]:
    """Return the exit status of a run, and what it says of its rate, or else the end of what it printed."""
    done = subprocess.run([*command, "-f", str(table)], capture_output=True, text=True, timeout=120)
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    table.unlink(missing_ok=True)
    return {"exit": done.returncode, "row": rows[0] if rows else done.stdout[-600:] + done.stderr[-300:]}


def command_for(binary: Path, address: str, rate: float, data: Path) -> list[str]:
    """What all runs say."""
    return [
        str(binary), "-m", "lstm", "-u", address, "-b", "1", "--request-rate-range", f"{rate:g}",
        "--request-distribution", "poisson", "--input-data", str(data), "--measurement-interval", "3000",
        "--stability-percentage", "50", "-r", "4", "--percentile", "90", "--max-threads", "16",
    ]  # fmt: skip


def run(binary: Path, server: processes.Server, rates: list[float], folder: Path) -> dict[str, Any]:
    """Return what perf_analyzer says of each rate of whole requests over HTTP."""
    data = words_of(folder, [content(words) for words in WORDS])
    options = ["-i", "http", "--shape", "input_0:25"]
    address = f"{server.host}:{server.port}"
    return {
        f"{rate:g}": measured([*command_for(binary, address, rate, data), *options], folder / "out.csv")
        for rate in rates
    }


def run_sequences(
    binary: Path, server: processes.Server, rates: list[float], sequences: int, folder: Path
) -> dict[str, Any]:
    """Return what perf_analyzer says of each rate of chunks in a stream of gRPC."""
    starts = [(CHUNK_WORDS * number) % (25 - CHUNK_WORDS) for number in range(CHUNKS)]
    data = words_of(folder, [[content(words[at : at + CHUNK_WORDS]) for at in starts] for words in WORDS])
    options = ["-i", "grpc", "--streaming", "--shape", f"input_0:{CHUNK_WORDS}"]
    options += ["--num-of-sequences", str(sequences), "--sequence-length", str(CHUNKS)]
    address = f"{server.host}:{server.grpc_port}"
    return {
        f"{rate:g}": measured([*command_for(binary, address, rate, data), *options], folder / "out.csv")
        for rate in rates
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--rates", type=float, nargs="+")
    parser.add_argument("--sequences", type=int, help="sequences at once, over a stream of gRPC")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.sequences is not None:
            (folder / "server.toml").write_text(SERVED)
            with processes.batchmaker("--config", folder / "server.toml", grpc=True) as server:
                rates = given.rates or [200.0]
                results = run_sequences(given.binary.resolve(), server, rates, given.sequences, folder)
            settings = {"model": "lstm, hidden 128", "chunks": CHUNKS, "words": CHUNK_WORDS, "threads": 1}
            write("perf-analyzer-sequences", {**settings, "sequences": given.sequences}, results)
            return
        with processes.batchmaker("lstm:hidden=1024,dtype=bfloat16") as server:
            processes.warm_up(server, wire.infer_binary("lstm", {"input_0": WORDS[0]}))
            results = run(given.binary.resolve(), server, given.rates or [50.0, 100.0, 200.0], folder)
    write("perf-analyzer", {"model": "lstm, hidden 1024, bfloat16", "words": 25, "threads": 1}, results)


if __name__ == "__main__":
    main()
