"""Three small models for soak.py, each with what it answers in plain PyTorch, one request at a time.

Also a file for `batchmaker serve benchmarks/soak_models.py`: its `build` returns the listener.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

import batchmaker as bm

BOS, EOS, POISON, WORDS, FRAME, HIDDEN = 1, 2, 13, 40, 8, 16
REFUSED: Final = "a request that says so is refused"


class Encode(nn.Module):
    """word, h, c -> h, c."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.lstm = nn.LSTMCell(HIDDEN, HIDDEN)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.lstm(self.embed(word), (h, c))


class Decode(nn.Module):
    """word, h, c -> next word, h, c."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Encode()
        self.out = nn.Linear(HIDDEN, WORDS)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.step(word, h, c)
        return self.out(h).argmax(-1), h, c


class Translator(bm.Model):
    """Loops until the end word, or for exactly `words` words, with the same cell."""

    example_request = {"source": [3, 4]}  # noqa: RUF012

    def __init__(self) -> None:
        self.encoder = bm.Cell(Encode().eval(), max_batch=64)
        self.decoder = bm.Cell(Decode().eval(), max_batch=64, priority=1, host_outputs=(0,))

    def unfold(self, source: list[int], words: int | None = None) -> Any:
        h, c = self.encoder.run(source)
        until, most = (EOS, 2 * len(source) + 10) if words is None else (None, words)
        return self.decoder.loop((BOS, h, c), until=until, max_steps=most)[0].steps

    @torch.no_grad()
    def alone(self, source: list[int], words: int | None = None) -> Tensor:
        h = c = torch.zeros(1, HIDDEN)
        for word in source:
            h, c = self.encoder.module(torch.tensor([word]), h, c)
        word, written = torch.tensor([BOS]), []
        for _ in range(2 * len(source) + 10 if words is None else words):
            word, h, c = self.decoder.module(word, h, c)
            written.append(int(word))
            if words is None and written[-1] == EOS:
                break
        return torch.tensor(written)


class Leaf(nn.Module):
    """word -> h."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)

    def forward(self, word: Tensor) -> Tensor:
        return self.embed(word).tanh()


class Merge(nn.Module):
    """left, right -> h, score."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2 * HIDDEN, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        h = self.both(torch.cat([left, right], -1)).tanh()
        return h, self.score(h)[:, 0]


class Guard(nn.Module):
    """word, h -> h. Fails for a batch in which any word is the poison, as code that looks at values does."""

    def forward(self, word: Tensor, h: Tensor) -> Tensor:
        if bool((word == POISON).any()):
            raise ValueError("poison in the batch")
        return h.clone()


class Parser(bm.Model):
    """A nested tree; then its root is merged with itself for as long as the score says so, which is waited for."""

    example_request = {"tree": (3, (4, 5))}  # noqa: RUF012

    def __init__(self) -> None:
        self.leaf = bm.Cell(Leaf().eval(), max_batch=64)
        self.merge = bm.Cell(Merge().eval(), max_batch=64, priority=1)
        self.guard = bm.Cell(Guard().eval(), max_batch=64, priority=2)

    def unfold(self, tree: Any, word: int = 0) -> Iterator[Any]:
        if word < 0:
            raise ValueError(REFUSED)
        h = self._state(tree)
        for _ in range(4):
            h, score = self.merge(h, h)
            if (yield score) < 0.0:
                break
        return self.guard(word, h)

    def _state(self, tree: Any) -> Any:
        if isinstance(tree, int):
            return self.leaf(tree)
        left, right = tree
        return self.merge(self._state(left), self._state(right))[0]

    @torch.no_grad()
    def alone(self, tree: Any, word: int = 0) -> Tensor:
        def state(part: Any) -> Tensor:
            if isinstance(part, int):
                return self.leaf.module(torch.tensor([part]))
            return self.merge.module(state(part[0]), state(part[1]))[0]

        h = state(tree)
        for _ in range(4):
            h, score = self.merge.module(h, h)
            if float(score) < 0.0:
                break
        return h[0]


class Hear(nn.Module):
    """frame, h -> h."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(FRAME, HIDDEN)

    def forward(self, frame: Tensor, h: Tensor) -> Tensor:
        return self.gru(frame, h)


class Listener(bm.Model):
    """Frames in, the state after each out: whole, or in chunks."""

    example_request = torch.zeros(3, FRAME)
    example_chunks = (torch.zeros(2, FRAME), torch.zeros(3, FRAME))

    def __init__(self) -> None:
        self.hear = bm.Cell(Hear().eval(), max_batch=64)

    def unfold(self, frames: Any) -> Any:
        return self.unfold_chunk(frames, None)[0]

    def unfold_chunk(self, frames: Any, state: Any) -> Any:
        h = self.hear.run(frames, state)
        return h.steps, h

    def alone(self, frames: Any) -> Tensor:
        return self.after(frames, torch.zeros(1, HIDDEN))

    @torch.no_grad()
    def after(self, frames: Any, h: Tensor) -> Tensor:
        """Return the states after each frame, the first of which follows `h`: [num_frames, HIDDEN]."""
        states = []
        for frame in torch.as_tensor(frames):
            h = self.hear.module(frame[None], h)
            states.append(h[0])
        return torch.stack(states)


MODELS: Final[dict[str, type[Any]]] = {"translator": Translator, "parser": Parser, "listener": Listener}


def models(seed: int = 0) -> dict[str, Any]:
    """Return the three models by name, with the weights of this seed."""
    torch.manual_seed(seed)
    return {name: kind() for name, kind in MODELS.items()}


def build() -> Listener:
    """Return the listener, for `batchmaker serve`."""
    return models()["listener"]


@dataclass(frozen=True, slots=True)
class Case:
    """A request and what it is answered alone; `answer` is None where it has to fail, with the error's class name."""

    model: str
    request: Any
    answer: Tensor | None
    error: str = ""


def cases(made: dict[str, Any], count: int, seed: int) -> list[Case]:
    """Return requests of all kinds, one in twelve of them wrong, with the answers of plain PyTorch."""
    rng = np.random.default_rng(seed)
    kinds: list[Callable[[], Case]] = [
        lambda: _right(made, "translator", source=_words(rng, 30)),
        lambda: _right(made, "translator", source=_words(rng, 6), words=int(rng.integers(1, 40))),
        lambda: _right(made, "parser", tree=_tree(rng, int(rng.integers(1, 12)))),
        lambda: _right(made, "listener", frames=_frames(rng, int(rng.integers(1, 20)))),
    ]
    wrong: list[Callable[[], Case]] = [
        lambda: Case("translator", {"source": [3, WORDS + 5]}, None, "InvalidRequestError"),
        lambda: Case("translator", {"sauce": [3, 4]}, None, "InvalidRequestError"),
        lambda: Case("parser", {"tree": (3, 4), "word": -1}, None, "CellError InvalidRequestError RequestError"),
        lambda: Case("parser", {"tree": (3, 4), "word": POISON}, None, "CellError"),
        lambda: Case("listener", torch.zeros(3, FRAME + 1), None, "RequestShapeError"),
    ]
    return [wrong[int(rng.integers(len(wrong)))]() if rng.integers(12) == 0 else kinds[k % len(kinds)]()
            for k in range(count)]  # fmt: skip


def _right(made: dict[str, Any], name: str, **parts: Any) -> Case:
    request = parts["frames"] if name == "listener" else parts
    return Case(name, request, made[name].alone(**parts))


def _words(rng: np.random.Generator, most: int) -> list[int]:
    return [int(word) for word in rng.integers(3, WORDS, rng.integers(1, most))]


def _frames(rng: np.random.Generator, count: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal((count, FRAME)).astype(np.float32))


def _tree(rng: np.random.Generator, num_leaves: int) -> Any:
    if num_leaves == 1:
        return int(rng.integers(3, WORDS))
    left = int(rng.integers(1, num_leaves))
    return (_tree(rng, left), _tree(rng, num_leaves - left))
