"""What `deterministic=True` costs, beside the same engine without it: papers/docs/deterministic-results.md.

    python benchmarks/deterministic.py [--quick] [--json OUT.json] [--page papers/docs/deterministic-results.md]

Networks with seeded weights on made-up requests of 5 to 25 words, one worker, one compute thread. One alone: requests
one after the other. All waiting: 512 requests at once. A figure is milliseconds of the processor for a request, of the
whole process, so other work on the machine counts little. Both engines are measured in turn; a number is the median
over rounds, a ratio that of both in the same round: its median, the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import torch
from torch import Tensor, nn

import batchmaker as bm
from engine_cost.measuring import interleaved
from pages import fill, table
from provenance import CPU_EXECUTOR, ROOT, Result, made_by

OUT: Final = ROOT / "benchmarks" / "results" / "deterministic.json"
USUAL, OURS = "usual", "deterministic"
WORDS: Final = 1000
MEASURES: Final = (
    "benchmarks/deterministic.py", "src/batchmaker/sampling.py", "src/batchmaker/compile", "src/batchmaker/kernels/cpu",
    *CPU_EXECUTOR,
)  # fmt: skip


class Layer(bm.Model):
    """A recurrent layer of torch over words, or over vectors."""

    def __init__(self, kind: type[nn.RNNBase], hidden: int, dtype: torch.dtype, *, of_words: bool) -> None:
        torch.manual_seed(0)
        embedding = nn.Embedding(WORDS, hidden, dtype=dtype) if of_words else None
        self.layer = bm.recurrent(kind(hidden, hidden, dtype=dtype), embedding=embedding)
        self.example_request: Any = [3, 4, 5] if of_words else torch.zeros(3, hidden, dtype=dtype)

    def unfold(self, given: Any) -> Any:
        return self.layer(given)[0][-1]


class Step(nn.Module):
    """(word, h, c, seed, step) -> (word, h, c, seed, step + 1)."""

    def __init__(self, hidden: int, sample: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell = nn.Embedding(WORDS, hidden), nn.LSTMCell(hidden, hidden)
        self.out, self.sample = nn.Linear(hidden, WORDS), sample

    def forward(self, word: Tensor, h: Tensor, c: Tensor, seed: Tensor, step: Tensor) -> Any:
        h, c = self.cell(self.embed(word), (h, c))
        return self.sample(self.out(h), seed, step), h, c, seed, step + 1


class Writer(bm.Model):
    """As many drawn words as the request has."""

    def __init__(self, hidden: int, sample: nn.Module) -> None:
        self.step = bm.Cell(Step(hidden, sample))
        self.zeros = torch.zeros(hidden)
        self.example_request = [3, 4, 5]

    def unfold(self, words: list[int]) -> Any:
        return self.step.loop((words[0], self.zeros, self.zeros, words[-1], 0), max_steps=len(words))[0].steps


MODELS: Final[dict[str, Callable[[], bm.Model]]] = {
    "LSTM 128 over words": lambda: Layer(nn.LSTM, 128, torch.float32, of_words=True),
    "LSTM 512 over words": lambda: Layer(nn.LSTM, 512, torch.float32, of_words=True),
    "LSTM 512 over words, bfloat16": lambda: Layer(nn.LSTM, 512, torch.bfloat16, of_words=True),
    "GRU 256 over vectors": lambda: Layer(nn.GRU, 256, torch.float32, of_words=False),
    "LSTM 128 that draws words, top-p": lambda: Writer(128, bm.sampling.Sampler(0.8, top_p=0.9)),
}


def requests_of(model: bm.Model, count: int) -> list[Any]:
    """Return requests of 5 to 25 words or vectors."""
    drawn = torch.Generator().manual_seed(0)
    example = torch.as_tensor(model.example_request)
    lengths = torch.randint(5, 26, (count,), generator=drawn).tolist()
    if example.dim() == 2:
        return [torch.randn(length, example.shape[1], generator=drawn) for length in lengths]
    return [torch.randint(3, WORDS, (length,), generator=drawn).tolist() for length in lengths]


def one_by_one(engine: bm.Engine, requests: list[Any]) -> None:
    """Submit each request when the one before is answered."""
    for request in requests:
        engine.submit(request).result()


def together(engine: bm.Engine, requests: list[Any]) -> None:
    """Submit all requests at once, and wait for all."""
    engine.map(requests, progress=False)


def ms_each(run: Callable[[bm.Engine, list[Any]], None], engine: bm.Engine, requests: list[Any]) -> float:
    """Return the processor milliseconds that the process takes for each request."""
    began_s = time.process_time()
    run(engine, requests)
    return 1e3 * (time.process_time() - began_s) / len(requests)


def measured(*, quick: bool) -> list[Result]:
    """Return a row for each network and figure."""
    rows, rounds = [], 2 if quick else 5
    for name, make in MODELS.items():
        requests = requests_of(make(), 64 if quick else 256)
        with ExitStack() as stack:
            engines = {
                side: stack.enter_context(bm.Engine(make(), workers=1, threads=1, deterministic=side == OURS))
                for side in (USUAL, OURS)
            }
            for engine in engines.values():
                engine.map(requests, progress=False)
            alone = {side: partial(ms_each, one_by_one, engine, requests[:64]) for side, engine in engines.items()}
            waiting = {side: partial(ms_each, together, engine, 2 * requests) for side, engine in engines.items()}
            for figure, sides in (("one alone", alone), ("all waiting", waiting)):
                found = interleaved(sides, rounds)
                ratios = found[OURS] / found[USUAL]
                over = [float(np.median(ratios)), float(ratios.min()), float(ratios.max())]
                medians = {side: float(np.median(values)) for side, values in found.items()}
                rows.append({"work": name, "figure": figure, **medians, "over": over})
    return rows


def shown(found: Result) -> str:
    """Return the table of the page, and what it was measured with."""
    lines: list[list[Any]] = [
        [
            one["work"],
            one["figure"],
            f"{one[USUAL]:.3g}",
            f"{one[OURS]:.3g}",
            "{:.2f} ({:.2f} to {:.2f})".format(*one["over"]),
        ]
        for one in found["rows"]
    ]
    about = (
        f"`{found['command']}`, commit {found['commit']}, {found['machine']['cpu']}, load average "
        f"{found['load_average']}; medians of five rounds."
    )
    return f"{table(('network', 'processor ms of a request', 'usual', 'deterministic', 'ratio'), lines)}\n\n{about}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of few requests")
    parser.add_argument("--show", action="store_true", help="measure nothing, show the file")
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--page", type=Path, help="put the table there")
    options = parser.parse_args()
    if not options.show:
        torch.set_num_threads(1)
        about = made_by(MEASURES, f"python benchmarks/deterministic.py{' --quick' if options.quick else ''}")
        rows = measured(quick=options.quick)
        options.json.write_text(json.dumps({**about, "quick": options.quick, "rows": rows}, indent=1) + "\n", "utf-8")
    found = json.loads(options.json.read_text("utf-8"))
    print(shown(found))
    if options.page is not None:
        fill(options.page, {"deterministic": shown(found)})


if __name__ == "__main__":
    main()
