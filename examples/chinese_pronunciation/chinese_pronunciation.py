"""How Chinese is pronounced: g2pM 0.1, which reads a sentence both ways.

A dictionary knows all characters that are read in one way; an LSTM in each direction and two layers decide on the rest.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import g2pM
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.server import Signature, TensorSpec

BEGIN, END, UNKNOWN = "시", "끝", "<UNK>"
"""What g2pM puts before and after a sentence, and in the place of characters that it has not seen."""


class Reading(nn.Module):
    """The states of both directions at a character -> the number of its reading."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.hidden, self.out = (linear_of(weights, f"logit_layer.{layer}") for layer in (0, 2))

    def forward(self, forwards: Tensor, backwards: Tensor) -> Tensor:
        x = torch.cat((forwards, backwards), -1)
        return self.out(self.hidden(x).relu()).argmax(-1)


class ChinesePronunciation(bm.Model):
    """A request is what `encode` makes of a sentence: its characters, and the places of those with several readings.

    The result has a reading for each of the places.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        number_of: dict[str, int],
        readings_of: dict[str, Sequence[str]],
        names: Sequence[str],
    ) -> None:
        lstm, embedding = layers_of(weights)
        self.lstm = bm.recurrent(lstm, embedding=embedding, join=False, max_batch=256)
        self.reading = bm.Cell(Reading(weights), max_batch=256, priority=1)
        self.number_of, self.readings_of, self.names = number_of, readings_of, names
        self.example_request = self.encode("长江长")

    def unfold(self, characters: Any, places: Any) -> Any:
        if len(places) == 0:
            return []  # the dictionary knows them all
        (forwards, backwards), _ = self.lstm(characters)
        return self.reading.map(forwards[places], backwards[places])

    def encode(self, sentence: str) -> dict[str, NDArray[np.int64]]:
        """Return the request for a sentence."""
        unknown = self.number_of[UNKNOWN]
        characters = [self.number_of.get(character, unknown) for character in sentence]
        places = [place + 1 for place, character in enumerate(sentence) if len(self.readings_of.get(character, "")) > 1]
        characters = [self.number_of[BEGIN], *characters, self.number_of[END]]
        return {"characters": np.array(characters, np.int64), "places": np.array(places, np.int64)}

    def decode(self, readings: Any, sentence: str) -> list[str]:
        """Return the pronunciation of each character, with its tone; what is not Chinese stays as it is."""
        decided = iter(readings if isinstance(readings, list) else readings.tolist())
        known = ((character, self.readings_of.get(character, [character])) for character in sentence)
        return [there[0] if len(there) == 1 else self.names[next(decided)] for _, there in known]

    def serving_signature(self) -> Signature:
        """A client sends a sentence and gets a pronunciation for each character."""
        sentence, spoken = TensorSpec("sentence", "BYTES", (1,)), TensorSpec("pronunciation", "BYTES", (-1,))
        return Signature((sentence,), (spoken,), request="value", encode=self.encode, decode=self.decode)


def build() -> ChinesePronunciation:
    """Return the model with the weights and the dictionary of the g2pM that is installed."""
    package = g2pM.G2pM()
    folder = Path(g2pM.__file__).parent
    with (folder / "np_ckpt.pkl").open("rb") as file:  # of arrays, as the package itself reads it
        weights = {name: torch.from_numpy(np.asarray(array, np.float32)) for name, array in pickle.load(file).items()}
    names = [package.idx2class[number] for number in range(len(package.idx2class))]
    return ChinesePronunciation(weights, package.char2idx, package.cedict, names)


def linear_of(weights: dict[str, Tensor], name: str) -> nn.Linear:
    linear = nn.Linear(*weights[f"{name}.weight"].shape[::-1])
    linear.load_state_dict({part: weights[f"{name}.{part}"] for part in ("weight", "bias")})
    return linear


def layers_of(weights: dict[str, Tensor]) -> tuple[nn.LSTM, nn.Embedding]:
    embedding = nn.Embedding.from_pretrained(weights["embedding.weight"])
    lstm = nn.LSTM(embedding.embedding_dim, weights["lstm.weight_hh_l0"].shape[1], bidirectional=True)
    lstm.load_state_dict({name[5:]: value for name, value in weights.items() if name.startswith("lstm.")})
    return lstm.eval(), embedding
