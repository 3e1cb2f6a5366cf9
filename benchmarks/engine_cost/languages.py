"""Lines of recurrent language models, RWKV and Mamba, greedy and drawn: over one by one and over batches by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import batchmaker as bm
from batchmaker.lab import zoo
from engine_cost.hand_server import at_half_load, batched_rate, in_batches
from engine_cost.measuring import Row, Settings, best_of, compared, interleaved, per_second, times_ms

SIZES: Final = {"vocabulary_size": 1000, "hidden": 256, "layers": 5, "eos": 0}
MAXIMA: Final = (64, 256)
PROMPTS: Final = (10, 31)
TEXTS: Final = (10, 61)
SAME: Final = 0.97
"""Share of texts that must be the same: where two scores are equal but for rounding, all that follows differs."""
TOP_P: Final = {"temperature": 1.0, "top_p": 0.9}

Request = dict[str, Any]


def rwkv(settings: Settings) -> Iterator[Row]:
    """RWKV-4 of 5 x 256, prompts of 10 to 30, 10 to 60 tokens written, greedy and top-p with seeds."""
    yield from _lines(settings, "rwkv", "RWKV 5 x 256")


def mamba(settings: Settings) -> Iterator[Row]:
    """Mamba of 5 x 256, prompts of 10 to 30, 10 to 60 tokens written, greedy and top-p with seeds."""
    yield from _lines(settings, "mamba", "Mamba 5 x 256")


class Plain:
    """A language model without the engine: one text alone, and batches by hand."""

    def __init__(self, model: Any) -> None:
        self._network, self._end = model.write.module.network, SIZES["eos"]

    @torch.no_grad()
    def alone(self, request: Request) -> list[int]:
        """One text: all of the prompt at once, then a token after the other."""
        tokens = torch.from_numpy(request["prompt"])[None]
        x, state = self._network.through(tokens, self._network.start(1))
        x, choose, written = x[:, -1], self._chooser([request]), list[int]()
        while True:
            token = choose(self._network.head(x), len(written))
            written.append(int(token))
            if written[-1] == self._end or len(written) == request["max_tokens"]:
                return written
            x, state = self._network.through(token, state)

    @torch.no_grad()
    def batch(self, whole: bool, requests: Sequence[Request]) -> list[list[int]]:
        """Texts side by side, the longest prompt first, so that those that are still read are the first rows.

        whole: read what all prompts have of tokens layer by layer, and only the rest token by token.
        """
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number]["prompt"]))
        sorted_requests = [requests[number] for number in order]
        prompts = [torch.from_numpy(request["prompt"]) for request in sorted_requests]
        lengths, tokens = [len(prompt) for prompt in prompts], torch.nn.utils.rnn.pad_sequence(prompts)
        state, first = self._network.start(len(order)), 0
        if whole and lengths[-1] > 1:
            first = lengths[-1] - 1
            state = list(self._network.through(tokens[:first].T, state)[1])
        for step in range(first, lengths[0] - 1):
            count = sum(length - 1 > step for length in lengths)
            if count == len(order):
                state = list(self._network.through(tokens[step], state)[1])
                continue
            after = self._network.through(tokens[step, :count], [part[:count] for part in state])[1]
            for part, new in zip(state, after, strict=True):
                part[:count] = new
        last = tokens.gather(0, torch.tensor(lengths)[None] - 1)[0]
        texts = self._write(sorted_requests, last, state)
        return [texts[row] for row in np.argsort(order).tolist()]

    def _write(self, requests: Sequence[Request], token: Tensor, state: Sequence[Tensor]) -> list[list[int]]:
        """Return the texts; rows whose text has ended leave the batch."""
        most = np.array([request["max_tokens"] for request in requests])
        live, texts, choose, step = (
            np.arange(len(requests)),
            [list[int]() for _ in requests],
            self._chooser(requests),
            0,
        )
        while True:
            x, state = self._network.through(token, state)
            token = choose(self._network.head(x), step)
            values, step = token.numpy(), step + 1
            for row, value in zip(live.tolist(), values.tolist(), strict=True):
                texts[row].append(value)
            goes_on = (values != self._end) & (most[live] > step)
            if not goes_on.all():
                if not goes_on.any():
                    return texts
                rows = torch.from_numpy(np.flatnonzero(goes_on))
                live, token, state = live[goes_on], token[rows], [part[rows] for part in state]
                choose = self._chooser([requests[row] for row in live.tolist()])

    def _chooser(self, requests: Sequence[Request]) -> Callable[[Tensor, int], Tensor]:
        """Return what chooses each row's token from its scores at a step."""
        if "seed" not in requests[0]:
            return lambda scores, step: scores.argmax(-1)
        seeds = torch.tensor([request["seed"] for request in requests])
        sampler = bm.sampling.Sampler(requests[0]["temperature"], top_p=requests[0]["top_p"])
        return lambda scores, step: sampler(scores, seeds, torch.full_like(seeds, step))


def _lines(settings: Settings, name: str, work: str) -> Iterator[Row]:
    model = zoo.make(name, **SIZES, max_batch=max(MAXIMA))
    plain, draw = Plain(model), np.random.default_rng(0)
    greedy: list[Request] = [
        {"prompt": draw.integers(1, SIZES["vocabulary_size"], draw.integers(*PROMPTS)), "max_tokens": int(most)}
        for most in draw.integers(*TEXTS, settings.of(256, 24))
    ]
    drawn = [{**request, **TOP_P, "seed": number} for number, request in enumerate(greedy)]
    with bm.Engine(model, threads=1) as engine:
        for kind, requests in (("greedy", greedy), ("top-p", drawn)):
            yield from _measured(settings, f"{work}, {kind}", engine, plain, requests)


def _measured(
    settings: Settings, work: str, engine: bm.Engine, plain: Plain, requests: Sequence[Request]
) -> Iterator[Row]:
    few = requests[: settings.of(10, 3)]
    for _ in range(2):
        ours = engine.map(requests, progress=False)
    _check(ours, plain.batch(True, requests))
    _check(ours[: len(few)], [plain.alone(request) for request in few])
    by_length = sorted(requests, key=lambda request: len(request["prompt"]))
    ways = {
        f"{form}, {most}": partial(
            batched_rate, partial(plain.batch, form == "whole prompts"), in_batches(by_length, most, None)
        )
        for form in ("steps", "whole prompts") for most in MAXIMA
    }  # fmt: skip
    best, seen = best_of(ways, settings.of(2, 1))
    found = interleaved(
        {
            "ours": lambda: per_second(partial(engine.map, requests, progress=False), len(requests)),
            "by hand": ways[best],
            "one by one": lambda: per_second(lambda: [plain.alone(request) for request in few], len(few)),
        },
        settings.of(5, 1),
    )
    for name, baseline, target in (("one by one", "one by one", 10.0), ("by hand", f"batches by hand, {best}", 1.1)):
        yield compared(
            work, f"all waiting, over {name}", "requests/s", found["ours"], found[name], better="higher",
            baseline=baseline, target=target, seen=seen if name == "by hand" else {},
        )  # fmt: skip
    alone = interleaved(
        {
            "ours": lambda: times_ms(lambda request: engine.submit(request).result(), few),
            "theirs": lambda: times_ms(plain.alone, few),
        },
        settings.of(5, 1),
    )
    yield compared(
        work, "a request alone", "ms", alone["ours"], alone["theirs"], better="lower", baseline="one by one", target=1.1
    )
    rate, seconds = 0.5 * min(float(np.median(found[name])) for name in ("ours", "by hand")), settings.of(4.0, 0.5)
    by_hand = partial(plain.batch, best.startswith("whole"))
    yield at_half_load(settings, work, engine.submit, by_hand, max(MAXIMA), requests, rate, seconds, 1.0)


def _check(ours: Sequence[Any], theirs: Sequence[list[int]]) -> None:
    """Raise AssertionError unless nearly all texts are the same."""
    alike = [a.tolist() == b for a, b in zip(ours, theirs, strict=True)]
    assert np.mean(alike) >= SAME, f"{len(alike) - sum(alike)} of {len(alike)} texts differ"
