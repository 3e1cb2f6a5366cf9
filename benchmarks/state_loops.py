"""Loops that are not greedy decoders: an LSTM decoder with more in its state, in one compiled call and step by step.

    python benchmarks/state_loops.py [--cases counter mask] [--batch 1 16 64] [--hidden 256] [--json results.json]

Microseconds of a step of `--steps` steps through a whole engine, and of plain PyTorch for one request: the median of
turns in which all take part, in processor time of the process, which other work on the machine changes little. `loop`
is the engine as it is; `steps` the same engine with compiled loops of this kind switched off; `greedy` (the decoder
alone) has a loop of its own, which both use. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.state_loop import StateChoice

WORDS = 64


class Decoder(nn.Module):
    """A greedy decoder. Subclasses choose the next word, and what else is in the state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(WORDS, hidden), nn.LSTMCell(hidden, hidden)
        self.out = nn.Linear(hidden, WORDS)

    def forward(self, word: Tensor, h: Tensor, c: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        h, c = self.cell(self.embed(word), (h, c))
        word, *rest = self.choose(self.out(h), *more)
        return (word, h, c, *rest)

    def choose(self, scores: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        return (scores.argmax(-1), *more)


class Counter(Decoder):
    def choose(self, scores: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        return scores.argmax(-1), more[0] + 1


class Flag(Decoder):
    def choose(self, scores: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        word = scores.argmax(-1)
        return word, more[0] | (word == -1)


class Tempered(Decoder):
    def choose(self, scores: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        return (scores / more[0][:, None]).argmax(-1), more[0]


class Both(Decoder):
    def choose(self, scores: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        return (scores / more[0][:, None]).argmax(-1), more[0], more[1] + 1


class Mask(Decoder):
    def choose(self, scores: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        return scores.masked_fill(more[0], float("-inf")).argmax(-1), more[0]


class Memory(Decoder):
    """torch gathers a row of a memory at each step."""

    def choose(self, scores: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        t, memory = more
        row = memory.gather(1, t[:, None, None].expand(-1, 1, WORDS))[:, 0]
        return (scores + row).argmax(-1), (t + 1) % 128, memory


class Sorted(Decoder):
    """torch computes the probabilities and sorts them."""

    def choose(self, scores: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        return scores.softmax(-1).sort(-1, descending=True).indices[:, 0], more[0] + 1


NO_WORD: Any = -1
CASES: dict[str, tuple[type[Decoder], tuple[Any, ...], Any]] = {
    "greedy": (Decoder, (), NO_WORD),
    "until=function": (Decoder, (), lambda words: words > 1000),
    "counter": (Counter, (0,), NO_WORD),
    "float": (Counter, (0.5,), NO_WORD),
    "flag": (Flag, (False,), {3: True}),
    "temperature": (Tempered, (0.7,), NO_WORD),
    "counter and temperature": (Both, (0.7, 0), NO_WORD),
    "mask": (Mask, (torch.zeros(WORDS, dtype=torch.bool),), NO_WORD),
    "memory": (Memory, (0, torch.zeros(128, WORDS)), NO_WORD),
    "sorted by torch": (Sorted, (0,), NO_WORD),
}


class Speaker(bm.Model):
    """A request is its first word. Answers with the words."""

    example_request = 1

    def __init__(self, module: Decoder, more: tuple[Any, ...], until: Any, steps: int) -> None:
        self.cell = bm.Cell(module, host_outputs=(0,))
        self.zero = torch.zeros(module.cell.hidden_size)
        self.more, self.until, self.steps = more, until, steps

    def unfold(self, word: int) -> Any:
        made = self.cell.loop((word, self.zero, self.zero, *self.more), until=self.until, max_steps=self.steps)
        return made[0].steps


def measure(name: str, hidden: int, steps: int, batches: list[int], turns: int) -> list[dict[str, Any]]:
    """Return the lines of one case."""
    torch.manual_seed(0)
    kind, more, until = CASES[name]
    module = kind(hidden).eval()
    used: Callable[..., Any] = StateChoice.fastest
    zero = torch.zeros(hidden)
    state = [torch.as_tensor(part)[None] for part in (1, zero, zero, *more)]

    def plain(_: int) -> None:
        given = state
        for _ in range(steps):
            given = module(*given)

    lines = []
    with bm.Engine(Speaker(module, more, until, steps), threads=1) as engine:

        def run(count: int) -> None:
            engine.map([1] * count, progress=False)

        def stepped(count: int) -> None:
            StateChoice.fastest = lambda self, batch: None  # type: ignore[method-assign, assignment]
            run(count)
            StateChoice.fastest = used  # type: ignore[method-assign]

        for count in batches:
            forms: dict[str, Callable[[int], None]] = {"loop": run, "steps": stepped}
            if count == 1:
                forms["plain"] = plain
            taken: dict[str, list[float]] = {form: [] for form in forms}
            for turn in range(turns + 1):
                for form, call in forms.items():
                    begin_s = time.process_time()
                    call(count)
                    if turn:
                        taken[form].append((time.process_time() - begin_s) / steps * 1e6)
            line = {form: statistics.median(times) for form, times in taken.items()}
            lines.append({"case": name, "requests": count, "hidden": hidden} | {f"{k}_us": v for k, v in line.items()})
            print(f"{name} x {count}: " + ", ".join(f"{form} {us:.0f} us" for form, us in line.items()), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    lines = [
        line
        for name in options.cases
        for line in measure(name, options.hidden, options.steps, options.batch, options.turns)
    ]
    if options.json:
        machine = {"processor": platform.processor(), "load": os.getloadavg()[0], "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
