"""Prompts as one node: runs as steps, as whole runs, and one after the other in PyTorch.

    python benchmarks/whole_runs.py [--hidden 256] [--requests 64] [--rounds 7]

Two models read a prompt of token ids and return their last state. `lstm`: nn.LSTMCell, and nn.LSTM over packed prompts
as the whole form. `gated`: four layers of a gated linear recurrence, h = a(x) * h + b(x); the whole form computes the
gates of all steps of a layer in one product. Each with prompts of 16, 64, 256 and 512 tokens alone, and with many
requests of 16 to 512 that wait together. Steps, whole runs, what is chosen by the measurement at first use, and the
whole form called with one prompt after the other, take turns in one thread. The medians are printed, in milliseconds of
processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import batchmaker as bm

WORDS: Final = 1000
LENGTHS: Final = (16, 64, 256, 512)
LAYERS: Final = 4


class LstmStep(nn.Module):
    """word, h, c -> h, c."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed, self.step = nn.Embedding(WORDS, hidden), nn.LSTMCell(hidden, hidden)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        h, c = self.step(self.embed(word), (h, c))
        return h, c


class LstmWhole(nn.Module):
    """words [batch, room], number [batch], h, c -> h, c after the last word of each."""

    def __init__(self, of: LstmStep) -> None:
        super().__init__()
        self.embed, width = of.embed, of.step.hidden_size
        self.layer = nn.LSTM(width, width, batch_first=True)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(self.layer, f"{name}_l0", getattr(of.step, name))

    def forward(self, words: Tensor, number: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(self.embed(words), number, batch_first=True, enforce_sorted=False)
        _, (h, c) = self.layer(packed, (h[None], c[None]))
        return h[0], c[0]


class GatedStep(nn.Module):
    """word, h [layers, width] -> h."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, hidden)
        self.gates = nn.ModuleList([nn.Linear(hidden, 2 * hidden) for _ in range(LAYERS)])

    def forward(self, word: Tensor, h: Tensor) -> Tensor:
        x, states = self.embed(word), []
        for layer, gates in enumerate(self.gates):
            forget, given = gates(x).chunk(2, 1)
            states.append(forget.sigmoid() * h[:, layer] + given.tanh())
            x = x + states[-1]
        return torch.stack(states, 1)


class GatedWhole(nn.Module):
    """words [batch, room], number [batch], h -> h after the last word of each."""

    def __init__(self, of: GatedStep) -> None:
        super().__init__()
        self.of = of

    def forward(self, words: Tensor, number: Tensor, h: Tensor) -> Tensor:
        x, ends = self.of.embed(words), []
        for layer, gates in enumerate(self.of.gates):
            forget, given = gates(x).chunk(2, 2)
            forget, given, state, steps = forget.sigmoid(), given.tanh(), h[:, layer], []
            for step in range(words.shape[1]):
                state = torch.addcmul(given[:, step], forget[:, step], state)
                steps.append(state)
            made = torch.stack(steps, 1)
            ends.append(made[torch.arange(len(words)), number - 1])
            x = x + made
        return torch.stack(ends, 1)


class Reads(bm.Model):
    """Token ids -> the last state."""

    def __init__(self, step: nn.Module, state: tuple[Any, ...], most: int, **options: Any) -> None:
        self.read = bm.Cell(step, name="read", state=state, max_batch=most, **options)
        self.example_request = np.arange(600) % WORDS

    def unfold(self, words: Any) -> Any:
        return self.read.run(words)


def one_by_one(whole: nn.Module, state: tuple[Any, ...], requests: Sequence[NDArray[np.int64]]) -> list[Any]:
    made = []
    with torch.no_grad():
        for words in requests:
            shapes = [(1, *((one,) if isinstance(one, int) else one)) for one in state]
            zeros = [torch.zeros(shape) for shape in shapes]
            made.append(whole(torch.from_numpy(words)[None], torch.tensor([len(words)]), *zeros))
    return made


def taken_s(call: Callable[[], Any]) -> float:
    begin_s = time.process_time()
    call()
    return time.process_time() - begin_s


def compare(
    name: str, step: nn.Module, whole: nn.Module, state: tuple[Any, ...], sets: dict[str, Any], rounds: int
) -> None:
    """Measure one model on each set of requests, in turn, and print."""
    most = max(map(len, sets.values()))
    ways: dict[str, dict[str, Any]] = {
        "steps": {}, "whole": {"whole": whole, "whole_from": 1}, "chosen": {"whole": whole}
    }  # fmt: skip
    engines = {
        way: bm.Engine(Reads(step, state, most, **options), threads=1, workers=1) for way, options in ways.items()
    }
    for engine in engines.values():
        engine.start()
    notes = [note for cell in engines["chosen"].explain().cells for note in cell.notes if note.startswith("runs are")]
    print(f"{name}: {'; '.join(notes)}")
    for what, requests in sets.items():
        calls = {way: partial(engine.map, requests, progress=False) for way, engine in engines.items()}
        calls["one by one"] = partial(one_by_one, whole, state, requests)
        times: dict[str, list[float]] = {way: [] for way in calls}
        for turn in range(rounds + 2):  # the first two make templates
            for way, call in calls.items():
                spent_s = taken_s(call)
                if turn > 1:
                    times[way].append(spent_s)
        print(f"  {what:>12}: " + ", ".join(f"{way} {1e3 * statistics.median(s):.2f}" for way, s in times.items()))
    for engine in engines.values():
        engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    drawn = np.random.default_rng(0)
    sets = {f"{n} alone": [drawn.integers(0, WORDS, n)] for n in LENGTHS}
    sets[f"{given.requests} waiting"] = [drawn.integers(0, WORDS, n) for n in drawn.integers(16, 513, given.requests)]
    lstm, gated = LstmStep(given.hidden).eval(), GatedStep(given.hidden).eval()
    compare("lstm", lstm, LstmWhole(lstm).eval(), (given.hidden, given.hidden), sets, given.rounds)
    compare("gated", gated, GatedWhole(gated).eval(), ((LAYERS, given.hidden),), sets, given.rounds)


if __name__ == "__main__":
    main()
