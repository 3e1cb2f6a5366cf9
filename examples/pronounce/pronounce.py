"""How an English word is pronounced: the network of g2p_en 2.1, which writes sounds until it says the end.

A GRU reads the letters; another GRU starts from its state and feeds itself with the sound that it has just said.
g2p_en asks it for the words that its dictionary does not have.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.server import Signature, TensorSpec

LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
VOWELS = ["AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW"]
CONSONANTS = [
    "B",
    "CH",
    "D",
    "DH",
    "F",
    "G",
    "HH",
    "JH",
    "K",
    "L",
    "M",
    "N",
    "NG",
    "P",
    "R",
    "S",
    "SH",
    "T",
    "TH",
    "V",
    "W",
    "Y",
    "Z",
    "ZH",
]
STRESSED = [vowel + stress for vowel in VOWELS for stress in "012"]
SOUNDS = ["<pad>", "<unk>", "<s>", "</s>", *sorted([*CONSONANTS, "UW", *STRESSED])]
BEGIN, END = SOUNDS.index("<s>"), SOUNDS.index("</s>")
MOST_SOUNDS = 20


class Reader(nn.Module):
    """(letter, h) -> h."""

    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.embedding = embedding_of(weights["enc_emb"])
        self.gru = gru_of(weights, "enc")

    def forward(self, letter: Tensor, h: Tensor) -> Tensor:
        return self.gru(self.embedding(letter), h)


class Writer(nn.Module):
    """(sound, h) -> (next sound, h)."""

    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.embedding = embedding_of(weights["dec_emb"])
        self.gru = gru_of(weights, "dec")
        self.out = nn.Linear(*weights["fc_w"].shape[::-1])
        self.out.load_state_dict({"weight": tensor_of(weights["fc_w"]), "bias": tensor_of(weights["fc_b"])})

    def forward(self, sound: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(self.embedding(sound), h)
        return self.out(h).argmax(-1), h


class Pronouncer(bm.Model):
    """A request is the letters of a word, as `encode` gives them; the result is its sounds, the end included."""

    def __init__(self, weights: Any) -> None:
        self.read = bm.Cell(Reader(weights), max_batch=256)
        self.write = bm.Cell(Writer(weights), max_batch=256, priority=1, host_outputs=(0,))
        self.example_request = self.encode("batchmaker")

    def unfold(self, letters: Any) -> Any:
        h = self.read.run(letters)
        sound, _ = self.write.loop((BEGIN, h), until=END, max_steps=MOST_SOUNDS)
        return sound.steps

    def encode(self, word: str) -> NDArray[np.int64]:
        """Return the letters of a word and the end, as numbers."""
        return np.array([*(_NUMBER_OF.get(letter, 1) for letter in word.lower()), 2], np.int64)

    def decode(self, sounds: Tensor, word: str = "") -> list[str]:
        """Return the names of sounds up to the end."""
        names = [SOUNDS[sound] for sound in sounds.tolist()]
        return names[:-1] if names[-1] == SOUNDS[END] else names

    def serving_signature(self) -> Signature:
        """A client sends a word and gets sounds."""
        word, sounds = TensorSpec("word", "BYTES", (1,)), TensorSpec("sounds", "BYTES", (-1,))
        return Signature((word,), (sounds,), request="value", encode=self.encode, decode=self.decode)


def build() -> Pronouncer:
    """Return the model with the weights of the g2p_en that is installed."""
    package = find_spec("g2p_en")  # not imported: that would download a dictionary
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("g2p_en is not installed: pip install g2p_en")
    with np.load(Path(package.submodule_search_locations[0]) / "checkpoint20.npz") as weights:
        return Pronouncer(dict(weights))


_NUMBER_OF = {letter: number for number, letter in enumerate(LETTERS)}


def tensor_of(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.float32))


def embedding_of(table: Any) -> nn.Embedding:
    return nn.Embedding.from_pretrained(tensor_of(table))


def gru_of(weights: Any, part: str) -> nn.GRUCell:
    """Return a GRU cell with the weights of one part; g2p_en's have torch's names and torch's order of gates."""
    cell = nn.GRUCell(weights[f"{part}_w_ih"].shape[1], weights[f"{part}_w_hh"].shape[1])
    names = {"weight_ih": "w_ih", "weight_hh": "w_hh", "bias_ih": "b_ih", "bias_hh": "b_hh"}
    cell.load_state_dict({name: tensor_of(weights[f"{part}_{theirs}"]) for name, theirs in names.items()})
    return cell
