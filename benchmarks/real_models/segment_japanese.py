"""nagisa: Japanese sentences to words, also by DyNet, in which the network was written."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine_cost.hand_tagger import PlainStates
from engine_cost.measuring import NotRunError
from real_models.case import Case, Data, Peer, example
from real_models.hand_layers import CompiledLayers

PEER: Final = Path(__file__).with_name("nagisa_in_dynet.py")
TEXTS: Final = "jupyterlab_language_pack_ja_JP"
Run = Callable[[Sequence[NDArray[np.int64]]], Tensor]


def case(data: Data) -> Case:
    """Japanese messages of JupyterLab; a BiLSTM of 50 in each direction over characters, then the best path of tags."""
    model: Any = example("segment_japanese", "nagisa")
    import nagisa

    asked = sentences()[: data.of(1000, 40)]
    look, step, back = model.look.module, model.lstm.l0.module.cell, model.lstm.l0_reverse.module.cell
    directions = ((Rows(look), step), (Rows(look), back))
    ways: dict[str, Run] = {
        "padded": Joined(PlainStates(directions, packed=False)),
        "packed": Joined(PlainStates(directions, packed=True)),
        "compiled": Compiled(look, CompiledLayers(both(step, back))),
    }
    python = data.dynet
    return Case(
        package="nagisa",
        about="Japanese sentences, BiLSTM 50 + 50 and the best path of tags",
        asked=asked,
        model=model,
        by_hand={name: Segments(run, model.scores.module.out) for name, run in ways.items()},
        own=nagisa.wakati,
        same=lambda ours, theirs: ours == theirs,
        target=1.3,
        encode=model.encode,
        decode=model.decode,
        peer=None if python is None else lambda given: in_dynet(python, given, data),
        peer_name="DyNet",
    )


def sentences() -> list[str]:
    """Return the messages of JupyterLab's language pack that have a character of Japanese in them, each once."""
    package = find_spec(TEXTS)
    if package is None or not package.submodule_search_locations:
        raise NotRunError("needs Japanese sentences: pip install jupyterlab-language-pack-ja-JP")
    file = Path(package.submodule_search_locations[0], "locale", "ja_JP", "LC_MESSAGES", "jupyterlab.json")
    found = [text[0] for key, text in json.loads(file.read_text("utf-8")).items() if key]
    found = [text.strip() for text in dict.fromkeys(found) if any("\u3040" <= letter <= "\u9fa5" for letter in text)]
    return [text for text in found if text.isprintable() and len(text) > 4]


def in_dynet(python: Path, asked: Sequence[str], data: Data) -> Peer:
    """Return how DyNet does, at the best of its ways to batch. NotRunError where it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "given.json"), Path(folder, "out.json")
        given.write_text(json.dumps(list(asked)), "utf-8")
        command = [str(python), str(PEER), str(given), str(out), "--rounds", str(data.of(3, 1))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotRunError(f"DyNet did not run: {done.stderr.strip().splitlines()[-1]}")
        found = json.loads(out.read_text("utf-8"))
    best = max(found["seen"], key=found["seen"].__getitem__)
    return Peer(found["seen"][best], found["answers"], best, found["seen"])


def both(forwards: nn.LSTMCell, backwards: nn.LSTMCell) -> nn.LSTM:
    """Return two cells as one layer in both directions."""
    lstm = nn.LSTM(forwards.input_size, forwards.hidden_size, bidirectional=True)
    weights = {f"{name}_l0": value for name, value in forwards.state_dict().items()}
    lstm.load_state_dict(weights | {f"{name}_l0_reverse": value for name, value in backwards.state_dict().items()})
    return lstm.eval().requires_grad_(False)


@final
class Rows(nn.Module):
    """What is known of characters to vectors, for any number of dimensions before the last."""

    def __init__(self, look: nn.Module) -> None:
        super().__init__()
        self.look = look

    def forward(self, rows: Tensor) -> Tensor:
        return self.look(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])


@final
class Joined:
    """The states of both directions side by side."""

    def __init__(self, states: PlainStates) -> None:
        self._states = states

    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> Tensor:
        return torch.cat(self._states(requests), 1)


@final
class Compiled:
    """The same, by compiled layers."""

    def __init__(self, look: nn.Module, layers: CompiledLayers) -> None:
        self._look, self._layers = look, layers

    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> Tensor:
        x = self._look(torch.from_numpy(np.concatenate(requests)))
        return self._layers(x.split([len(request) for request in requests]))


@final
class Segments:
    """A batch of sentences by these states, and the scores of all characters together."""

    def __init__(self, states: Run, out: nn.Module) -> None:
        self._states, self._out = states, out

    @torch.no_grad()
    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """Return the scores of each sentence's characters."""
        return list(self._out(self._states(requests)).split([len(request) for request in requests]))
