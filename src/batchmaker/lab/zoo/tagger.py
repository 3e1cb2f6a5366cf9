"""Bidirectional LSTM tagger over words, and over the characters of rare ones (the form of DyNet's benchmark)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compile.declaration import Declared
from batchmaker.errors import InvalidRequestError, ModelError, OptionError
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.parts import (
    WordIds,
    check_choice,
    check_positive,
    checked_tokens,
    frozen,
    joined,
    seeded,
    zeros,
)
from batchmaker.lab.zoo.recurrent import LstmStack
from batchmaker.lab.zoo.translation import BOS, EOS
from batchmaker.model.cell import Cell
from batchmaker.model.model import Model

Output = Literal["labels", "scores"]
SPELLED = -1
"""Stands for the id of a word that is spelled."""


class Words(Protocol):
    """An argument of `encode`, such as a datasets.TaggedSentence."""

    @property
    def words(self) -> tuple[str, ...]: ...


class KnownWords(WordIds, Container[object], Protocol):
    """Ids of words, and whether a word is known, such as a datasets.Vocabulary."""


@final
class VectorStack(nn.Module):
    """One step of a vector through all layers: forward(x, h1, c1, ..., hL, cL) -> (h1', c1', ..., hL', cL')."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTMCell(hidden if layer else width, hidden) for layer in range(layers))

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        after: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x, c = layer(x, (state[2 * number], state[2 * number + 1]))
            after += (x, c)
        return tuple(after)


@final
class Spell(nn.Module):
    """(f, b) -> the vector of a word: the concatenated last states of both directions over its characters."""

    def forward(self, forwards: Tensor, backwards: Tensor) -> Tensor:
        return torch.cat((forwards, backwards), 1)


@final
class Tag(nn.Module):
    """(f, b) -> scores of labels, O tanh(H [f; b]), or the likeliest of them, int64."""

    def __init__(self, hidden: int, labels: int, *, likeliest: bool) -> None:
        super().__init__()
        self.likeliest = likeliest
        self.forwards = nn.Linear(hidden, hidden)
        self.backwards = nn.Linear(hidden, hidden, bias=False)
        self.scores = nn.Linear(hidden, labels)

    def forward(self, forwards: Tensor, backwards: Tensor) -> Tensor:
        scores: Tensor = self.scores((self.forwards(forwards) + self.backwards(backwards)).tanh())
        return scores.argmax(-1) if self.likeliest else scores


@final
class BiLstmTaggerModel(Model):
    """A label for each word of a sentence: an LSTM stack in each direction, and an output cell for each word.

    A request is a list of token ids. With characters=True rare words are spelled: a request is then {"words": ids, or
    -1 for a word that is spelled, "spellings": for each of those, in order, the ids of its characters between BOS and
    EOS}. Instead of an embedding, a spelled word gets the last states of an LSTM in each direction over its characters,
    with as many layers and half the embedding's width. `encode` makes a request from a datasets.TaggedSentence. Returns
    the words' labels, int64 [words], or with output="scores" their scores [words, labels].

    alphabet: ids of characters. layers: of each direction; one cell steps through all of them. Other options as for
    LstmModel.
    """

    can_pad = False
    forwards: Cell
    backwards: Cell
    spell_forwards: Cell
    spell_backwards: Cell

    def __init__(
        self,
        vocabulary_size: int = 20_000,
        hidden: int = 256,
        embedding: int | None = None,
        layers: int = 2,
        characters: bool = False,
        alphabet: int = 300,
        dtype: str = "float32",
        output: Output = "labels",
        labels: int = 9,
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        width = hidden if embedding is None else embedding
        check_positive(vocabulary_size=vocabulary_size, hidden=hidden, embedding=width, layers=layers, labels=labels)
        check_choice("output", output, ("labels", "scores"))
        if characters and width % 2:
            raise OptionError(f"embedding must be even with characters, half for each direction, got {width}")
        if characters and alphabet <= EOS:
            raise OptionError(f"alphabet must be above {EOS}, the id of EOS, got {alphabet}")
        self.vocabulary_size, self.alphabet, self.characters = vocabulary_size, alphabet, characters
        self.hidden, self.layers, self.dtype, self.embedding_width = hidden, layers, dtype, width
        with seeded(seed):
            self._add_cells(labels, likeliest=output == "labels", max_batch=max_batch)
        self.example_request = {"words": [0, SPELLED], "spellings": [[BOS, EOS]]} if characters else [0, 0]

    def _add_cells(self, labels: int, *, likeliest: bool, max_batch: int) -> None:
        width, token = self.embedding_width, ValueSpec((), "int64")
        if self.characters:
            for name in ("spell_forwards", "spell_backwards"):
                stack = LstmStack(self.alphabet, width // 2, width // 2, self.layers)
                setattr(self, name, self._direction(stack, token, width // 2, max_batch, priority=0))
            self.spell = Cell(Spell().eval(), max_batch=max_batch, priority=1)
            self.embed = Cell(frozen(nn.Embedding(self.vocabulary_size, width), self.dtype), max_batch=max_batch)
        for name in ("forwards", "backwards"):
            if self.characters:
                one: nn.Module = VectorStack(width, self.hidden, self.layers)
                spec = ValueSpec((width,), self.dtype)
            else:
                one, spec = LstmStack(self.vocabulary_size, width, self.hidden, self.layers), token
            setattr(self, name, self._direction(one, spec, self.hidden, max_batch, priority=2))
        tag = Tag(self.hidden, labels, likeliest=likeliest)
        self.tag = Cell(frozen(tag, self.dtype), max_batch=max_batch, priority=3)

    def _direction(self, stack: nn.Module, spec: ValueSpec, hidden: int, max_batch: int, *, priority: int) -> Cell:
        """Return the cell of one direction, whose state may start from zeros."""
        state = (ValueSpec((hidden,), self.dtype),) * (2 * self.layers)
        declared = Declared((spec, *state), state)
        return Cell(frozen(stack, self.dtype), max_batch=max_batch, priority=priority, declared=declared)

    def encode(self, sentence: Words, vocabulary: KnownWords, alphabet: KnownWords | None = None) -> Any:
        """Return the request for a sentence. With characters, unknown words of the vocabulary are spelled.

        alphabet: gives characters their ids; needed with characters only.
        """
        ids = vocabulary.encode_words(sentence.words)
        if not self.characters:
            return ids
        if alphabet is None:
            raise ModelError(
                "a tagger with characters encodes with an alphabet: encode(sentence, vocabulary, alphabet)"
            )
        rare = [word not in vocabulary for word in sentence.words]
        spelled = [word for word, is_rare in zip(sentence.words, rare, strict=True) if is_rare]
        spellings = [[BOS, *alphabet.encode_words(list(word)).tolist(), EOS] for word in spelled]
        return {"words": np.where(rare, SPELLED, ids), "spellings": spellings}

    def unfold(self, request: Any) -> Any:
        words, spellings = self._parse(request)
        x: Any = self._vectors(words, spellings) if self.characters else words
        forwards, backwards = self.forwards.run(x)[-2], self.backwards.run(x[::-1])[-2]
        return self.tag.map(forwards.steps, backwards.steps[::-1])

    def _vectors(self, words: NDArray[np.int64], spellings: list[NDArray[np.int64]]) -> Any:
        """Return the vector of each word, from its embedding or its characters."""
        is_whole = words != SPELLED
        vectors = [self.embed.map(words[is_whole])] if is_whole.any() else []
        if spellings:
            forwards = [self.spell_forwards.run(spelling)[-2] for spelling in spellings]
            backwards = [self.spell_backwards.run(spelling[::-1])[-2] for spelling in spellings]
            vectors.append(self.spell.map(forwards, backwards))
        # those with an embedding come first
        ranks = np.where(is_whole, np.cumsum(is_whole), is_whole.sum() + np.cumsum(~is_whole)) - 1
        return reduce(joined, vectors)[ranks]

    def length(self, request: Any) -> int:
        """Return the number of words."""
        return len(self._parse(request)[0])

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Compute requests one by one, step by step, for policy `serial`."""
        with torch.no_grad():
            return [self._alone(*self._parse(request)) for request in requests]

    def _alone(self, words: NDArray[np.int64], spellings: list[NDArray[np.int64]]) -> Tensor:
        if self.characters:
            spelling, half = iter(spellings), self.embedding_width // 2
            x = [
                self._spelled(torch.from_numpy(next(spelling)), half)
                if word == SPELLED
                else self.embed.module(torch.tensor([word]))
                for word in words.tolist()
            ]
        else:
            x = list(torch.from_numpy(words)[:, None])
        forwards = self._steps(self.forwards, x, self.hidden)
        backwards = self._steps(self.backwards, x[::-1], self.hidden)[::-1]
        return torch.cat([self.tag.module(f, b) for f, b in zip(forwards, backwards, strict=True)])

    def _spelled(self, spelling: Tensor, half: int) -> Tensor:
        x = list(spelling[:, None])
        last = [self._steps(self.spell_forwards, x, half)[-1], self._steps(self.spell_backwards, x[::-1], half)[-1]]
        return torch.cat(last, 1)

    def _steps(self, cell: Cell, x: list[Tensor], hidden: int) -> list[Tensor]:
        """Return the top layer's h after each step of one direction, from zeros."""
        state = tuple(part[None] for part in zeros(2 * self.layers, hidden, self.dtype))
        tops: list[Tensor] = []
        for step in x:
            state = cell.module(step, *state)
            tops.append(state[-2])
        return tops

    def _parse(self, request: Any) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        """Return the words and the spellings of the spelled ones. InvalidRequestError for anything else."""
        if not self.characters:
            return checked_tokens(request, self.vocabulary_size, "the sentence"), []
        if not isinstance(request, Mapping) or set(request) != {"words", "spellings"}:
            got = sorted(map(str, request)) if isinstance(request, Mapping) else type(request).__name__
            raise InvalidRequestError(f"a request has the keys 'words' and 'spellings', got {got}")
        values = request["words"]
        words = np.asarray(values) if isinstance(values, np.ndarray | list | tuple) else np.empty((0, 0))
        if words.ndim != 1 or words.dtype.kind not in "iu":
            return checked_tokens(values, self.vocabulary_size, "words"), []  # raises the error
        checked_tokens(np.where(words == SPELLED, 0, words), self.vocabulary_size, "words")
        spellings = request["spellings"]
        num_spelled = int((words == SPELLED).sum())
        if not isinstance(spellings, Sequence) or len(spellings) != num_spelled:
            got = f"{len(spellings)}" if isinstance(spellings, Sequence) else type(spellings).__name__
            raise InvalidRequestError(
                f"spellings: got {got}, expected a list of {num_spelled}, one for each -1 in words"
            )
        letters = [
            checked_tokens(spelling, self.alphabet, f"spelling {number}") for number, spelling in enumerate(spellings)
        ]
        return words.astype(np.int64, copy=False), letters
