"""`deterministic=True`: the bits of an answer depend on the request alone, whatever its company, and on no run."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import CellError, ModelError, OptionError
from batchmaker.executor.inline import InlineExecutor
from batchmaker.executor.null import NullExecutor

WORDS, SIZE = 40, 24


class Tagger(bm.Model):
    """Layers of torch in both directions over vectors, and scores for each."""

    def __init__(self, kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.embed = bm.Cell(nn.Embedding(WORDS, SIZE, dtype=dtype))
        self.layer = bm.recurrent(kind(SIZE, SIZE, bidirectional=True, dtype=dtype))
        self.scores = bm.Cell(nn.Sequential(nn.Linear(2 * SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, 5)).to(dtype))

    def unfold(self, words: list[int]) -> Any:
        output, _ = self.layer(self.embed.map(words))
        return self.scores.map(output)


class Step(nn.Module):
    """(word, h, seed, step) -> (word, h, seed, step)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell, self.out = nn.Embedding(WORDS, SIZE), nn.GRUCell(SIZE, SIZE), nn.Linear(SIZE, WORDS)
        self.sample = bm.sampling.Sampler(top_p=0.95)
        self.to(dtype)

    def forward(self, word: Tensor, h: Tensor, seed: Tensor, step: Tensor) -> Any:
        h = self.cell(self.embed(word), h)
        return self.sample(3 * self.out(h), seed, step), h, seed, step + 1


class Writer(bm.Model):
    """Words that are drawn, and the last state."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.step = bm.Cell(Step(dtype))

    def unfold(self, words: list[int]) -> Any:
        word, h, *_ = self.step.loop((words[0], [0.0] * SIZE, len(words), 0), until=2, max_steps=9)
        return word.steps, h


class Rest(nn.Module):
    """A step that is used in chains, alone and as a node of a tree."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2 * SIZE, SIZE, dtype=dtype)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.linear(torch.cat([left, right], -1)).tanh()


class Mixed(bm.Model):
    """One cell for a chain in long requests, for single nodes with a decision in between in short ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        self.embed = bm.Cell(nn.Embedding(WORDS, SIZE, dtype=dtype))
        self.join = bm.Cell(Rest(dtype))

    def unfold(self, words: list[int]) -> Any:
        rows = self.embed.map(words)
        if len(words) > 4:
            return self.join.run(rows, (torch.zeros(SIZE),))
        made = self.join(rows[0], rows[-1])
        first = yield made
        return self.join(made, rows[0]) if float(first[0]) > 0 else made


def requests(count: int = 40) -> list[list[int]]:
    drawn = random.Random(5)
    return [[drawn.randrange(3, WORDS) for _ in range(drawn.choice([1, 2, 3, 5, 8, 13]))] for _ in range(count)]


def bits_of(answer: Any) -> Any:
    if isinstance(answer, tuple | list):
        return tuple([bits_of(part) for part in answer])
    return bytes(answer.contiguous().view(torch.uint8).numpy()) if isinstance(answer, Tensor) else answer


def answers(model: bm.Model, order: list[int], together: int, **options: Any) -> list[Any]:
    """The bits of the answers, by request, in groups that come together in an order."""
    with bm.Engine(model, deterministic=True, **options) as engine:
        return asked(engine, order, together)


def asked(engine: bm.Engine, order: list[int], together: int) -> list[Any]:
    given, found = requests(), {}
    for first in range(0, len(order), together):
        group = order[first : first + together]
        made = engine.map([given[number] for number in group], progress=False)
        found.update(zip(group, map(bits_of, made), strict=True))
    return [found[number] for number in sorted(found)]


MODELS = {
    "gru in float32": lambda: Tagger(nn.GRU, torch.float32),
    "gru in bfloat16": lambda: Tagger(nn.GRU, torch.bfloat16),
    "gru in float16": lambda: Tagger(nn.GRU, torch.float16),
    "lstm in float32": lambda: Tagger(nn.LSTM, torch.float32),
    "lstm in bfloat16": lambda: Tagger(nn.LSTM, torch.bfloat16),
    "drawn words in float32": lambda: Writer(torch.float32),
    "drawn words in bfloat16": lambda: Writer(torch.bfloat16),
    "chains, nodes and decisions": lambda: Mixed(torch.float32),
}
EVERY = list(range(40))
SHUFFLED = random.Random(1).sample(EVERY, len(EVERY))


SLOW = {"lstm in bfloat16", "gru in float16", "gru in float32", "drawn words in bfloat16"}
"""Others have the same layer, and the same numbers."""


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, make in MODELS.items()],
)
def test_bits_depend_on_the_request_alone(make):
    with bm.Engine(make(), deterministic=True, workers=1) as engine:
        alone = asked(engine, EVERY, 1)
        assert len(set(alone)) > 25
        assert asked(engine, EVERY, 40) == alone
    assert answers(make(), SHUFFLED, 17, policy="cellular", workers=2) == alone


@pytest.mark.parametrize("policy", ["auto", "agenda", pytest.param("lazy", marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_policy(policy):
    model = Tagger(nn.GRU, torch.float32)
    assert answers(model, SHUFFLED, 40, policy=policy, workers=2) == answers(model, EVERY, 5, policy="cellular")


IN_ANOTHER_PROCESS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import test_deterministic as here
print(here.answers(here.Writer(torch.bfloat16), here.EVERY, int(sys.argv[2])))
"""


@pytest.mark.slow
def test_another_run_has_the_same_bits():
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, here, "7"], capture_output=True, text=True, check=True
    )
    assert len(done.stdout) > 1000
    assert done.stdout == f"{answers(Writer(torch.bfloat16), EVERY, 40)}\n"


def test_a_neighbour_that_fails_changes_no_bits():
    class Refusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            if bool((x[:, 0] == 13).any()):
                raise ValueError("13")
            return self.linear(x)

    class Once(bm.Model):
        def __init__(self) -> None:
            self.cell = bm.Cell(Refusing())

        def unfold(self, x: Tensor) -> Any:
            return self.cell(x)

    rows = list(torch.randn(9, SIZE, generator=torch.Generator().manual_seed(0)))
    wrong = torch.full((SIZE,), 13.0)
    with bm.Engine(Once(), deterministic=True) as engine:
        alone = [bits_of(engine.submit(row).result()) for row in rows]
        pending = engine.submit_many([*rows[:4], wrong, *rows[4:]])
        assert isinstance(pending.pop(4).exception(), CellError)
        assert [bits_of(answer.result()) for answer in pending] == alone


def test_one_cell_is_of_one_form_and_says_so():
    with bm.Engine(Tagger(nn.LSTM, torch.float32), deterministic=True) as engine:
        engine.map(requests(3), progress=False)
        notes = engine.registry.notes
    assert all("deterministic: runs in one form, in batches of" in " ".join(said) for said in notes.values())
    assert not [said for said in notes.values() if "hoisted" in " ".join(said)]


def test_a_planned_cell_is_not_planned_and_says_why():
    class Planned(bm.Model):
        def __init__(self) -> None:
            self.cell = bm.Cell(nn.Linear(4, 4), optimize=True)

        def unfold(self, x: Tensor) -> Any:
            return self.cell(x)

    with bm.Engine(Planned(), deterministic=True) as engine:
        engine.map([torch.zeros(4)], progress=False)
        assert "chosen by measured times" in " ".join(engine.registry.notes["cell"])


def test_a_cell_that_draws_from_torch_is_refused_with_its_request():
    class Noise(bm.Model):
        def __init__(self) -> None:
            self.cell = bm.Cell(Noisy())

        def unfold(self, x: Tensor) -> Any:
            return self.cell(x)

    with bm.Engine(Noise(), deterministic=True) as engine, pytest.raises(ModelError, match=r"with bm\.sampling"):
        engine.submit(torch.zeros(3)).result()
    with bm.Engine(Noise()) as engine:
        assert engine.submit(torch.zeros(3)).result().shape == (3,)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": 1}, "deterministic must be True or False, got int 1"),
        ({"deterministic": None}, "deterministic must be True or False"),
        ({"deterministic": True, "policy": "serial"}, "policies of cells on the CPU, not for 'serial' here"),
        ({"deterministic": True, "device": "cuda"}, "not for 'cellular' on this device or executor"),
        ({"deterministic": True, "executor": NullExecutor()}, "on this device or executor"),
    ],
    ids=["a number", "nothing", "a policy", "a device", "an executor"],
)
def test_where_it_cannot_hold_it_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        bm.Engine(Mixed(torch.float32), **options)


@pytest.mark.parametrize(("options", "threads"), [({}, 1), ({"threads": 2}, 2)], ids=str)
def test_one_thread_computes_unless_another_number_is_given(options, threads):
    engine = bm.Engine(Mixed(torch.float32), workers=1, deterministic=True, **options)
    executor = engine.drivers[0].executor
    assert isinstance(executor, InlineExecutor)
    assert executor.num_threads == threads


def test_a_cell_with_a_memory_is_refused() -> None:
    class Attend(nn.Module):
        def forward(self, h: Tensor, keys: Tensor, number: Tensor) -> Tensor:
            scores = (keys @ h[:, :, None]).squeeze(2)
            scores = scores.masked_fill(torch.arange(keys.shape[1]) >= number[:, None], -torch.inf)
            return (scores.softmax(1)[:, None] @ keys).squeeze(1)

    class Attended(bm.Model):
        def __init__(self) -> None:
            self.step = bm.Cell(nn.GRUCell(4, 4))
            self.attend = bm.Cell(Attend(), memory="keys")

        def unfold(self, rows: Tensor) -> Any:
            h = self.step.run(rows)
            return self.attend(h, h.steps)

    with bm.Engine(Attended()) as engine:
        assert engine.submit(torch.ones(3, 4)).result(60).shape == (4,)
    with bm.Engine(Attended(), deterministic=True) as engine, pytest.raises(ModelError, match="it reads a memory"):
        engine.submit(torch.ones(3, 4)).result(60)
