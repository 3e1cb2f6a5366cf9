"""Tokens are drawn as asked, row by row, from numbers that a request's seed and step alone decide."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.binding import bind
from batchmaker.errors import OptionError
from batchmaker.graph.spec import ValueSpec
from batchmaker.sampling import Greedy, Sampler, Temperature, TopK, TopP, bits, uniform
from covering import covering

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def split_mix(state: int) -> int:
    """One output of SplitMix64, in Python's integers of any size."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def expected_bits(seed: int, step: int, stream: int) -> int:
    begin = split_mix((seed + stream * GAMMA) & MASK)
    return split_mix((begin + (step + 1) * GAMMA) & MASK)


def whole(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def seeds(count: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + count)


def within_chance(counts: Tensor, expected: Tensor) -> bool:
    """Whether counts are as expected by the chi-square test, but for one case in ten thousand."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
    return statistic < bound


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_generator_is_split_mix_64_as_it_was_published():
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821
    ]  # fmt: skip
    assert [split_mix((1234567 + i * GAMMA) & MASK) for i in range(1, 6)] == published


def test_bits_are_those_of_integers_that_do_not_wrap_around():
    drawn = random.Random(0)
    cases = [(drawn.randrange(-(1 << 63), 1 << 63), drawn.randrange(1 << 40), drawn.randrange(4)) for _ in range(300)]
    cases += [(0, 0, 0), (-1, 0, 0), ((1 << 63) - 1, (1 << 63) - 1, 1), (-(1 << 63), -(1 << 63), 3), (5, -1, 2)]
    for seed, step, stream in cases:
        made = bits(whole(seed), whole(step), stream=stream)
        assert made.item() & MASK == expected_bits(seed, step, stream)


def test_numbers_are_a_function_of_seed_and_step_in_any_batch():
    seed, step = seeds(40) * 977 - 3, torch.arange(40) % 7
    together = uniform(seed, step)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(seed[order], step[order]), together[order])
    assert [uniform(seed[i : i + 1], step[i : i + 1]).item() for i in range(40)] == together.tolist()
    assert torch.equal(uniform(seed.int(), step.int()), together)


def test_numbers_have_53_bits_between_0_and_1():
    made = uniform(seeds(10_000), whole(0))
    assert made.dtype is torch.float64
    assert 0 <= float(made.min()) < 1e-3
    assert 0.999 < float(made.max()) < 1
    assert torch.equal(made * 2**53, (made * 2**53).round())
    assert len(made.unique()) == len(made)


@pytest.mark.parametrize(
    "made",
    [
        uniform(whole(3), seeds(100_000)),
        uniform(seeds(100_000), whole(3)),
        uniform(seeds(100_000), seeds(100_000)),
        uniform(whole(0), seeds(100_000), stream=1),
        uniform(seeds(100_000) << 32, whole(0)),
    ],
    ids=["steps of a seed", "seeds at a step", "both", "another stream", "seeds that differ in high bits"],
)
def test_numbers_are_even_and_do_not_depend_on_the_one_before(made):
    cells = (made * 100).long()
    assert within_chance(cells.bincount(minlength=100).double(), torch.full((100,), len(made) / 100))
    coarse = (made * 10).long()
    pairs = 10 * coarse[:-1:2] + coarse[1::2]
    assert within_chance(pairs.bincount(minlength=100).double(), torch.full((100,), len(pairs) / 100))


def test_each_bit_is_as_often_0_as_1_and_changes_with_one_bit_of_the_seed():
    made = bits(seeds(20_000), whole(0))
    ones = torch.stack([(made >> bit) & 1 for bit in range(64)]).double().mean(1)
    assert float((ones - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(20_000)
    for bit in (0, 1, 17, 40, 63):
        change = made ^ bits(seeds(20_000) ^ (1 << bit if bit < 63 else -(1 << 63)), whole(0))
        flipped = torch.stack([(change >> k) & 1 for k in range(64)]).double().mean(1)
        assert float((flipped - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(20_000)


def test_streams_of_one_seed_share_no_numbers():
    first, second = (bits(whole(1), seeds(1000), stream=stream) for stream in (0, 1))
    assert not set(first.tolist()) & set(second.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_seeds_and_steps_that_are_no_integers_are_refused(dtype):
    with pytest.raises(TypeError, match="seed must be integers"):
        uniform(torch.zeros(2, dtype=dtype), whole(0, 0))
    with pytest.raises(TypeError, match="step must be integers"):
        uniform(whole(0, 0), torch.zeros(2, dtype=dtype))


# --- what is kept -----------------------------------------------------------------------------------------------------


def kept(scores: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in scores > -math.inf]


def smallest_set(row: list[float], top_p: float) -> list[int]:
    """By its definition, in exact sums: the likeliest tokens, the lower number first, until they reach top_p."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    most = max(row)
    likely = [math.exp(row[token] - most) for token in order]
    count, wanted = 1, top_p * math.fsum(likely)
    while count < len(row) and math.fsum(likely[:count]) < wanted:
        count += 1
    return sorted(order[:count])


def test_top_k_keeps_exactly_k_and_of_equal_scores_the_lower_number():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    assert [kept(TopK(k)(logits))[0] for k in (1, 2, 3, 4)] == [[1], [1, 3], [1, 2, 3], [1, 2, 3, 4]]
    assert kept(TopK(2)(torch.zeros(1, 5))) == [[0, 1]]


@pytest.mark.parametrize("top_k", [0, -1, 6, 7, 1 << 40])
def test_a_top_k_of_none_or_of_more_than_there_are_keeps_all_scores_as_they_are(top_k):
    logits = torch.tensor([[1.0, 3.0, -2.0, 3.0, 2.0, 2.0]])
    assert torch.equal(TopK(top_k)(logits), logits)
    assert torch.equal(TopK()(logits, whole(top_k)), logits)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert [kept(TopP(p)(logits))[0] for p in (0.1, 0.49, 0.51, 0.74, 0.76, 0.9, 1.0)] == [
        [0], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]
    ]  # fmt: skip
    made = torch.randn(200, 30, generator=torch.Generator().manual_seed(0)) * 3
    for top_p in (0.05, 0.3, 0.777, 0.95, 0.999):
        assert kept(TopP(top_p)(made)) == [smallest_set(row, top_p) for row in made.tolist()]


def test_top_p_takes_of_equal_scores_the_lower_number():
    assert kept(TopP(0.5)(torch.zeros(1, 8))) == [[0, 1, 2, 3]]
    assert kept(TopP(0.51)(torch.zeros(1, 8))) == [[0, 1, 2, 3, 4]]
    assert kept(TopP(1e-9)(torch.zeros(1, 8))) == [[0]]


def test_each_row_has_its_own_numbers_where_they_are_given():
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    top_k, top_p = whole(1, 2, 0, -1, 20, 500), torch.tensor([0.5, 1.0, 0.1, 0.9, 0.0, 3.0])
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0, -1.0, 1e-6])
    for row in range(6):
        one = logits[row : row + 1]
        k, p, t = int(top_k[row]), float(top_p[row]), float(temperature[row])
        assert torch.equal(TopK()(logits, top_k)[row : row + 1], TopK(k)(one))
        assert torch.equal(TopP()(logits, top_p)[row : row + 1], TopP(min(max(p, 1e-9), 1.0))(one))
        assert torch.equal(Temperature()(logits, temperature)[row : row + 1], Temperature(max(t, 0.0))(one))


def test_a_temperature_divides_and_0_leaves_the_greedy_token():
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(2)).bfloat16()
    wanted = (logits.float() / 0.7).softmax(-1)
    assert torch.allclose(Temperature(0.7)(logits).softmax(-1), wanted, atol=1e-6)
    assert kept(Temperature(0)(logits)) == [[token] for token in Greedy()(logits).tolist()]
    assert Temperature()(logits).dtype is torch.float32


# --- what is drawn ----------------------------------------------------------------------------------------------------


def counts(sample: nn.Module, logits: list[float], **options: Tensor) -> Tensor:
    """How often each token was drawn in 20000 steps."""
    many = torch.tensor([logits]).expand(20_000, -1)
    given = {name: value.expand(20_000) for name, value in options.items()}
    return sample(many, torch.full((20_000,), 11), seeds(20_000), **given).bincount(minlength=len(logits)).double()


LOGITS = [0.3, 2.0, -1.0, 1.1, 1.1, -4.0, 0.0, 1.9]


@pytest.mark.parametrize(
    ("options", "rest"),
    [
        ({}, range(8)),
        ({"temperature": 0.6}, range(8)),
        ({"temperature": 3.0}, range(8)),
        ({"top_k": 3}, [1, 7, 3]),
        ({"top_p": 0.8}, [1, 7, 3, 4]),
        ({"temperature": 2.0, "top_k": 6, "top_p": 0.7}, [1, 7, 3, 4]),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [False, True], ids=["constants", "inputs"])
def test_tokens_are_drawn_as_often_as_they_are_likely(options, rest, given):
    inputs = {name: torch.tensor([value]) for name, value in options.items()} if given else {}
    found = counts(Sampler(**({} if given else options)), LOGITS, **inputs)
    wanted = torch.tensor(LOGITS).double() / options.get("temperature", 1.0)
    wanted = wanted[list(rest)].softmax(-1) * 20_000
    assert within_chance(found[list(rest)], wanted)
    assert int(found.sum()) == 20_000 == int(found[list(rest)].sum())


def test_tokens_of_one_step_are_drawn_as_often_as_they_are_likely_among_many_seeds():
    many = torch.tensor([LOGITS]).expand(20_000, -1)
    found = Sampler()(many, seeds(20_000), torch.zeros(20_000, dtype=torch.int64)).bincount(minlength=8).double()
    assert within_chance(found, torch.tensor(LOGITS).double().softmax(-1) * 20_000)


def test_temperature_0_is_greedy_and_so_is_top_k_1():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(3))
    logits[:, 4] = logits[:, 9] = 5.0  # of equal ones the first
    wanted = Greedy()(logits).tolist()
    step = torch.zeros(50, dtype=torch.int64)
    assert wanted == [4] * 50
    for options in ({"temperature": 0.0}, {"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}):
        assert Sampler(**options)(logits, seeds(50), step).tolist() == wanted
    assert Sampler()(logits, seeds(50), step, temperature=torch.zeros(50)).tolist() == wanted


def test_a_nearly_cold_sampler_draws_the_best_token_whatever_the_scores():
    logits = torch.tensor([[3e38, 1.0, -3e38], [-5.0, -4.0, -6.0], [0.0, 1e-3, 2e-3]])
    made = Sampler(temperature=1e-30)(logits, whole(1, 2, 3), whole(0, 0, 0))
    assert made.tolist() == [0, 1, 2]


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.5}], ids=str)
def test_rows_without_probabilities_get_the_token_that_is_greedy_and_disturb_nobody(options):
    inf, nan = math.inf, math.nan
    rows = [[1.0, 2.0, 0.5], [1.0, nan, 3.0], [inf, 0.0, inf], [-inf, -inf, -inf], [-inf, 4.0, -inf]]
    logits, seed, step = torch.tensor(rows), seeds(5), torch.zeros(5, dtype=torch.int64)
    made = Sampler(**options)(logits, seed, step)
    assert made[1:].tolist() == [1, 0, 0, 1]
    assert made[:1].tolist() == Sampler(**options)(logits[:1], seed[:1], step[:1]).tolist()


def test_forbidden_tokens_are_never_drawn():
    found = counts(Sampler(temperature=5.0), [-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert found[[0, 2, 4]].sum() == 0
    assert within_chance(found[[1, 3]], torch.full((2,), 10_000.0))


def test_a_row_draws_the_same_alone_and_in_any_batch():
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(4))
    sample, step = Sampler(0.9, top_k=20, top_p=0.8), torch.arange(64) % 5
    together = sample(logits, seeds(64), step).tolist()
    assert [sample(logits[i : i + 1], seeds(64)[i : i + 1], step[i : i + 1]).item() for i in range(64)] == together
    assert len(set(together)) > 10


def test_two_samplers_of_other_streams_draw_independently():
    logits, step = torch.zeros(1000, 4), torch.zeros(1000, dtype=torch.int64)
    first, second = (Sampler(stream=stream)(logits, seeds(1000), step) for stream in (0, 1))
    assert within_chance((4 * first + second).bincount(minlength=16).double(), torch.full((16,), 1000 / 16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampler(temperature=-0.1), "temperature must be a number of at least 0, got -0.1"),
        (lambda: Sampler(temperature=math.nan), "temperature must be"),
        (lambda: Temperature("hot"), "temperature must be"),
        (lambda: Sampler(top_k=-2), "top_k must be a whole number"),
        (lambda: TopK(2.0), "top_k must be a whole number"),
        (lambda: TopK(True), "top_k must be a whole number"),
        (lambda: Sampler(top_p=0.0), "top_p must be above 0 and at most 1, got 0.0"),
        (lambda: TopP(1.5), "top_p must be above 0 and at most 1"),
        (lambda: TopP(math.nan), "top_p must be"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


# --- in cells ---------------------------------------------------------------------------------------------------------

TOKENS, SIZE, BEGIN, END = 30, 8, 1, 2


class WordStep(nn.Module):
    """(word, h, seed, step, temperature) -> (word, h, seed, step, temperature)."""

    def __init__(self, sample: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell, self.out = nn.Embedding(TOKENS, SIZE), nn.GRUCell(SIZE, SIZE), nn.Linear(SIZE, TOKENS)
        self.sample = sample
        self.to(dtype)

    def forward(self, word: Tensor, h: Tensor, seed: Tensor, step: Tensor, temperature: Tensor) -> Any:
        h = self.cell(self.embed(word), h)
        word = self.sample(4 * self.out(h), seed, step, temperature)
        return word, h, seed, step + 1, temperature


class Looped(bm.Model):
    def __init__(self, sample: nn.Module | None = None) -> None:
        self.write = bm.Cell(WordStep(sample or Sampler(top_k=25, top_p=0.95)), max_batch=16)

    def start(self, seed: Any, temperature: Any) -> Any:
        return (BEGIN, [0.0] * SIZE, seed, 0, temperature)

    def unfold(self, seed: Any, temperature: Any) -> Any:
        return self.write.loop(self.start(seed, temperature), until=END, max_steps=12)[0].steps


class Asked(Looped):
    """The same, one word at a time."""

    def unfold(self, seed: Any, temperature: Any) -> Any:
        state, words = self.start(seed, temperature), []
        while len(words) < 12 and END not in words:
            state = self.write(*state)
            words.append((yield state[0]))
        return words


REQUESTS = [{"seed": 7919 * n - 5, "temperature": (1.0, 0.0, 0.5, 2.0)[n % 4]} for n in range(40)]


def texts(model: bm.Model, requests: list[Any], *, alone: bool = False, **options: Any) -> list[list[int]]:
    with bm.Engine(model, **options) as engine:
        if alone:
            made = [engine.submit(request).result() for request in requests]
        else:
            made = engine.map(requests, progress=False)
    return [torch.as_tensor(words).tolist() for words in made]


def test_a_request_s_words_depend_on_its_seed_alone():
    alone = texts(Looped(), REQUESTS, alone=True, workers=1)
    assert len({tuple(words) for words in alone}) > 25
    assert texts(Looped(), REQUESTS, workers=1) == alone
    assert texts(Looped(), REQUESTS[::-1], policy="cellular", workers=2)[::-1] == alone
    assert texts(Asked(), REQUESTS, workers=1) == alone
    assert texts(Asked(), REQUESTS, alone=True, policy="cellular") == alone


def test_equal_seeds_make_equal_words_and_others_make_others():
    same = texts(Looped(), [{"seed": 3, "temperature": 1.0}] * 5 + [{"seed": 4, "temperature": 1.0}])
    assert same[0] == same[1] == same[4] != same[5]


@pytest.mark.parametrize(
    ("dtype", "options"),
    covering(["float32", "bfloat16", "float16"], [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}]),
    ids=str,
)
def test_a_cell_that_samples_is_a_graph_and_gives_what_its_module_gives(options, dtype):
    word, row = ValueSpec((), "int64"), ValueSpec((SIZE,), dtype)
    module = WordStep(Sampler(**options), getattr(torch, dtype))
    inputs = (word, row, word, word, ValueSpec((), "float32"))
    bound = bind(module, inputs, name="write")
    assert not [note for note in bound.notes if "left as it is" in note or "could not be compared" in note]
    made = torch.Generator().manual_seed(5)
    given = (
        torch.randint(0, TOKENS, (50,), generator=made),
        torch.randn(50, SIZE, generator=made).to(getattr(torch, dtype)),
        seeds(50),
        torch.arange(50) % 3,
        torch.full((50,), 0.8),
    )
    with torch.no_grad():
        wanted, found = module(*given), bound.call(given)
    agreeing = (wanted[0] == found[0]).double().mean()  # a number near an edge may fall on the other side by rounding
    assert float(agreeing) >= (1.0 if dtype == "float32" else 0.9)
    assert torch.equal(found[3], given[3] + 1)


@pytest.mark.slow
def test_what_samples_can_be_saved(tmp_path):
    model = Saved()
    bm.save(model, tmp_path / "model", example_request={"seed": 1, "temperature": 0.5})
    assert texts(bm.load(tmp_path / "model"), REQUESTS) == texts(model, REQUESTS)


class Saved(Looped):
    """A class that can be imported."""


@pytest.mark.gpu
def test_numbers_are_the_same_on_a_gpu():
    seed, step = seeds(1000) * 7919 - 11, torch.arange(1000) % 13
    assert torch.equal(bits(seed.cuda(), step.cuda()).cpu(), bits(seed, step))
    assert torch.equal(uniform(seed.cuda(), step.cuda()).cpu(), uniform(seed, step))


def test_a_draw_does_not_depend_on_the_order_of_scores_that_are_nearly_equal():
    base = torch.linspace(0.0, 1e-6, 500).expand(400, -1)
    rounded = base.flip(-1)
    seed, step = torch.arange(400), torch.zeros(400, dtype=torch.int64)
    drawn = [Sampler(top_p=0.999)(scores, seed, step) for scores in (base, rounded)]
    assert (drawn[0] == drawn[1]).float().mean() > 0.95
