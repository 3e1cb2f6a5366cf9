"""Fleets on Ray, live: what the front costs, what a second replica gains, and bulk work per core.

    python benchmarks/fleet_serving.py [DATA] [--only PART]     parts: overhead, proxies, replicas, routers, bulk, rows

DATA: a folder with europarl_deen/, for the lengths of sentences. Numbers of papers/docs/fleet-serving-results.md; needs
`pip install 'batchmaker[ray]'`. Each part writes benchmarks/results/serving-fleet-PART.json. All that is compared runs
in one go and takes turns. Where load generator, front and replicas share the processors, their shares are written down.

- overhead: `batchmaker serve` alone, and with --replicas 1: a trivial model, 100 requests/s (Poisson) and closed loops.
- proxies: the same through Ray Serve's own proxy in front of the front, and through its HAProxy ingress.
- replicas: one and two replicas of one thread, LSTM 1024: closed loops, 128 connections.
- routers: two replicas, LSTM 1024, sentences of DATA at 60 % of the peak: round robin and work, in turns.
- bulk: fleet.map with one worker, and engine.map in this process, on the same sentences.
- rows: fleet.map over --rows short sentences: rows a second, and the most memory that any process takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "serving"))

import processes  # noqa: E402
import wire  # noqa: E402
from generator import Plan, offer  # noqa: E402
from report import figures, write  # noqa: E402
from trivial import Trivial  # noqa: E402

import batchmaker as bm  # noqa: E402

PARTS = ("overhead", "proxies", "replicas", "routers", "bulk", "rows")
MEASURES = ("src/batchmaker/fleet", "src/batchmaker/server", "benchmarks/fleet_serving.py")
REPEATS = 3
LSTM = "lstm:hidden=1024,dtype=bfloat16"


def sentences_of(data: Path | None, count: int) -> list[list[int]]:
    """Return sentences as numbers below 10,000, with the lengths of Europarl, or lognormal ones without data."""
    if data is None:
        random = np.random.default_rng(0)
        lengths = np.clip(random.lognormal(2.9, 0.75, count), 1, 330).astype(int)
        return [random.integers(0, 10_000, length).tolist() for length in lengths]
    lines = (data / "europarl_deen" / "raw5k.en").read_text("utf-8").splitlines()
    words = [[hash(word) % 10_000 for word in line.split()] for line in lines if line.split()]
    return (words * (count // len(words) + 1))[:count]


def measured(server: processes.Server, requests: list[bytes], rate: float | None, seconds: float, connections: int):
    """Return the figures of one load, and the processor shares of server and generator."""
    before, replicas_before, begin_s = server.processor_s(), server.replicas_s(), time.monotonic()
    line = figures(offer(Plan(server.host, server.port, requests, rate, seconds, connections)), seconds)
    wall_s = time.monotonic() - begin_s
    line["server_share"] = round((server.processor_s() - before) / wall_s, 3)
    line["replicas_share"] = round((server.replicas_s() - replicas_before) / wall_s, 3)
    return line


def in_turns(servers: dict[str, processes.Server], requests: list[bytes], loads: dict[str, tuple], seconds: float):
    """Return the lines of all servers under all loads, REPEATS times in turns, and their medians."""
    lines: dict[str, dict[str, list[dict[str, Any]]]] = {name: {load: [] for load in loads} for name in servers}
    for server in servers.values():
        processes.warm_up(server, requests[0])
    for _ in range(REPEATS):
        for load, (rate, connections) in loads.items():
            for name, server in servers.items():
                lines[name][load].append(measured(server, requests, rate, seconds, connections))
    return {name: {load: middle(found) for load, found in of.items()} for name, of in lines.items()}


def middle(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure."""
    return {key: statistics.median([line[key] for line in lines]) for key in lines[0] if lines[0][key] is not None}


def added(results: dict[str, Any], base: str) -> dict[str, Any]:
    """Return what each server adds to the median at a calm load, and its share of the best throughput."""
    best = {name: max(of[load]["served_rps"] for load in of if load != "calm") for name, of in results.items()}
    return {
        name: {
            "p50_added_ms": round(of["calm"]["sent_p50_ms"] - results[base]["calm"]["sent_p50_ms"], 3),
            "served_ratio": round(best[name] / best[base], 3),
        }
        for name, of in results.items()
        if name != base
    }


def overhead(given: argparse.Namespace, folder: Path) -> Any:
    """The front over the server alone."""
    bm.save(Trivial(), folder / "trivial")
    requests = [wire.infer_binary("trivial", {"input_0": [n]}) for n in range(64)]
    loads = {"calm": (100.0, 64), "closed 16": (None, 16), "closed 64": (None, 64)}
    with contextlib.ExitStack() as stack:
        source = f"trivial={folder / 'trivial'}"
        servers = {"alone": stack.enter_context(processes.batchmaker(source))}
        servers["front"] = stack.enter_context(processes.batchmaker(source, "--replicas", 1))
        if given.part == "proxies":
            app = processes.peer(Path(sys.executable), "fleet_app.py", source)
            servers["front behind Serve's proxy"] = stack.enter_context(app)
            os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
            try:
                app = processes.peer(Path(sys.executable), "fleet_app.py", source)
                servers["front behind HAProxy"] = stack.enter_context(app)
            except RuntimeError as error:
                print(f"HAProxy is left out: {error}", file=sys.stderr)
            del os.environ["RAY_SERVE_ENABLE_HA_PROXY"]
        results = in_turns(servers, requests, loads, given.seconds)
    return {**results, "over alone": added(results, "alone")}


def replicas(given: argparse.Namespace, folder: Path) -> Any:
    """Two replicas over one."""
    requests = [wire.infer_binary("lstm", {"input_0": one}) for one in sentences_of(given.data, 2000)]
    loads = {"closed 128": (None, 128)}
    with contextlib.ExitStack() as stack:
        servers = {"alone": stack.enter_context(processes.batchmaker(LSTM))}
        for count in (1, 2):
            servers[f"{count} replicas"] = stack.enter_context(processes.batchmaker(LSTM, "--replicas", count))
        results = in_turns(servers, requests, loads, given.seconds)
    one, two = (results[f"{count} replicas"]["closed 128"] for count in (1, 2))
    alone = results["alone"]["closed 128"]["served_rps"]
    for_the_same_time = 2 * (two["served_rps"] / two["replicas_share"]) / (one["served_rps"] / one["replicas_share"])
    return {
        **results,
        "two over one": round(two["served_rps"] / one["served_rps"], 3),
        "two over alone": round(two["served_rps"] / alone, 3),
        "two over one, if each replica had the processor time of the one": round(for_the_same_time, 3),
    }


def routers(given: argparse.Namespace, folder: Path) -> Any:
    """Routing by work and in turn, live."""
    requests = [wire.infer_binary("lstm", {"input_0": one}) for one in sentences_of(given.data, 4000)]
    with contextlib.ExitStack() as stack:
        servers = {}
        for router in ("round-robin", "least-requests", "least-work"):
            settings = folder / f"{router}.toml"
            settings.write_text(f'[fleet]\nreplicas = 2\nrouter = "{router}"\n')
            servers[router] = stack.enter_context(processes.batchmaker(LSTM, "--config", settings))
        for server in servers.values():
            processes.warm_up(server, requests[0])
        peak = measured(servers["least-work"], requests, None, given.seconds, 128)["served_rps"]
        results = in_turns(servers, requests, {"0.6 of the peak": (0.6 * peak, 512)}, 2 * given.seconds)
    of = {name: line["0.6 of the peak"] for name, line in results.items()}
    ratios = {f"p{p}": round(of["least-work"][f"p{p}_ms"] / of["round-robin"][f"p{p}_ms"], 3) for p in (50, 90, 99)}
    return {"peak_rps": peak, **results, "least-work over round-robin": ratios}


def bulk(given: argparse.Namespace, folder: Path) -> Any:
    """Rows a second for each core: Ray Data's workers, and an engine here, in turns."""
    from batchmaker import fleet
    from batchmaker.saved.sources import parse_source

    source = "lstm:hidden=256"
    sentences = sentences_of(given.data, 60_000)
    rows = folder / "in.jsonl"
    rows.write_text("".join(json.dumps({"words": one}) + "\n" for one in sentences))
    (versions,) = parse_source(source).scan().values()
    rates: dict[str, list[float]] = {"engine.map": [], "fleet.map": [], "fleet.map, start included": []}
    for repeat in range(REPEATS):
        with bm.Engine(versions["1"].make(), threads=1) as engine:
            engine.map(sentences[:2000], progress=False)
            begin_s = time.perf_counter()
            engine.map(sentences[:20_000], progress=False)
            rates["engine.map"].append(20_000 / (time.perf_counter() - begin_s))
        out = folder / f"out{repeat}"
        done = fleet.map(rows, source, out, column="words", workers=1, progress=False)
        times = sorted(part.stat().st_mtime for part in out.glob("part-*"))
        rates["fleet.map"].append(10_000 * (len(times) - 1) / (times[-1] - times[0]))
        rates["fleet.map, start included"].append(done.rows / done.wall_s)
    middle_of = {name: round(statistics.median(found), 1) for name, found in rates.items()}
    ratio = round(middle_of["fleet.map"] / middle_of["engine.map"], 3)
    return {"rows_per_s": middle_of, "fleet.map over engine.map": ratio, "all": rates}


def rows(given: argparse.Namespace, folder: Path) -> Any:
    """Memory over the number of rows: sentences of 1 to 9 words, as JSON lines in and out, all cores."""
    from batchmaker import fleet

    found = {}
    for count in given.rows:
        lines, out = folder / "in.jsonl", folder / f"out{count}"
        random = np.random.default_rng(0)
        with lines.open("w") as file:
            for begin in range(0, count, 10_000):
                lengths = random.integers(1, 10, min(10_000, count - begin))
                file.writelines(f'{{"words":{random.integers(0, 99, n).tolist()}}}\n' for n in lengths)
        with MemoryPeaks() as peaks:
            done = fleet.map(lines, given.model, out, column="words", block_rows=10_000, progress=False)
        found[f"{count:,}"] = {
            "rows_per_s": round(done.rows / done.wall_s, 1),
            "wall_s": round(done.wall_s, 1),
            "input_mb": round(lines.stat().st_size / 2**20, 1),
            "output_mb": round(sum(part.stat().st_size for part in out.glob("part-*")) / 2**20, 1),
            "most_mb": peaks.most_mb(),
        }
        print(count, found[f"{count:,}"], file=sys.stderr, flush=True)
        shutil.rmtree(out)
    return found


class MemoryPeaks:
    """The most memory that each process of this one's family takes while it is entered, looked at twice a second."""

    def __init__(self) -> None:
        self._most: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.5):
            for pid in processes.family(os.getpid()):
                self._most[pid] = max(self._most.get(pid, 0.0), processes.resident_mb(pid))
                with contextlib.suppress(OSError):
                    self._names[pid] = Path(f"/proc/{pid}/comm").read_text().strip()

    def __enter__(self) -> MemoryPeaks:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()

    def most_mb(self) -> dict[str, float]:
        """Return the most of this process, of one worker, and of Ray's own processes together."""
        own, workers, others = self._most.pop(os.getpid(), 0.0), [0.0], 0.0
        for pid, most in self._most.items():
            if "MapWorker" in self._names.get(pid, ""):
                workers.append(most)
            else:
                others += most
        return {"caller": round(own, 1), "a worker": round(max(workers), 1), "ray": round(others, 1)}


RUN = {"overhead": overhead, "proxies": overhead, "replicas": replicas, "routers": routers, "bulk": bulk, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rows", type=int, nargs="+", default=[300_000, 1_000_000, 3_000_000])
    parser.add_argument("--model", default="lstm:hidden=16,vocabulary_size=100", help="of the part rows")
    given = parser.parse_args()
    for part in given.only or PARTS[:-1]:
        given.part = part
        with tempfile.TemporaryDirectory() as folder:
            results = RUN[part](given, Path(folder))
        settings = {"seconds": given.seconds, "repeats": REPEATS, "lengths": "Europarl" if given.data else "lognormal"}
        write(f"fleet-{part}", settings, results, MEASURES)


if __name__ == "__main__":
    main()
