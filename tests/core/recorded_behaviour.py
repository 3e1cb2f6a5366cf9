"""What the scheduler does in hundreds of situations, kept in files: which nodes run together, when, in which rows.

    PYTHONPATH=src:tests/core python tests/core/recorded_behaviour.py     # writes tests/core/recorded/

A situation is a name. Of each, the files keep its timeline (start, worker, cell, requests, and how many such steps
follow one another), the end of each request, and a digest of all commands, which has the rows as well. There are two
kinds: random programs on a virtual device, with failures, cancellations, deadlines, priorities, sequences and programs
that wait for values; and the networks of the zoo, simulated. A scheduler that is rebuilt has to do the same. Where a
rule changes on purpose, the files are written again, and the change says which rule.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np

FOLDER: Final = Path(__file__).resolve().parent / "recorded"
NUM_PROGRAMS: Final = 240
NETWORKS: Final = (
    "lstm", "seq2seq", "bilstm-tagger", "bilstm-tagger-char", "treelstm", "treelstm-2type", "treegru", "mvrnn",
    "latticelstm", "latticegru", "resnet50", "bert", "deepspeech2", "gnmt", "las", "transformer",
)  # fmt: skip
POLICIES: Final = ("agenda", "agenda-remaining", "auto", "cellular", "depth", "lazy", "sufficient")
Played = dict[str, Any]


def programs() -> Iterator[tuple[str, Callable[[], Played]]]:
    """Random programs: (name, how it is played)."""
    for seed in range(NUM_PROGRAMS):
        yield f"program {seed}", lambda seed=seed: _program(seed)  # type: ignore[misc]


def networks() -> Iterator[tuple[str, Callable[[], Played]]]:
    """The zoo under each policy: (name, how it is played)."""
    for network in NETWORKS:
        for policy in POLICIES:
            for workers in (1, 2):
                yield f"{network} {policy} {workers}", lambda a=network, b=policy, c=workers: _network(a, b, c)  # type: ignore[misc]


SITUATIONS: Final = {"programs": programs, "networks": networks}


def recorded(kind: str) -> dict[str, Played]:
    """Return what the files keep of one kind of situations."""
    found: dict[str, Played] = json.loads(gzip.decompress((FOLDER / f"{kind}.json.gz").read_bytes()))
    return found


def _program(seed: int) -> Played:
    from test_scheduler_properties import CELL_POLICIES, play

    rng = random.Random(seed)
    max_batch = rng.randint(1, 8)
    settings = {
        "seed": rng.randrange(2**32), "max_batch": max_batch, "min_batch": rng.randint(1, max_batch),
        "max_steps": rng.choice([1, 2, 5, 40]), "budget_ms": rng.choice([None, None, 1.0, 3000.0]),
        "loops_ahead": rng.random() < 0.5, "task_s": rng.choice([0.0, 0.2, 1.0]),
        "most_told": rng.choice([1, 1, 3, 40]),
        "num_workers": rng.randint(1, 3), "run_ahead": rng.randint(0, 2), "num_requests": rng.randint(1, 12),
        "size": rng.randint(1, 8), "waits": rng.random() < 0.5, "mishaps": rng.random() < 0.5,
        "priorities": rng.choice([(0,), (3,), (0, 0, 1), (-1, 0, 1, 2)]), "spread": rng.choice([0, 5, 30]),
        "num_sequences": rng.randint(0, 3), "num_chunks": rng.randint(1, 5),
        "policy": CELL_POLICIES[seed % len(CELL_POLICIES)], "patience": rng.choice([1, 5, 10_000]),
    }  # fmt: skip
    harness = play(settings)
    harness.check_nothing_left()
    timeline = joined((ran.start_s, ran.worker, ran.cell, list(ran.requests)) for ran in harness.log)
    ends = [[request, *harness.answers[request]] for request in sorted(harness.answers)]
    return {"timeline": timeline, "ends": ends, "commands": digest(harness.commands)}


_PLANS: dict[str, Any] = {}


def _network(name: str, policy: str, workers: int) -> Played:
    from batchmaker.cli.simulate import workload
    from batchmaker.lab.simulator.cell_simulation import CellSimulation
    from batchmaker.lab.simulator.costs import SimulatedDevice, StepCosts
    from batchmaker.lab.simulator.workload import Offered
    from batchmaker.lab.zoo import MODELS
    from batchmaker.lab.zoo.blueprint import blueprint
    from batchmaker.policies import make

    if name not in _PLANS:
        plan = blueprint(name, MODELS[name])
        _PLANS[name] = plan, workload.make(name, plan, (), 16).draw(0, 16)
    plan, requests = _PLANS[name]
    model = plan.model
    most = max(cell.max_batch for cell in model.cells)
    seconds = (1.0 + np.arange(len(model.cells)))[:, None] * (1.0 + np.arange(most + 1) / 16)
    arrived_s = np.sort(np.random.default_rng(1).uniform(0, 200, 16))
    timeline: list[Any] = []
    commands: list[Any] = []
    simulation = CellSimulation(
        model, make(policy), Offered(requests, arrived_s), SimulatedDevice(StepCosts(seconds), workers),
        observe=lambda step: timeline.append((round(step.begin_s, 6), step.worker, step.what, step.requests.tolist())),
    )  # fmt: skip
    handle = simulation.scheduler.handle

    def heard(*events: Any) -> list[Any]:
        said = handle(*events)
        commands.extend(said)
        return said

    simulation.scheduler.handle = heard  # type: ignore[method-assign]
    records = simulation.run()
    ends = [
        [i, round(at_s, 6), int(how)]
        for i, (at_s, how) in enumerate(zip(records.finished_s, records.outcome, strict=True))
    ]
    return {"timeline": joined(timeline), "ends": ends, "commands": digest(commands)}


def joined(steps: Iterable[tuple[float, int, str, list[int]]]) -> list[list[Any]]:
    """Return steps with their number, where the same requests follow one another in the same cell."""
    found: list[list[Any]] = []
    last: dict[int, list[Any]] = {}  # by worker
    for start_s, worker, cell, requests in steps:
        before = last.get(worker)
        if before is not None and before[2:4] == [cell, requests]:
            before[4] += 1
        else:
            last[worker] = [start_s, worker, cell, requests, 1]
            found.append(last[worker])
    return found


def digest(commands: list[Any]) -> str:
    """Return a digest of commands, with every row and table."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, np.ndarray):
            found.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Enum):
            found.update(value.name.encode())
        elif is_dataclass(value):
            found.update(type(value).__name__.encode())
            for field in fields(value):
                part = getattr(value, field.name)
                if field.name == "may_stop" and part is None:
                    part = np.zeros(value.num_steps, np.bool_)
                no_node = field.name == "base" and value.num_nodes == 0  # where no node is means nothing
                if not (no_node or (field.name == "memories" and part is None)):
                    add(part)
        elif isinstance(value, tuple | list):
            found.update(f"({len(value)}".encode())
            for part in value:
                add(part)
        else:
            found.update(repr(value).encode())

    add(commands)
    return found.hexdigest()[:16]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for kind, situations in SITUATIONS.items():
        found = {name: play() for name, play in situations()}
        text = json.dumps(found, separators=(",", ":")).encode()
        path = FOLDER / f"{kind}.json.gz"
        path.write_bytes(gzip.compress(text, 9, mtime=0))
        print(f"{path.name}: {len(found)} situations, {path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
