"""Lines of models that decide by computed values: an early exit, experts, a transducer; over one by one and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import batchmaker as bm
from engine_cost.hand_server import Batches, Run, batched_rate, in_batches
from engine_cost.measuring import Row, Settings, at_rate, best_of, compared, interleaved, per_second, say

WIDTH: Final = 256
CLASSES: Final = 10
LAYERS: Final = 6
EXPERTS: Final = 4
SYMBOLS: Final = 60
MAXIMA: Final = (64, 256)
MOST: Final = max(MAXIMA)
BLANK: Final = 0

Alone = Callable[[Any], Any]


# --- early exit ------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """h -> h, label, whether it is sure enough."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.head.weight *= 2.5
            self.down.weight *= 3

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = h + self.down(nn.functional.gelu(self.up(self.norm(h))))
        sure, label = self.head(h).softmax(-1).max(-1)
        return h, label, sure > 0.6


class EarlyExit(bm.Model):
    """A request leaves after the first of its layers that is sure."""

    def __init__(self) -> None:
        self.blocks = [bm.Cell(Layer(), max_batch=MOST, priority=k) for k in range(LAYERS)]
        self.example_request = torch.zeros(WIDTH)

    def unfold(self, h: Any) -> Any:
        return self.after(0, h)

    def after(self, number: int, h: Any) -> Any:
        """Return the label of the first layer from `number` on that is sure."""
        h, label, sure = self.blocks[number](h)
        if number == LAYERS - 1:
            return label
        return bm.cond(sure, lambda: label, lambda: self.after(number + 1, h))

    def alone(self, h: Tensor) -> int:
        h = h[None]
        for cell in self.blocks:
            h, label, sure = cell.module(h)
            if sure[0]:
                break
        return int(label[0])

    def by_hand(self, requests: Sequence[Tensor]) -> list[int]:
        h, live, found = torch.stack(list(requests)), torch.arange(len(requests)), torch.zeros(len(requests)).long()
        for cell in self.blocks:
            h, label, sure = cell.module(h)
            found[live] = label
            h, live = h[~sure], live[~sure]
            if not len(live):
                break
        return found.tolist()


# --- experts ---------------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """x -> the expert for it."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(x).argmax(-1)


class Expert(nn.Module):
    """x -> x."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Experts(bm.Model):
    """Three layers; in each a request goes to one of four experts."""

    def __init__(self) -> None:
        self.routers = [bm.Cell(Router(), max_batch=MOST) for _ in range(3)]
        self.experts = [[bm.Cell(Expert(), max_batch=MOST) for _ in range(EXPERTS)] for _ in range(3)]
        self.example_request = torch.zeros(WIDTH)

    def unfold(self, x: Any) -> Any:
        for router, experts in zip(self.routers, self.experts, strict=True):
            x = bm.switch(router(x), [lambda cell=cell, x=x: cell(x) for cell in experts])
        return x

    def alone(self, x: Tensor) -> Tensor:
        x = x[None]
        for router, experts in zip(self.routers, self.experts, strict=True):
            x = experts[int(router.module(x)[0])].module(x)
        return x[0]

    def by_hand(self, requests: Sequence[Tensor]) -> list[Tensor]:
        x = torch.stack(list(requests))
        for router, experts in zip(self.routers, self.experts, strict=True):
            chosen, following = router.module(x), torch.empty_like(x)
            for number, cell in enumerate(experts):
                mine = chosen == number
                if mine.any():
                    following[mine] = cell.module(x[mine])
            x = following
        return list(x)


# --- a transducer ----------------------------------------------------------------------------------------------------


class Encode(nn.Module):
    """One step of the encoder: frame, h, c -> h, c."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(80, WIDTH)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.cell(x, (h, c))


class Predict(nn.Module):
    """One step of the predictor: symbol, h, c -> h, c."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(SYMBOLS, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, symbol: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.cell(self.embed(symbol), (h, c))


class Join(nn.Module):
    """encoded, g, t, symbol, length -> t, symbol, whether it goes on, whether it emits."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, SYMBOLS)
        with torch.no_grad():
            self.out.weight *= 3
            self.out.bias[BLANK] = 1.5

    def forward(
        self, encoded: Tensor, g: Tensor, t: Tensor, symbol: Tensor, length: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = self.out(torch.tanh(self.left(encoded) + self.right(g))).argmax(-1)
        emits = found != BLANK
        t = t + (~emits).long()
        return t, torch.where(emits, found, symbol), t < length, emits


class Place(NamedTuple):
    """Where a transducer is."""

    t: Any
    symbol: Any
    h: Any
    c: Any
    going: Any
    emits: Any


class Transducer(bm.Model):
    """RNN-T, greedy: an LSTM over frames, a predictor over symbols, and a joint network that decides."""

    def __init__(self) -> None:
        self.encode = bm.Cell(Encode(), max_batch=MOST)
        self.predict = bm.Cell(Predict(), max_batch=MOST, priority=1)
        self.join = bm.Cell(Join(), max_batch=MOST, priority=1)
        self.example_request = torch.zeros(3, 80)
        self._whole = nn.LSTM(80, WIDTH)  # the encoder as those who write it by hand run it
        for name, weights in self.encode.module.cell.named_parameters():
            getattr(self._whole, f"{name}_l0").data = weights.data

    def unfold(self, frames: Any) -> Any:
        encoded, length = self.encode.run(frames)[0].steps, len(frames)

        def body(at: Place) -> Place:
            t, symbol, going, emits = self.join(encoded.at(at.t), at.h, at.t, at.symbol, length)
            h, c = bm.cond(emits, lambda: self.predict(symbol, at.h, at.c), lambda: (at.h, at.c))
            return Place(t, symbol, h, c, going, emits)

        h, c = self.predict.run([BLANK])
        start = Place(0, BLANK, h, c, True, False)
        last = bm.while_loop(lambda s: s.going, body, start, max_steps=5 * length, collect=lambda s: s.emits)
        return last.symbol.steps

    def alone(self, frames: Tensor) -> list[int]:
        """One utterance: what of the joint network depends on the encoder alone is computed for all frames at once."""
        join, predict, length = self.join.module, self.predict.module, len(frames)
        left = join.left(self._whole(frames)[0])
        state = torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)
        h, c = predict(torch.tensor([BLANK]), *state)
        right, t, written = join.right(h), 0, list[int]()
        for _ in range(5 * length):
            found = join.out(torch.tanh(left[t : t + 1] + right)).argmax(-1)
            symbol = int(found)
            if symbol == BLANK:
                t += 1
                if t == length:
                    break
            else:
                written.append(symbol)
                h, c = predict(found, h, c)
                right = join.right(h)
        return written

    def by_hand(self, requests: Sequence[Tensor]) -> list[list[int]]:
        """All utterances side by side; who is at its end is taken out, and the predictor runs for those that emit."""
        count, lengths = len(requests), torch.tensor([len(x) for x in requests])
        join = self.join.module
        left = join.left(self._whole(nn.utils.rnn.pad_sequence(list(requests)))[0])
        zeros = torch.zeros(count, WIDTH)
        h, c = self.predict.module(torch.zeros(count).long(), zeros, zeros)
        t, symbol, steps = torch.zeros(count).long(), torch.zeros(count).long(), torch.zeros(count).long()
        live, written, right = torch.arange(count), [list[int]() for _ in requests], join.right(h)
        while len(live):
            found = join.out(torch.tanh(left[t, live] + right)).argmax(-1)
            emits = found != BLANK
            t, symbol = t + (~emits).long(), torch.where(emits, found, symbol)
            going = t < lengths[live]
            which = emits.nonzero()[:, 0]
            if len(which):
                h[which], c[which] = self.predict.module(symbol[which], h[which], c[which])
                right[which] = join.right(h[which])
                for row, word in zip(live[which].tolist(), symbol[which].tolist(), strict=True):
                    written[row].append(word)
            steps += 1
            going &= steps < 5 * lengths[live]
            if not going.all():
                t, symbol, h, c, live, steps = t[going], symbol[going], h[going], c[going], live[going], steps[going]
                right = right[going]
        return written


# --- the lines -------------------------------------------------------------------------------------------------------


def exits(settings: Settings) -> Iterator[Row]:
    """An early exit after any of six layers of 256: over one by one, and over batches by hand."""
    requests = list(torch.randn(settings.of(500, 60), WIDTH, generator=torch.Generator().manual_seed(1)))
    yield from over_alone_and_by_hand(settings, "early exit", sides(EarlyExit), requests, Targets(5.0, 0.8, 1.5))


def experts(settings: Settings) -> Iterator[Row]:
    """Three layers of four experts of 256, one for each request: over one by one, and over batches by hand."""
    requests = list(torch.randn(settings.of(500, 60), WIDTH, generator=torch.Generator().manual_seed(1)))
    yield from over_alone_and_by_hand(settings, "experts", sides(Experts), requests, Targets(5.0, 0.8, 1.5))


def transducer(settings: Settings) -> Iterator[Row]:
    """RNN-T greedy, of 256, utterances of 20 to 80 frames: over one by one, and over batches by hand."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(20, 81, settings.of(500, 40)).tolist()
    requests = [torch.from_numpy(draw.standard_normal((length, 80), np.float32)) for length in lengths]
    yield from over_alone_and_by_hand(settings, "RNN-T", sides(Transducer), requests, Targets(4.0, 0.8, 1.3))


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


def sides(kind: Callable[[], Any]) -> Sides:
    """Return the sides of a model that has the methods `alone` and `by_hand`, with the same weights each time."""
    torch.manual_seed(0)
    model = kind()
    return Sides(model, model.alone, model.by_hand)


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
        say(f"  {rate:.0f} requests/s")
        server = Batches(by_hand, max(maxima))
        try:
            late = interleaved(
                {
                    "ours": at_rate(engine.submit, requests, rate, seconds),
                    "theirs": at_rate(server.submit, requests, rate, seconds),
                },
                settings.of(5, 1),
            )
        finally:
            server.close()
        yield compared(
            work, "p50 at half load", "ms", late["ours"][:, 0], late["theirs"][:, 0], better="lower",
            baseline=f"batches by hand, {max(maxima)}", target=targets.p50, rate=rate,
        )  # fmt: skip


def _check(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Raise AssertionError unless the answers are the same, but for a request in a hundred: scores may be equal."""
    alike = [
        np.shape(np.asarray(a)) == np.shape(np.asarray(b)) and np.allclose(np.asarray(a), np.asarray(b), atol=1e-4)
        for a, b in zip(ours, theirs, strict=True)
    ]
    assert np.mean(alike) >= 0.99, f"{len(alike) - sum(alike)} of {len(alike)} requests differ"
