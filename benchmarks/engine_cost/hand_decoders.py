"""A GRU that reads letters and one that writes sounds until it says the end, as g2p_en's, and batches of it by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import batchmaker as bm
from engine_cost.hand_chains import columns
from engine_cost.hand_kernels import Product, folded, gru_gates

LETTERS: Final = 29
SOUNDS: Final = 74
HIDDEN: Final = 256
BEGIN: Final = 2
END: Final = 3
MOST_SOUNDS: Final = 20
MEAN_SOUNDS: Final = 7.0


@final
class Reader(nn.Module):
    """(letter, h) -> h."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(LETTERS, HIDDEN), nn.GRUCell(HIDDEN, HIDDEN)

    def forward(self, letter: Tensor, h: Tensor) -> Tensor:
        return self.gru(self.embedding(letter), h)


@final
class Writer(nn.Module):
    """(sound, h) -> (next sound, h)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(SOUNDS, HIDDEN), nn.GRUCell(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, SOUNDS)

    def forward(self, sound: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(self.embedding(sound), h)
        return self.out(h).argmax(-1), h


@final
class Spoken(bm.Model):
    """A word, letter ids, to its sounds, the end included; at most 20 of them.

    Weights are random, large enough that what is said depends on the word; the end's bias is such that words have about
    MEAN_SOUNDS sounds.
    """

    def __init__(self, words: Sequence[NDArray[np.int64]]) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            reader, writer = Reader(), Writer()
        for module in (reader, writer):
            module.eval().requires_grad_(False)
            for weight in module.gru.parameters():
                weight.mul_(3.0)
        set_end_bias(reader, writer, words)
        self.read = bm.Cell(reader, max_batch=256)
        self.write = bm.Cell(writer, max_batch=256, priority=1, host_outputs=(0,))
        self.example_request = words[0]

    def unfold(self, letters: Any) -> Any:
        h = self.read.run(letters)
        sound, _ = self.write.loop((BEGIN, h), until=END, max_steps=MOST_SOUNDS)
        return sound.steps


def set_end_bias(reader: Reader, writer: Writer, words: Sequence[NDArray[np.int64]]) -> None:
    """Find the bias of the end with which these words have MEAN_SOUNDS sounds on average, by halving."""
    low, high = -20.0, 20.0
    for _ in range(14):
        middle = writer.out.bias.data[END] = (low + high) / 2
        mean = float(np.mean([len(sounds) for sounds in PlainBatch(reader, writer)(words)]))
        low, high = (middle, high) if mean > MEAN_SOUNDS else (low, middle)


@final
class PlainBatch:
    """A batch as torch has it: nn.GRU over packed letters, then a step of all who still speak, until nobody does."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self._reader, self._writer = reader, writer
        self._gru = nn.GRU(HIDDEN, HIDDEN)
        self._gru.load_state_dict({f"{name}_l0": value for name, value in reader.gru.state_dict().items()})
        self._gru.requires_grad_(False)

    @torch.no_grad()
    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Return the sounds of each word."""
        letters = nn.utils.rnn.pad_sequence([torch.from_numpy(request) for request in requests])
        lengths = torch.tensor([len(request) for request in requests])
        parts = nn.utils.rnn.pack_padded_sequence(self._reader.embedding(letters), lengths, enforce_sorted=False)
        h = self._gru(parts)[1][0]
        return spoken(self._writer, h)


def spoken(step: Any, h: Tensor) -> list[NDArray[np.int64]]:
    """Return what each row says. step: (sound, h) -> (sound, h). Rows that have said the end leave the batch."""
    said = np.full((MOST_SOUNDS, len(h)), END, np.int64)
    who, sound = np.arange(len(h)), torch.full((len(h),), BEGIN)
    for now in range(MOST_SOUNDS):
        sound, h = step(sound, h)
        values = sound.numpy()
        said[now, who] = values
        speaking = values != END
        if not speaking.all():
            if not speaking.any():
                break
            left = torch.from_numpy(np.flatnonzero(speaking))
            who, sound, h = who[speaking], sound[left], h[left]
    lengths = np.minimum((said == END).argmax(0) + 1, MOST_SOUNDS)
    lengths[~(said == END).any(0)] = MOST_SOUNDS
    return [said[:length, row] for row, length in enumerate(lengths.tolist())]


@final
class FoldedBatch:
    """The same with what the engine makes for itself: folded tables, packed products, gates in one compiled loop."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        tables, products = [], []
        for module in (reader, writer):
            gru = module.gru
            tables.append(folded(module.embedding, gru.weight_ih, gru.bias_ih))
            products.append(Product(gru.weight_hh, gru.bias_hh))
        (self._letters, self._sounds), (self._reads, self._writes) = tables, products
        self._out = Product(writer.out.weight, writer.out.bias)

    @torch.no_grad()
    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Return the sounds of each word."""
        order, letters, running = columns(requests)
        h = torch.zeros(len(order), HIDDEN)
        for now, n in zip(letters, running, strict=True):
            gru_gates(self._reads(h[:n]).numpy(), self._letters, now, h.numpy(), n)
        said = spoken(self._step, h)
        return [said[row] for row in np.argsort(order).tolist()]

    def _step(self, sound: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        gru_gates(self._writes(h).numpy(), self._sounds, sound.numpy(), h.numpy(), len(h))
        return self._out(h).argmax(-1), h
