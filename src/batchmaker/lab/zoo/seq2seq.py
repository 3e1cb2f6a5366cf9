"""Translation: an LSTM encoder and a decoder that feeds back its own last word (BatchMaker section 7.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.lab.zoo.padding import PaddedModel, final_states, fused, pad
from batchmaker.lab.zoo.parts import WordIds, check_positive, checked_tokens, frozen, seeded, zeros
from batchmaker.lab.zoo.recurrent import LstmStack, OneLstm
from batchmaker.lab.zoo.translation import BOS, EOS, check_vocabulary, read_order, write
from batchmaker.model.cell import Cell


class Pair(Protocol):
    """An argument of `encode`, such as a datasets.SentencePair."""

    @property
    def source_tokens(self) -> tuple[str, ...]: ...
    @property
    def target_tokens(self) -> tuple[str, ...]: ...


@final
class WordDecoder(nn.Module):
    """forward(word, h1, c1, ..., hL, cL) -> (next word, h1', c1', ..., hL', cL'). The likeliest word is fed back."""

    def __init__(self, vocabulary_size: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.stack = LstmStack(vocabulary_size, embedding, hidden, layers)
        self.project = nn.Linear(hidden, vocabulary_size)

    def forward(self, word: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        after = self.stack(word, *state)
        return self.project(after[-2]).argmax(-1), *after


@final
class Seq2SeqModel(PaddedModel):
    """Translates a sentence word by word; the words stream.

    A request is a list of source ids, translated until EOS or `max_words` (None: twice the source and ten more); or
    {"source": ids, "words": n} for exactly n words, with or without EOS, as in benchmarks. Returns the words, int64,
    EOS included. until_eos: False ignores EOS. Other options as for LstmModel.
    """

    optional_inputs = ("words",)
    sole_input = "source"

    def __init__(
        self,
        vocabulary_size: int = 30_000,
        hidden: int = 1024,
        embedding: int | None = None,
        layers: int = 1,
        dtype: str = "float32",
        max_batch: int = 256,
        max_words: int | None = None,
        until_eos: bool = True,
        seed: int = 0,
    ) -> None:
        width = hidden if embedding is None else embedding
        check_positive(hidden=hidden, embedding=width, layers=layers, max_words=1 if max_words is None else max_words)
        check_vocabulary(vocabulary_size)
        sizes = (vocabulary_size, width, hidden, layers)
        with seeded(seed):
            encoder = (OneLstm if layers == 1 else LstmStack)(*sizes)
            decoder = WordDecoder(*sizes)
        self.encoder = Cell(frozen(encoder, dtype), max_batch=max_batch)
        self.decoder = Cell(frozen(decoder, dtype), max_batch=max_batch, priority=1, host_outputs=(0,))
        self.vocabulary_size = vocabulary_size
        self.max_words = max_words
        self.until_eos = until_eos
        self.hidden, self.layers, self.dtype = hidden, layers, dtype
        self._layers = fused(list(encoder.layers))  # type: ignore[arg-type]
        self._prepare()
        self.example_request = {"source": [BOS, EOS], "words": 2}

    def _prepare(self) -> None:
        self._initial = None if self.layers == 1 else zeros(2 * self.layers, self.hidden, self.dtype)

    def encode(self, pair: Pair, vocabulary: WordIds) -> dict[str, Any]:
        """Return the request for a pair, with the number of words in its translation."""
        return {"source": vocabulary.encode_words(pair.source_tokens), "words": len(pair.target_tokens)}

    def unfold(self, request: Any) -> Any:
        source, num_words, until = self._parse(request)
        state = self.encoder.run(source, self._initial)
        word = self.decoder.loop((BOS, *state), until=until, max_steps=num_words)[0]
        return word.steps

    def length(self, request: Any) -> int:
        return len(self._parse(request)[0])

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Encode the padded batch, then decode all rows until the last one ends; each keeps its own words."""
        parsed = [self._parse(request) for request in requests]
        tokens, lengths = pad([source for source, _, _ in parsed])
        with torch.no_grad():
            layers, embedding = self._need_layers(), self.encoder.module.embedding
            h, c = final_states(layers, embedding(tokens), lengths)  # type: ignore[operator]
            state = [part for pair in zip(h, c, strict=True) for part in pair]

            def step(words: Tensor) -> Tensor:
                words, *state[:] = self.decoder.module(words, *state)
                return words

            return write(step, [most for _, most, _ in parsed], [until for _, _, until in parsed])

    def _parse(self, request: Any) -> tuple[NDArray[np.int64], int, int | None]:
        """Return the source, the most words to make, and the word that ends them earlier."""
        tokens, words, until = read_order(request, until_eos=self.until_eos)
        source = checked_tokens(tokens, self.vocabulary_size, "the source")
        return source, words or self.max_words or 2 * len(source) + 10, until
