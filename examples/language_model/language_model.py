"""A small language model of bytes: RWKV (Peng et al. 2023), trained on the docstrings of Python's standard library.

    python examples/language_model/language_model.py   # trains two minutes, and saves to the folder language-model
    batchmaker serve examples/language_model/language_model.py

Nothing is downloaded. Training computes whole sequences of bytes, layer by layer; serving takes a byte a step, in
batches with everybody else's. Both have the same weights, those of the network `rwkv` of batchmaker's zoo.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

import batchmaker as bm
from batchmaker.lab import zoo
from batchmaker.lab.zoo.rwkv import RwkvModel

FOLDER = "language-model"
"""Where the trained model is saved, and found by `build`."""

END = 0
"""The byte after each docstring."""

SIZES = {"hidden": 128, "layers": 3}
LENGTH = 96
"""Bytes of a sequence in training."""
BATCH = 32
"""Sequences of a step of training."""


class Bytes:
    """The simplest tokenizer: the bytes of UTF-8. Bytes that are no UTF-8 become U+FFFD."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def build(folder: str = FOLDER) -> bm.Model:
    """Return the trained model with its tokenizer, for `batchmaker serve`."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no folder {folder!r}; train the model first: python {__file__}")
    model = cast(RwkvModel, bm.load(folder))
    model.tokenizer = Bytes()
    return model


def docstrings(modules: Path) -> Iterator[str]:
    """Yield the docstrings of all functions and classes in the Python files of a folder."""
    for path in sorted(modules.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield text


def as_bytes(texts: Iterator[str]) -> Tensor:
    """Return all texts one after the other, END after each: uint8 [n]."""
    return torch.frombuffer(bytearray().join(text.encode() + bytes([END]) for text in texts), dtype=torch.uint8)


def train(text: Tensor, seconds: float, **sizes: Any) -> RwkvModel:
    """Return a model that was trained for this time, at least one step, to tell the next byte of the text."""
    model = cast(RwkvModel, zoo.make("rwkv", vocabulary_size=256, eos=END, rescale_every=0, **{**SIZES, **sizes}))
    network = model.read.module.network
    network.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, betas=(0.9, 0.99))
    begin = told = time.monotonic()
    draw, mean, passed = torch.Generator().manual_seed(0), 5.5, 0.0
    while passed <= seconds:
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * max(1 - passed / max(seconds, 1e-9), 0.05)
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw)
        rows = text[starts + torch.arange(LENGTH + 1)].long()
        x, _ = network.through(rows[:, :-1], network.start(BATCH))
        loss = F.cross_entropy(network.head(x).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        mean = 0.95 * mean + 0.05 * float(loss.detach())
        passed = time.monotonic() - begin
        if time.monotonic() - told > 5:
            told = time.monotonic()
            print(f"{passed:4.0f} s: {mean / 0.6931:.2f} bits a byte", flush=True)
    network.eval().requires_grad_(False)
    return model


def main() -> None:
    reader = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    reader.add_argument("--folder", default=FOLDER, help="where to save the model")
    reader.add_argument("--seconds", type=float, default=120.0, help="how long to train")
    options = reader.parse_args()
    text = as_bytes(docstrings(Path(sysconfig.get_paths()["stdlib"])))
    print(f"{len(text):,} bytes of docstrings")
    bm.save(train(text, options.seconds), options.folder)
    print(f"saved to {options.folder}")


if __name__ == "__main__":
    main()
