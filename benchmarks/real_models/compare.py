"""One case measured on all sides: requests per CPU second with everything waiting, then latency under a load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import numpy as np

import batchmaker as bm
from engine_cost.hand_server import Batches, Run
from engine_cost.measuring import at_rate, best_of, interleaved, offered, say
from real_models.case import Case, Data

OURS, OWN, HAND = "batchmaker", "package", "by hand"
LOAD: Final = 0.5
"""Of the rate of whoever is the fastest: that many requests come per second, by the clock."""
SAME: Final = 0.99
"""Share of answers by hand that must be the engine's: where two scores are equal but for rounding either may win."""
ROOM: Final = 1.2
"""A side with less room than this over the load is not measured under it: what waits would grow without end."""


def compared(case: Case, data: Data) -> dict[str, Any]:
    """Return all figures of a case. AssertionError where batches by hand give other answers than the engine."""
    encoded = [case.encode(asked) for asked in case.asked]
    with bm.Engine(case.model, threads=1) as engine:
        results = engine.map(encoded, progress=False)
        answers = decoded(case, results, case.asked)
        agree = agreement(case, answers, encoded)
        peer = None if case.peer is None else case.peer(case.asked)
        found = {"about": case.about, "package": case.package, "num_requests": len(encoded), "agreement": agree}
        found |= throughput(case, data, engine)
        found["target"] = case.target
        best = max(found["per_s"].values())
        if peer is not None:
            found["per_s"][case.peer_name] = peer.rate
            found["peer"] = {"name": case.peer_name, "setting": peer.setting, "seen": dict(peer.seen)}
            agree[case.peer_name] = share(case, answers, peer.answers)
        against = found["per_s"][case.peer_name] if peer is not None else best_other(found["per_s"])
        found["ratio"] = found["per_s"][OURS] / against
        say(f"  requests per CPU second: {shown(found['per_s'])}; ratio {found['ratio']:.3g}, asked {case.target:g}")
        loads = [LOAD * best]
        if not keeps_up(found["per_s"][OURS], loads[0]):
            loads.append(LOAD * found["per_s"][OURS])
        found["loads"] = [latency(case, data, engine, load, found) for load in loads]
        if case.live is not None:
            found["live"] = asdict(case.live(data, engine))
            say(f"  live streams a core: {shown(found['live']['per_core'])}")
        return found


def keeps_up(per_s: float, load: float) -> bool:
    """Whether a side that computes so many requests per second can take this load for long."""
    return per_s > ROOM * load


def best_other(rates: Mapping[str, float]) -> float:
    """Return the rate of the faster of batches by hand and the package."""
    return max(rate for name, rate in rates.items() if name != OURS)


def shown(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate:,.4g}" for name, rate in rates.items())


# --- answers ----------------------------------------------------------------------------------------------------------


def decoded(case: Case, results: Sequence[Any], asked: Sequence[Any]) -> list[Any]:
    """Return what clients get of results."""
    return [case.decode(result, one) for result, one in zip(results, asked, strict=True)]


def agreement(case: Case, answers: Sequence[Any], encoded: Sequence[Any]) -> dict[str, float]:
    """Return the share of answers that are the package's, and those by hand; AssertionError where these are others."""
    count = min(case.own_count, len(answers))
    found = {OWN: share(case, answers[:count], [case.own(asked) for asked in case.asked[:count]])}
    for name, run in case.by_hand.items():
        theirs = [result for at in range(0, len(encoded), 64) for result in run(encoded[at : at + 64])]
        alike = found[f"{HAND}, {name}"] = share(case, answers, decoded(case, theirs, case.asked))
        if alike < SAME:
            raise AssertionError(f"{name} by hand gives other answers than the engine for {1 - alike:.1%} of requests")
    return found


def share(case: Case, ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    return float(np.mean([case.same(a, b) for a, b in zip(ours, theirs, strict=True)]))


# --- everything waits -------------------------------------------------------------------------------------------------


def cpu_rate(call: Callable[[], Any], count: int) -> float:
    """Return requests per second of CPU time, all threads together, of a call that answers `count` of them."""
    begin_s = time.process_time()
    call()
    return count / (time.process_time() - begin_s)


def throughput(case: Case, data: Data, engine: bm.Engine) -> dict[str, Any]:
    """Return requests per CPU second of every side, and what was seen of the ways by hand."""
    asked, count = case.asked, min(case.own_count, len(case.asked))

    def ours() -> None:
        decoded(case, engine.map([case.encode(one) for one in asked], progress=False), asked)

    sides = {
        f"{name}, {most}": partial(cpu_rate, partial(by_hand, case, run, most), len(asked))
        for name, run in case.by_hand.items()
        for most in case.sizes
    }
    best, seen = best_of(sides, data.of(3, 1))
    measured = interleaved(
        {
            OURS: lambda: cpu_rate(ours, len(asked)),
            HAND: sides[best],
            OWN: lambda: cpu_rate(lambda: [case.own(one) for one in asked[:count]], count),
        },
        data.of(7, 1),
    )
    rates = {name: float(np.median(values)) for name, values in measured.items()}
    return {"per_s": rates, "by_hand": {"best": best, "seen": seen}}


def by_hand(case: Case, run: Run, most: int) -> None:
    """Answer all requests in sorted batches, from what was asked to the answers."""
    encoded = [case.encode(one) for one in case.asked]
    order = sorted(range(len(encoded)), key=lambda number: case.length(encoded[number]))
    for at in range(0, len(order), most):
        numbers = order[at : at + most]
        results = run([encoded[number] for number in numbers])
        decoded(case, results, [case.asked[number] for number in numbers])


# --- under a load -----------------------------------------------------------------------------------------------------


def latency(case: Case, data: Data, engine: bm.Engine, load: float, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return p50 and p90 in ms under a Poisson load, by the clock, until the network's result is there.

    Of each side that can keep up, by its rate with everything waiting; the package answers one after the other.
    """
    per_s, seen_per_s = found["per_s"], found["by_hand"]["seen"]
    seconds = data.of(3, 1)
    encoded = [case.encode(asked) for asked in case.asked]
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(contextlib.closing(Batches(partial(in_order, case, run), max(case.sizes))))
            for name, run in case.by_hand.items()
            if keeps_up(max(seen_per_s[f"{name}, {most}"] for most in case.sizes), load)
        }
        alone = stack.enter_context(contextlib.closing(Batches(lambda asked: [case.own(one) for one in asked], 1)))
        seen = {
            name: 1e3 * float(np.median(offered(server.submit, encoded, load, seconds, 0)))
            for name, server in servers.items()
        }
        best = min(seen, key=seen.__getitem__, default=None)
        sides = {
            OURS: at_rate(engine.submit, encoded, load, seconds),
            HAND: at_rate(servers[best].submit, encoded, load, seconds) if best else None,
            OWN: at_rate(alone.submit, case.asked, load, seconds),
        }
        able = {name: side for name, side in sides.items() if side is not None and keeps_up(per_s[name], load)}
        times = interleaved(able, data.of(5, 1))
    both = OURS in times and HAND in times
    ratio = float(np.median(times[OURS][:, 0] / times[HAND][:, 0])) if both else None
    medians = {name: np.median(values, 0).tolist() for name, values in times.items()}
    say(f"  at {load:.0f}/s: " + ", ".join(f"{name} p50 {p50:.3g} ms" for name, (p50, _) in medians.items()))
    latencies = {name: {"p50": p50, "p90": p90} for name, (p50, p90) in medians.items()}
    return {"per_s": load, "latency_ms": latencies, "ratio": ratio, "by_hand": {"best": best, "seen": seen}}


def in_order(case: Case, run: Run, requests: Sequence[Any]) -> list[Any]:
    """Run a batch longest first, as packing wants it, and put the results back in order."""
    order = sorted(range(len(requests)), key=lambda number: -case.length(requests[number]))
    results: list[Any] = [None] * len(requests)
    for number, result in zip(order, run([requests[number] for number in order]), strict=True):
        results[number] = result
    return results
