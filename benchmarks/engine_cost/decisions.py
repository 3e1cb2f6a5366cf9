"""Lines of models in which requests differ in what is computed: early exit, experts, transducer, numbers of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.lab import zoo
from batchmaker.lab.zoo.diffusion import plan
from batchmaker.lab.zoo.rnnt import BLANK
from engine_cost.hand_server import Run, at_half_load, batched_rate, in_batches
from engine_cost.measuring import Row, Settings, best_of, compared, interleaved, per_second

WIDTH: Final = 256
SYMBOLS: Final = 60
FEWEST_STEPS, MOST_STEPS = 10, 50
MAXIMA: Final = (64, 256)
MOST: Final = max(MAXIMA)

Alone = Callable[[Any], Any]


# --- early exit ------------------------------------------------------------------------------------------------------


def exit_alone(model: Any, x: Tensor) -> int:
    x = x[None]
    for cell in model.blocks:
        x, label, is_sure = cell.module(x)
        if is_sure[0]:
            break
    return int(label[0])


def exit_by_hand(model: Any, requests: Sequence[Tensor]) -> list[int]:
    x, live, found = torch.stack(list(requests)), torch.arange(len(requests)), torch.zeros(len(requests)).long()
    for cell in model.blocks:
        x, label, is_sure = cell.module(x)
        found[live] = label
        x, live = x[~is_sure], live[~is_sure]
        if not len(live):
            break
    return found.tolist()


# --- experts ---------------------------------------------------------------------------------------------------------


def experts_alone(model: Any, x: Tensor) -> Tensor:
    x = x[None]
    for router, experts in zip(model.routers, model.experts, strict=True):
        x = experts[int(router.module(x)[0])].module(x)
    return x[0]


def experts_by_hand(model: Any, requests: Sequence[Tensor]) -> list[Tensor]:
    x = torch.stack(list(requests))
    for router, experts in zip(model.routers, model.experts, strict=True):
        chosen, following = router.module(x), torch.empty_like(x)
        for number, cell in enumerate(experts):
            mine = chosen == number
            if mine.any():
                following[mine] = cell.module(x[mine])
        x = following
    return list(x)


# --- a transducer ----------------------------------------------------------------------------------------------------


def transducer_alone(model: Any, frames: Tensor) -> list[int]:
    """One utterance: what of the joint network depends on the encoder alone is computed for all frames at once."""
    network, predict, scores = model._network, model.predictor.module, model.joint.module.scores
    heard = network.listen(network.encoder(frames)[0])
    state = torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)
    g, *state = predict(torch.tensor([BLANK]), *state)
    written = list[int]()
    for t in range(len(frames)):
        for _ in range(model.max_symbols):
            found = scores(torch.tanh(heard[t : t + 1] + g)).argmax(-1)
            symbol = int(found)
            if symbol == BLANK:
                break
            written.append(symbol)
            g, *state = predict(found, *state)
    return written


def transducer_by_hand(model: Any, requests: Sequence[Tensor]) -> list[list[int]]:
    """All utterances side by side; who is at its end is taken out, and the predictor runs for those that emit."""
    count, lengths = len(requests), torch.tensor([len(x) for x in requests])
    network, predict, scores = model._network, model.predictor.module, model.joint.module.scores
    heard = network.listen(network.encoder(nn.utils.rnn.pad_sequence(list(requests)))[0])
    zeros = torch.zeros(count, WIDTH)
    g, h, c = predict(torch.full((count,), BLANK), zeros, zeros)
    t, k, live = torch.zeros(count).long(), torch.zeros(count).long(), torch.arange(count)
    written = [list[int]() for _ in requests]
    while len(live):
        symbol = scores(torch.tanh(heard[t, live] + g)).argmax(-1)
        emits = symbol != BLANK
        k = torch.where(emits, k + 1, model.max_symbols)
        is_last = k == model.max_symbols
        t, k = t + is_last, k.masked_fill(is_last, 0)
        which = emits.nonzero()[:, 0]
        if len(which):
            g[which], h[which], c[which] = predict(symbol[which], h[which], c[which])
            for row, one in zip(live[which].tolist(), symbol[which].tolist(), strict=True):
                written[row].append(one)
        going = t < lengths
        if not going.all():
            t, k, g, h, c, live, lengths = (part[going] for part in (t, k, g, h, c, live, lengths))
    return written


# --- diffusion -------------------------------------------------------------------------------------------------------


class DiffusionByHand:
    """What the network's blocks get of each time is computed once, for all requests."""

    def __init__(self, model: Any) -> None:
        self._step, self._times = model.step.module, model.times
        with torch.no_grad():
            self._conditioning = self._step.conditioning(torch.arange(model.times))

    def alone(self, request: Any) -> Tensor:
        """One request, step by step."""
        times, turns = plan(request["steps"], self._times)
        x = request["noise"][None]
        for time, turn in zip(times.tolist(), torch.from_numpy(turns), strict=True):
            x = self._step.turned(self._conditioning[time : time + 1], turn[None], x)
        return x[0]

    def by_hand(self, requests: Sequence[Any]) -> list[Tensor]:
        """All requests side by side; who has done its steps is taken out."""
        plans = [plan(request["steps"], self._times) for request in requests]
        x, live = torch.stack([request["noise"] for request in requests]), torch.arange(len(requests))
        steps, made = torch.tensor([request["steps"] for request in requests]), torch.empty_like(x)
        times = nn.utils.rnn.pad_sequence([torch.from_numpy(own) for own, _ in plans])
        turns = nn.utils.rnn.pad_sequence([torch.from_numpy(own) for _, own in plans])
        for step in range(len(times)):
            x = self._step.turned(self._conditioning[times[step]], turns[step], x)
            going = steps > step + 1
            if not going.all():
                made[live[~going]] = x[~going]
                x, live, steps, times, turns = x[going], live[going], steps[going], times[:, going], turns[:, going]
        return list(made)


# --- the lines -------------------------------------------------------------------------------------------------------


def exits(settings: Settings) -> Iterator[Row]:
    """An early exit after any of six layers of 256: over one by one, and over batches by hand."""
    requests = list(torch.randn(settings.of(500, 60), WIDTH, generator=torch.Generator().manual_seed(1)))
    model = zoo.make("early-exit", width=WIDTH, max_batch=MOST)
    compare = sides(model, exit_alone, exit_by_hand)
    yield from over_alone_and_by_hand(settings, "early exit", compare, requests, Targets(5.0, 0.8, 1.5))


def experts(settings: Settings) -> Iterator[Row]:
    """Three layers of four experts of 256, one for each request: over one by one, and over batches by hand."""
    requests = list(torch.randn(settings.of(500, 60), WIDTH, generator=torch.Generator().manual_seed(1)))
    model = zoo.make("experts", width=WIDTH, gated=False, max_batch=MOST)
    compare = sides(model, experts_alone, experts_by_hand)
    yield from over_alone_and_by_hand(settings, "experts", compare, requests, Targets(5.0, 0.8, 1.5))


def transducer(settings: Settings) -> Iterator[Row]:
    """RNN-T greedy, of 256, utterances of 20 to 80 frames: over one by one, and over batches by hand."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(20, 81, settings.of(500, 40)).tolist()
    requests = [torch.from_numpy(draw.standard_normal((length, 80), np.float32)) for length in lengths]
    model = zoo.make("rnnt", hidden=WIDTH, layers=1, vocabulary_size=SYMBOLS, max_batch=MOST)
    compare = sides(model, transducer_alone, transducer_by_hand)
    yield from over_alone_and_by_hand(settings, "RNN-T", compare, requests, Targets(4.0, 0.8, 1.3))


def diffusion(settings: Settings) -> Iterator[Row]:
    """A denoising network of 256, 10 to 50 steps as each request asks: over one by one, and over batches by hand."""
    draw, noise = np.random.default_rng(0), torch.Generator().manual_seed(1)
    steps = draw.integers(FEWEST_STEPS, MOST_STEPS + 1, settings.of(500, 40)).tolist()
    requests = [{"noise": torch.randn(WIDTH, generator=noise), "steps": count} for count in steps]
    model = zoo.make("diffusion", width=WIDTH, max_batch=MOST)
    hand = DiffusionByHand(model)
    yield from over_alone_and_by_hand(
        settings, "diffusion", Sides(model, hand.alone, hand.by_hand), requests, Targets(1.2, 1.0, 1.2),
        length=lambda request: request["steps"],
    )  # fmt: skip


class Sides(NamedTuple):
    """What is compared: a model for the engine, one request alone, and a closed batch by hand."""

    model: bm.Model
    alone: Alone
    by_hand: Run


class Targets(NamedTuple):
    """The ratios asked for: over one by one, over batches by hand, and p50 at half load."""

    alone: float
    by_hand: float
    p50: float


def sides(model: Any, alone: Callable[[Any, Any], Any], by_hand: Callable[[Any, Sequence[Any]], list[Any]]) -> Sides:
    """Return the sides of a model whose other two are functions of it and of a request, or of several."""
    return Sides(model, partial(alone, model), partial(by_hand, model))


@torch.no_grad()
def over_alone_and_by_hand(
    settings: Settings,
    work: str,
    compare: Sides,
    requests: Sequence[Any],
    targets: Targets,
    *,
    length: Callable[[Any], int] = len,
    maxima: Sequence[int] = MAXIMA,
) -> Iterator[Row]:
    """Measure all waiting and at half load. Batches by hand have requests of about one length.

    maxima: the most requests of a batch by hand, of which the best is taken where all wait.
    """
    model, alone = compare.model, compare.alone
    by_hand: Run = torch.no_grad()(compare.by_hand)
    in_order = sorted(requests, key=length)
    ways = {
        f"batches by hand, {most}": partial(batched_rate, by_hand, in_batches(in_order, most, None)) for most in maxima
    }
    few = requests[: settings.of(100, 20)]
    with bm.Engine(model, threads=1) as engine:
        for _ in range(3):
            ours = engine.map(requests, progress=False)
        assert len({repr(answer) for answer in ours}) > 1, "all answers are alike, so nothing was decided"
        _check(ours, [result for batch in in_batches(requests, max(maxima), None) for result in by_hand(batch)])
        _check(ours[: len(few)], [alone(request) for request in few])
        best, seen = best_of(ways, settings.of(3, 1))
        found = interleaved(
            {
                "ours": lambda: per_second(partial(engine.map, requests, progress=False), len(requests)),
                "by hand": ways[best],
                "alone": lambda: per_second(lambda: [alone(request) for request in few], len(few)),
            },
            settings.of(7, 2),
        )
        both = (("alone", "one by one", targets.alone), ("by hand", best, targets.by_hand))
        for name, baseline, wanted in both:
            yield compared(
                work, f"all waiting, over {name}", "requests/s", found["ours"], found[name], better="higher",
                baseline=baseline, target=wanted, seen=seen if name == "by hand" else {},
            )  # fmt: skip
        rate, seconds = 0.5 * min(float(np.median(found[name])) for name in ("ours", "by hand")), settings.of(2.0, 0.5)
        yield at_half_load(settings, work, engine.submit, by_hand, max(maxima), requests, rate, seconds, targets.p50)


def _check(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Raise AssertionError unless the answers are the same, but for a request in a hundred: scores may be equal."""
    alike = [
        np.shape(np.asarray(a)) == np.shape(np.asarray(b)) and np.allclose(np.asarray(a), np.asarray(b), atol=1e-4)
        for a, b in zip(ours, theirs, strict=True)
    ]
    assert np.mean(alike) >= 0.99, f"{len(alike) - sum(alike)} of {len(alike)} requests differ"
