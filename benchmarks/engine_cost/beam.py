"""Lines of translation with attention and beam search: over one by one, and over batches by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from batchmaker.lab import zoo
from batchmaker.lab.datasets import Vocabulary, read_lines, translation_lengths
from batchmaker.lab.zoo.beam import traced_back
from batchmaker.lab.zoo.padding import pad
from engine_cost.decisions import Sides, Targets, over_alone_and_by_hand
from engine_cost.measuring import Row, Settings

HIDDEN: Final = 256
WORDS: Final = 4000
MAXIMA: Final = (16, 64)
SPREAD: Final = 8.0
"""With larger scores fewer are equal but for rounding."""
CROWDED: Final = 0.75
"""By hand, rows that are done are taken out when they leave less than this share."""


@final
class BeamByHand:
    """Closed batches with torch's own LSTM as encoder; whoever has its words is taken out of the batch."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def alone(self, request: Any) -> Tensor:
        """One sentence."""
        return self.by_hand([request])[0]

    def by_hand(self, requests: Sequence[Any]) -> list[Tensor]:
        """A batch of sentences, each with its number of words."""
        model, step = self._model, self._model.step.module
        tokens, lengths = pad([request["source"] for request in requests])
        packed = pack_padded_sequence(model.encoder.module.embedding(tokens), lengths, enforce_sorted=False)
        steps, (h, c) = model._layers(packed)
        memory, count = pad_packed_sequence(steps, batch_first=True)[0], len(requests)
        most, live = torch.tensor([request["words"] for request in requests]), torch.arange(count)
        state = [*model.begin.module(h[0], c[0]), torch.full((count,), -1)]
        longest, beam = int(most.max()), state[0].shape[1]
        choices, scores = torch.empty((count, longest, beam), dtype=torch.int64), torch.empty(count, beam)
        for number in range(longest):
            _, *state = step(state[0], memory, lengths, *state[1:])
            choices[live, number] = state[0]
            going = most[live] > number + 1
            if not going.all():
                scores[live[~going & (most[live] == number + 1)]] = state[1][~going & (most[live] == number + 1)]
                if going.sum() <= CROWDED * len(live):
                    live, memory, lengths = live[going], memory[going], lengths[going]
                    state = [part[going] for part in state]
        parts = zip(choices.numpy(), scores.numpy(), most.tolist(), strict=True)
        return [torch.from_numpy(traced_back(row[:end], int(best.argmax()), WORDS)) for row, best, end in parts]


def beam(settings: Settings) -> Iterator[Row]:
    """Attention 256 and a beam of 4 over sentences of Europarl: over one by one, and over batches by hand."""
    lines = [line for line in read_lines(settings.data / "europarl_deen" / "raw5k.en") if line.strip()]
    vocabulary = Vocabulary.from_lines(lines, max_size=WORDS)
    sources = [vocabulary.encode(line)[:80] for line in lines[: settings.of(200, 20)]]
    words = np.minimum(translation_lengths([len(source) for source in sources], 0), 80).tolist()
    requests = [{"source": source, "words": count} for source, count in zip(sources, words, strict=True)]
    model: Any = zoo.make("seq2seq-attention", vocabulary_size=WORDS, hidden=HIDDEN, max_batch=max(MAXIMA))
    with torch.no_grad():
        model.step.module.project.weight *= SPREAD
    hand = BeamByHand(model)
    yield from over_alone_and_by_hand(
        settings, "beam search 256", Sides(model, hand.alone, hand.by_hand), requests, Targets(4.0, 0.9, 1.3),
        length=lambda request: request["words"], maxima=MAXIMA,
    )  # fmt: skip
