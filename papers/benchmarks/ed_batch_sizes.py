"""ED-Batch's workloads at hidden sizes of 64 to 1,024, DyNet itself on all nine, and the sizes of its Table 5.

    python papers/benchmarks/ed_batch_sizes.py DATA [--dynet-python PYTHON] [--workload NAME ...] [--hidden 64 ...]
    python papers/benchmarks/ed_batch_sizes.py --page papers/docs/ed-batch-throughput.md    # tables from an earlier run

For each workload and size: requests per second of the learnt order and of the better of `agenda` and `depth`, planned
cells, in closed mini-batches of 64, and where the time goes (Figure 8). DyNet answers the same requests with both of
its strategies, in a process of its own (`dynet_workloads.py`): its graphs are built in Python, as ours are. Table 5: ms
of one mini-batch of 10 and 20 trees. Seconds are CPU time of the thread, as in `ed_batch_throughput.py`. A round has
256 requests up to hidden 256, 128 at 512 and 64 at 1,024. Each workload is kept in the JSON as it comes, beside those
of the same code, so the measuring can be done in parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.requests import requests_from
from batchmaker.engine.engine import Engine
from batchmaker.model import registry
from ed_batch import FILES
from ed_batch_throughput import Closed, figures, learnt, policy_of, with_cells
from shared import CPU_EXECUTOR, RESULTS, Result, command_now, fill, made_by, table

HIDDEN: Final = (64, 128, 256, 512, 1024)
MOST_HIDDEN: Final = {"mvrnn": 128}
"""A node of an MV-RNN has hidden x hidden numbers."""
ORDERS: Final = ("agenda", "depth", "learned")
BATCH: Final = 64
LEARN_FROM: Final = 512
ROUNDS: Final = 3
CORTEX: Final = {"networks": ("treegru", "treelstm"), "hidden": (256, 512), "batches": (10, 20)}
MEASURES: Final = (
    "papers/benchmarks/ed_batch_sizes.py", "papers/benchmarks/ed_batch_throughput.py",
    "papers/benchmarks/dynet_networks.py", "papers/benchmarks/dynet_workloads.py", "src/batchmaker/compile",
    "src/batchmaker/engine", *CPU_EXECUTOR, "src/batchmaker/core", "src/batchmaker/policies/agenda.py",
    "src/batchmaker/policies/depth.py", "src/batchmaker/policies/learned", "papers/src/batchmaker_papers/learners",
)  # fmt: skip
Cell = dict[str, float]


def num_requests(name: str, hidden: int, *, quick: bool) -> int:
    """Return the number of requests in a round: fewer of a large network."""
    return BATCH if name in MOST_HIDDEN or quick else BATCH * max(1, min(4, 1024 // hidden))


def played(name: str, data: Path, hidden: int, *, quick: bool, policies: Path) -> Result:
    """Measure the orders of one workload at one hidden size, and mini-batches of Table 5 where it has them."""
    count = num_requests(name, hidden, quick=quick)
    found = requests_from(name, data / FILES[name], count=count + LEARN_FROM, hidden=hidden)
    model, requests, others = found.model, found.requests[:count], found.requests[count:]
    file = policies / f"{name}.json"
    learnt(name, model, others, file)
    row: Result = {"workload": name, "hidden": hidden, "requests": count}
    with bound_once(), ExitStack() as stack:
        players = {}
        for order in ORDERS:
            engine = Engine(with_cells(model, "planned"), policy_of(order, file), threads=1)
            players[order] = Closed(stack.enter_context(engine))
            players[order].play(requests[:8], 8)
        stack.enter_context(quiet_interpreter())
        rounds: dict[str, list[Any]] = {order: [] for order in ORDERS}
        for _ in range(1 if quick else ROUNDS):
            for order, player in players.items():
                rounds[order].append(player.play(requests, BATCH))
        row |= {order: figures(rounds[order])["per_s"] for order in ORDERS}
        row["best"] = max(row["agenda"], row["depth"])
        row["shares"] = figures(rounds["learned"])["shares"]
        if name in CORTEX["networks"] and hidden in CORTEX["hidden"]:
            looks = {size: [players["learned"].play(requests[:size], size) for _ in range(5)]
                     for size in CORTEX["batches"]}  # fmt: skip
            row["batch_ms"] = {size: 1e3 * min(look.cpu_s for look in each) for size, each in looks.items()}
    return row


@contextmanager
def bound_once() -> Iterator[None]:
    """Bind a cell once for all engines that are made inside: planning takes seconds, and orders share their cells."""
    known: dict[Any, Any] = {}
    bind = registry.bind

    def once(source: Any, inputs: Any, *, name: str, **options: Any) -> Any:
        if (name, inputs) not in known:
            known[name, inputs] = bind(source, inputs, name=name, **options)
        return known[name, inputs]

    with patch.object(registry, "bind", once):
        yield


def dynet_inputs(data: Path, name: str, hidden: int, *, quick: bool) -> Result:
    """Return the requests that DyNet gets: the same as the engine's, as plain lists."""
    count = num_requests(name, hidden, quick=quick)
    found = requests_from(name, data / FILES[name], count=count + LEARN_FROM, hidden=8)
    model: Any = found.model
    sizes = {"words": getattr(model, "words", model.vocabulary_size), "characters": model.vocabulary_size}
    if name == "bilstm-tagger-char":
        sizes = {"words": model.vocabulary_size, "characters": model.alphabet}
    plain = [_plain(request) for request in found.requests[:count]]
    return {name: {"sizes": sizes, "requests": plain, "most_hidden": MOST_HIDDEN.get(name, max(HIDDEN))}}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def of_dynet(python: Path, inputs: Result, hidden: int, *, quick: bool) -> list[Result]:
    """Return what DyNet does at one hidden size, both strategies."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "inputs.json", Path(folder) / "out.json"
        given.write_text(json.dumps(inputs), "utf-8")
        script = Path(__file__).with_name("dynet_workloads.py")
        more = ["--hidden", hidden, "--sizes", BATCH, "--rounds", 1 if quick else ROUNDS - 1]
        command = [str(python), str(script), str(given), str(out), *map(str, more)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        rows: list[Result] = json.loads(out.read_text("utf-8"))
    return rows


# --- the page --------------------------------------------------------------------------------------------------------


def sizes_table(found: Result) -> str:
    """Return a row for each workload and size: the engine's orders, DyNet's strategies, and the shares of time."""
    rows = []
    for row in found["sizes"]:
        theirs = {one["strategy"]: one for one in found["dynet"]
                  if (one["workload"], one["hidden"]) == (row["workload"], row["hidden"])}  # fmt: skip
        best = max((one["per_s"] for one in theirs.values()), default=0.0)
        alone = max((one["per_s_without_building"] for one in theirs.values()), default=0.0)
        shares = [f"{row['shares'][part]:.0%}" for part in ("busy_s", "scheduler_s", "unfold_s")]
        rows.append([
            row["workload"], str(row["hidden"]), *(f"{row[order]:,.0f}" for order in ORDERS),
            f"{row['learned'] / row['best']:.2f}",
            *(f"{theirs[name]['per_s']:,.0f}" if name in theirs else "-" for name in ("agenda", "depth")),
            f"{alone:,.0f}" if alone else "-", f"{row['learned'] / best:.2f}" if best else "-", *shares,
        ])  # fmt: skip
    heads = ("workload", "hidden", *ORDERS, "learned over the better", "DyNet agenda", "DyNet depth",
             "DyNet without building", "learned over DyNet", "cells", "scheduler", "unfolding")  # fmt: skip
    return table(heads, rows)


def cortex_table(found: Result) -> str:
    rows = [[row["workload"], str(row["hidden"]), str(row["batch"]), f"{row['ms']:.3g}"] for row in found["cortex"]]
    return table(("workload", "hidden", "batch", "ms"), rows)


def page_text(found: Result) -> dict[str, str]:
    quick = " Of a quick run: the figures mean nothing." if found["quick"] else ""
    about = (
        f"{found['machine']['cpu']}, one thread, load average {found['load_average']}, commit {found['commit']}: "
        f"`{command_now(found)}`.{quick}"
    )
    return {"sizes-of-networks": f"{sizes_table(found)}\n\n{about}", "cortex": f"{cortex_table(found)}\n\n{about}"}


def measure_all(options: argparse.Namespace) -> None:
    """Measure every workload at every size, DyNet beside it, and write each as it comes."""
    jobs = [(name, hidden) for hidden in HIDDEN if hidden in options.hidden for name in options.workload
            if hidden <= MOST_HIDDEN.get(name, hidden)]  # fmt: skip
    more = [f"--{key} PYTHON" for key in ("dynet-python",) if options.dynet_python]
    more += ["--quick"] if options.quick else []
    command = " ".join(["python papers/benchmarks/ed_batch_sizes.py DATA", *more])
    about = {**made_by(MEASURES, command), "quick": options.quick}
    before = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
    same = before.get("measures") == about["measures"] and before["quick"] == options.quick
    kept: dict[str, list[Result]] = {key: before[key] if same else [] for key in ("sizes", "dynet")}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, hidden) in enumerate(jobs, 1):
            new = {"sizes": [played(name, options.data, hidden, quick=options.quick, policies=Path(folder))]}
            ours_s = time.monotonic() - began_s
            if options.dynet_python is not None:
                inputs = dynet_inputs(options.data, name, hidden, quick=options.quick)
                new["dynet"] = of_dynet(options.dynet_python, inputs, hidden, quick=options.quick)
            for key, rows in new.items():
                rest = [row for row in kept[key] if (row["workload"], row["hidden"]) != (name, hidden)]
                kept[key] = sorted(rest + rows, key=lambda row: (list(FILES).index(row["workload"]), row["hidden"]))
            found = {**about, **kept, "cortex": cortex_rows(kept["sizes"])}
            options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
            told = f"{ours_s:.0f} s ours, {time.monotonic() - began_s:.0f} s with DyNet, so far"
            print(f"{number}/{len(jobs)} {name} {hidden}: {told}", flush=True)


def cortex_rows(sizes: Sequence[Result]) -> list[Result]:
    """Return the mini-batches of Table 5."""
    return [
        {"workload": row["workload"], "hidden": row["hidden"], "batch": int(batch), "ms": ms}
        for row in sizes for batch, ms in row.get("batch_ms", {}).items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--dynet-python", type=Path, metavar="PYTHON")
    parser.add_argument("--workload", nargs="+", choices=FILES, default=list(FILES), metavar="NAME")
    parser.add_argument("--hidden", type=int, nargs="+", default=list(HIDDEN))
    parser.add_argument("--quick", action="store_true", help="one round of 64 requests: the figures mean nothing")
    parser.add_argument("--json", type=Path, default=RESULTS / "ed-batch-sizes.json")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.data is not None:
        measure_all(options)
    if options.page is not None:
        fill(options.page, page_text(json.loads(options.json.read_text("utf-8"))))


if __name__ == "__main__":
    main()
