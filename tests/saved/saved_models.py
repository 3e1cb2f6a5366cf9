"""Models that the tests of saved models save: their classes must be found by import."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

import batchmaker as bm

WIDTH, VOCABULARY = 8, 20


class EmbeddedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        state: tuple[Tensor, Tensor] = self.cell(self.embedding(word), (h, c))
        return state


class Decode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = EmbeddedLSTM()
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.out.weight = self.step.embedding.weight  # tied, as translation models do

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.step(word, h, c)
        return self.out(h).argmax(-1), h, c


class Fade(nn.Module):
    """word, h -> h: what was before fades."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.keep = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.linspace(0.3, 0.9, WIDTH))

    def forward(self, word: Tensor, h: Tensor) -> Tensor:
        return self.keep * h + self.embedding(word)


class FadeWhole(nn.Module):
    """All words at once: each fades as often as there are words after it."""

    def __init__(self, step: Fade) -> None:
        super().__init__()
        self.step = step

    def forward(self, words: Tensor, number: Tensor, h: Tensor) -> Tensor:
        after = number[:, None] - 1 - torch.arange(words.shape[1])
        share = torch.where(after >= 0, 1.0, 0.0)[:, :, None] * self.step.keep ** after.clamp(min=0)[:, :, None]
        return self.step.keep ** number[:, None] * h + (share * self.step.embedding(words)).sum(1)


class FadeLooped(FadeWhole):
    """The same word by word, which cannot be traced for any number of words."""

    def forward(self, words: Tensor, number: Tensor, h: Tensor) -> Tensor:
        for step in range(words.shape[1]):
            h = torch.where((step < number)[:, None], self.step(words[:, step], h), h)
        return h


class Fading(bm.Model):
    def __init__(self, whole: type[FadeWhole] = FadeWhole, least: int | None = 3) -> None:
        step = Fade()
        self.read = bm.Cell(step, max_batch=4, whole=whole(step), whole_from=least)
        self.example_request = [1, 2, 3, 4]

    def unfold(self, request: Any) -> Any:
        return self.read.run(request)


class FadingShapes(bm.Model):
    """Its cell gets vectors of two widths."""

    def __init__(self) -> None:
        self.read = bm.Cell(Add(), max_batch=4, whole=AddWhole(), whole_from=2)
        self.example_request, self.example_requests = [[1.0, 2.0]] * 3, [[[1.0, 2.0, 3.0]] * 3]

    def unfold(self, request: Any) -> Any:
        return self.read.run(torch.tensor(request), torch.zeros(len(request[0])))


class AddWhole(nn.Module):
    def forward(self, x: Tensor, number: Tensor, h: Tensor) -> Tensor:
        return h + torch.where((torch.arange(x.shape[1]) < number[:, None])[:, :, None], x, 0.0).sum(1)


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, word: Tensor) -> tuple[Tensor, Tensor]:
        e = self.embedding(word) + self.shift
        return e.tanh(), e


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, 5 * WIDTH)

    def forward(self, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u, f, g = self.linear(torch.cat([hl, hr], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * cl + g.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c


class Sentence(bm.Model):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.lstm = bm.Cell(EmbeddedLSTM().to(dtype), batch_sizes=(1, 2, 4))
        self.example_request = [1, 2, 3]

    def unfold(self, request: Any) -> Any:
        h, _ = self.lstm.run(request)
        return h


class Tree(bm.Model):
    def __init__(self) -> None:
        self.leaf = bm.Cell(Leaf(), max_batch=4)
        self.inner = bm.Cell(Inner(), max_batch=4, priority=1)
        self.sizes = {"width": WIDTH, "name": "tree", "pair": (1, 2.5), "none": None}
        self.example_request = {"words": [3, 1, 2], "children": [(0, 1), (3, 2)]}

    def unfold(self, words: Any, children: Any) -> Any:
        h, c = self.leaf.map(words)
        h, c = self.inner.tree(children, (h, c))
        return h[-1]


class Translate(bm.Model):
    def __init__(self) -> None:
        self.encoder = bm.Cell(EmbeddedLSTM(), max_batch=4)
        self.decoder = bm.Cell(Decode(), max_batch=4, priority=1, host_outputs=(0,))
        self.start = 1
        self.max_steps = 6
        self.example_request = [4, 5]

    def unfold(self, request: Any) -> Generator[Any, Any, Any]:
        h, c = self.encoder.run(request)
        word: Any = self.start
        for _ in range(self.max_steps):
            word, h, c = self.decoder(word, h, c)
            if (yield word) == 2:
                break


class Rows(bm.Model):
    """Two cells that share one module, on vectors."""

    def __init__(self) -> None:
        module = nn.Linear(WIDTH, WIDTH)
        self.one = bm.Cell(module, max_batch=2)
        self.two = bm.Cell(module, max_batch=2)
        self.example_request = torch.ones(WIDTH)

    def unfold(self, request: Any) -> Any:
        return self.two(self.one(request))


class NeverReached(Rows):
    def unfold(self, request: Any) -> Any:
        return self.one(request)


class Unsavable(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.hook = print


class Noting(Unsavable):
    """Keeps what is not plain data in its own way."""

    def saved_state(self) -> dict[str, Any]:
        return {"hook": "print"}

    def restore(self, state: dict[str, Any]) -> None:
        self.hook = {"print": print}[state["hook"]]


class Convolve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)

    def forward(self, picture: Tensor) -> Tensor:
        return self.convolution(picture).flatten(1, 2).transpose(1, 2)


class Pictures(bm.Model):
    """One cell on pictures [1, 4, width] of any width."""

    def __init__(self) -> None:
        self.convolve = bm.Cell(Convolve(), max_batch=4)
        self.example_requests = [torch.zeros(1, 4, width) for width in (5, 9, 7)]

    def unfold(self, picture: Any) -> Any:
        return self.convolve(picture)


class Add(nn.Module):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        return x + total


class Totals(bm.Model):
    """Sums rows of any width, from zeros."""

    def __init__(self) -> None:
        self.add = bm.Cell(Add(), max_batch=4)
        self.example_requests = [torch.zeros(2, width) for width in (3, 5)]

    def unfold(self, rows: Any) -> Any:
        starts = {3: torch.zeros(3), 5: torch.zeros(5)}
        return self.add.run(rows, starts[rows.shape[1]] if rows.shape[0] == 2 else None)


class Tagger(nn.Module):
    """A network as others write it, with a weight that is tied."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.lstm = nn.LSTM(size, size, batch_first=True)
        self.out = nn.Linear(size, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(self.lstm(self.embed(words))[0])
        return scores


class ServedTagger(bm.Model):
    """The network's cells; its weights have their names in the network."""

    def __init__(self, words: int = VOCABULARY, size: int = WIDTH) -> None:
        self.config = {"words": words, "size": size}
        self.example_request = [1, 2]
        self._network = Tagger(words, size).eval()
        self.lstm = bm.recurrent(self._network.lstm, embedding=self._network.embed)
        self.out = bm.Cell(self._network.out)

    def unfold(self, words: Any) -> Any:
        return self.out.map(self.lstm(words)[0])

    def saved_weights(self) -> dict[str, Tensor]:
        return self._network.state_dict()


class Forgetful(ServedTagger):
    """Its weights lack those of a cell."""

    def saved_weights(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in super().saved_weights().items() if name.startswith("lstm")}


class Sized(bm.Model):
    """Two layers; one by one the names are those of the cells."""

    def __init__(self, hidden_size: int, dtype: str = "float32") -> None:
        self.config = {"hidden_size": hidden_size, "dtype": dtype}
        kind = getattr(torch, dtype)
        self.up, self.down = (bm.Cell(nn.Linear(hidden_size, hidden_size).to(kind).eval()) for _ in range(2))
        self.example_request = torch.ones(hidden_size, dtype=kind)

    def unfold(self, x: Any) -> Any:
        return self.down(self.up(x))
