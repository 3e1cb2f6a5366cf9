"""A language model of bytes for the server's tests: it says its prompt again, and ends after a full stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.server import Completions

END = 256


class Same(nn.Module):
    """token -> token."""

    def forward(self, token: Tensor) -> Tensor:
        return token + 0


class Parrot(bm.Model):
    """Says the bytes of the prompt again and again, from byte `seed` on if the temperature is not 0."""

    def __init__(self) -> None:
        self.same = bm.Cell(Same(), host_outputs=(0,))
        self.example_request = {
            "prompt": torch.tensor([46]), "max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "seed": 0,
        }  # fmt: skip

    def serving_completions(self) -> Completions:
        return Completions(encode, decode, END)

    def unfold(
        self, prompt: Any, max_tokens: int = 16, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
    ) -> Iterator[Any]:
        said = [int(token) for token in prompt]
        if not said:
            raise bm.errors.InvalidRequestError("the prompt is empty")
        ends = said[-1] == ord(".")
        begin = seed if temperature > 0 else 0
        for step in range(max_tokens):
            over = ends and step >= len(said)
            yield self.same(END if over else said[(begin + step) % len(said)])
            if over:
                return


class Silent(Parrot):
    """A model without texts."""

    def serving_completions(self) -> Completions:
        return None  # type: ignore[return-value]


def encode(text: str) -> list[int]:
    if "\N{SNOWMAN}" in text:
        raise KeyError("a secret of the inside")
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def build(*, silent: bool = False) -> bm.Model:
    return Silent() if silent else Parrot()
