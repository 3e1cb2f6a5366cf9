"""Lines over HTTP, beside LitServe: the servers, generator and requests are those of benchmarks/serving."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import batchmaker as bm
from batchmaker.cli.workload import make_workload
from engine_cost.chains import WORDS
from engine_cost.measuring import NotRunError, Row, Settings, compared, interleaved, say

sys.path.append(str(Path(__file__).resolve().parents[1] / "serving"))  # its scripts import each other by name

import processes
import wire
from generator import Plan, offer
from report import figures
from trivial import Trivial

CONNECTIONS: Final = (64, 256)
LSTM_CONNECTIONS: Final = 512
SATURATING: Final = 2000.0
LSTM: Final = f"lstm:hidden=1024,dtype=bfloat16,vocabulary_size={WORDS}"
RATES: Final = {20.0: (0.5, 7.0), 100.0: (0.33, 4.0)}
"""Requests per second: what p90 over LitServe's should be at most, and seconds."""
Servers = Mapping[str, tuple[processes.Server, Sequence[bytes]]]


def trivial(settings: Settings) -> Iterator[Row]:
    """Trivial requests a second over HTTP, closed loops: the server over LitServe."""
    python = _litserve(settings)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        bm.save(Trivial(), Path(folder) / "trivial")
        ours = stack.enter_context(processes.batchmaker(folder))
        theirs = stack.enter_context(processes.peer(python, "litserve_app.py", "trivial"))
        forms = {
            "bytes": (ours, [wire.infer_binary("trivial", {"input_0": [1]})]),
            "JSON": (ours, [wire.infer_json("trivial", {"input_0": [1]})]),
            "LitServe": (theirs, [wire.peer_json("/predict", [1])]),
        }
        for server, requests in forms.values():
            processes.warm_up(server, requests[0])
        seconds = settings.of(2.5, 0.7)
        sides = {
            f"{name}, {count}": partial(_served, server, requests, None, seconds, count)
            for (name, (server, requests)), count in itertools.product(forms.items(), CONNECTIONS)
        }
        found = interleaved(sides, settings.of(3, 1))
    middle = {name: float(np.median(values)) for name, values in found.items()}
    best = {
        side: max((name for name in middle if (name.startswith("LitServe")) == side), key=middle.__getitem__)
        for side in (True, False)
    }
    yield compared(
        "trivial over HTTP", "closed loop", "requests/s", found[best[False]], found[best[True]], better="higher",
        baseline=best[True], target=8.0, seen=middle, ours_by=best[False],
    )  # fmt: skip


def lstm(settings: Settings) -> Iterator[Row]:
    """LSTM 1024 bfloat16 over HTTP: p90 at 20/s and 100/s, and peak, over LitServe's better of padded and packed."""
    python = _litserve(settings)
    work = make_workload("lstm", data=[settings.data / "europarl_deen" / "raw5k.en"], count=2000)
    sentences = [[int(word) % WORDS for word in request] for request in work.requests]
    with contextlib.ExitStack() as stack:
        servers: dict[str, tuple[processes.Server, Sequence[bytes]]] = {
            "ours": (
                stack.enter_context(processes.batchmaker(LSTM)),
                [wire.infer_binary("lstm", {"input_0": sentence}) for sentence in sentences],
            )
        }
        for form in ("padded", "packed"):
            server = stack.enter_context(processes.peer(python, "litserve_app.py", f"lstm-{form}"))
            servers[form] = server, [wire.peer_json("/predict", sentence) for sentence in sentences]
        for server, requests in servers.values():
            processes.warm_up(server, requests[0])
        for rate, (target, seconds) in RATES.items():
            seconds = settings.of(seconds, 1.5)
            figure = f"p90 at {rate:.0f}/s"
            yield _row(settings, servers, figure, "ms", partial(_p90, rate=rate, seconds=seconds), target)
        served = partial(_served, rate=SATURATING, seconds=settings.of(4.0, 1.5), connections=LSTM_CONNECTIONS)
        yield _row(settings, servers, "peak", "requests/s", served, 4.0)


def _row(settings: Settings, servers: Servers, figure: str, unit: str, measure: Any, target: float) -> Row:
    """Return a figure beside LitServe's better form."""
    sides = {name: partial(measure, *served) for name, served in servers.items()}
    found = interleaved(sides, settings.of(2, 1))
    middle = {name: float(np.median(values)) for name, values in found.items()}
    say(f"  {figure}: {middle}")
    lower = unit == "ms"
    best = (min if lower else max)((name for name in servers if name != "ours"), key=middle.__getitem__)
    return compared(
        "LSTM 1024 bfloat16 over HTTP", figure, unit, found["ours"], found[best], better="lower" if lower else "higher",
        baseline=f"LitServe, {best}", target=target, seen=middle,
    )  # fmt: skip


def _served(
    server: processes.Server, requests: Sequence[bytes], rate: float | None, seconds: float, connections: int
) -> float:
    plan = Plan(server.host, server.port, list(requests), rate, seconds, connections)
    return float(figures(offer(plan), seconds)["served_rps"])


def _p90(server: processes.Server, requests: Sequence[bytes], rate: float, seconds: float) -> float:
    plan = Plan(server.host, server.port, list(requests), rate, seconds, LSTM_CONNECTIONS)
    found = figures(offer(plan), seconds)["p90_ms"]
    assert found is not None, "the server answered nothing"
    return float(found)


def _litserve(settings: Settings) -> Path:
    if settings.litserve is None:
        raise NotRunError("needs --litserve-python PYTHON, the interpreter of an environment with litserve and torch")
    try:
        done = subprocess.run(
            [settings.litserve, "-c", "import litserve, numpy, torch"], capture_output=True, text=True
        )
    except OSError as error:
        raise NotRunError(f"{settings.litserve} cannot be run ({error})") from None
    if done.returncode != 0:
        raise NotRunError(f"LitServe does not run there: {done.stderr.strip().splitlines()[-1:]}")
    return settings.litserve
