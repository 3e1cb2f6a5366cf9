"""A denoising network whose requests have their own numbers of steps: the same answers alone, batched and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.zoo.blueprint import blueprint
from batchmaker.lab.zoo.diffusion import plan, waves
from insides import network_of

WIDTH = 12
POLICIES = ("auto", "cellular", "padded", "serial")


def make(**options: Any) -> Any:
    return zoo.make("diffusion", **{"width": WIDTH, "max_batch": 8, **options})


def asked(steps: int, seed: int) -> Any:
    return {"noise": np.random.default_rng(seed).normal(size=WIDTH), "steps": steps}


@pytest.fixture(scope="module")
def model():
    return make(layers=2)


@pytest.fixture(scope="module")
def engines(model):
    """Engines by policy, started at first use and kept."""
    made: dict[str, bm.Engine] = {}

    def get(policy: str) -> bm.Engine:
        if policy not in made:
            made[policy] = bm.Engine(model, policy, threads=1).start()
        return made[policy]

    yield get
    for engine in made.values():
        engine.stop()


def check_close(result: Any, expected: Any) -> None:
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_gives_what_the_network_gives_alone(engines, model, policy):
    engine = engines(policy)

    @settings(max_examples=5, derandomize=True)
    @given(st.lists(st.builds(asked, st.integers(1, 30), st.integers(0, 999)), min_size=1, max_size=12))
    def check(requests):
        for result, batched, request in zip(
            engine.map(requests, progress=False), model.batched(requests), requests, strict=True
        ):
            check_close(result, model.alone(request))
            check_close(batched, model.alone(request))

    check()


def test_the_steps_are_those_of_ddim(model):
    """Written as in the papers: what x says of the data and of the noise, and x at the next time from both."""
    network, request = network_of(model), asked(7, 3)
    edges = np.rint(np.linspace(1000, 0, 8)).astype(int)
    x = torch.from_numpy(request["noise"])[None].float()
    for before, after in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        angle, following = (math.pi / 2 * time / 1000 for time in (before, after))
        with torch.no_grad():
            y = x
            told = network.time(waves(1000, WIDTH)[before - 1][None]).chunk(2, -1)
            for block, time in zip(network.blocks, told, strict=True):
                y = y + block.down(torch.nn.functional.silu(block.up(y) + time))
            v = network.velocity(y)
        data, noise = math.cos(angle) * x - math.sin(angle) * v, math.sin(angle) * x + math.cos(angle) * v
        x = math.cos(following) * data + math.sin(following) * noise
    check_close(model.alone(request), x[0])


@pytest.mark.parametrize(("steps", "times"), [(1, 1000), (3, 1000), (1000, 1000), (1, 1), (5, 7)])
def test_a_plan_goes_from_noise_to_data_in_as_many_steps_as_asked(steps, times):
    at, turns = plan(steps, times)
    assert (at[0], len(at), turns.shape) == (times - 1, steps, (steps, 2))
    assert (np.diff(at) < 0).all()
    assert at.min() >= 0
    assert float(np.arctan2(turns[:, 1], turns[:, 0]).sum()) == pytest.approx(math.pi / 2, abs=1e-5)


def test_other_numbers_of_steps_and_other_noise_give_other_vectors(engines):
    found = engines("auto").map([asked(steps, seed) for steps in (1, 2, 9) for seed in (0, 1)], progress=False)
    assert len({tuple(vector.tolist()) for vector in found}) == 6


def test_the_vector_alone_takes_the_usual_number_of_steps(engines, model):
    noise = asked(20, 0)["noise"]
    alone, named = engines("auto").map([noise, {"noise": noise}], progress=False)
    check_close(alone, model.alone(asked(20, 0)))
    check_close(named, alone)
    assert make(times=5).length(noise) == 5


def test_the_shapes_need_not_be_even():
    model = make(width=5, inner=7, layers=1, times=9)
    request = {"noise": np.ones(5), "steps": 9}
    with bm.Engine(model, threads=1) as engine:
        (found,) = engine.map([request], progress=False)
    check_close(found, model.alone(request))


def test_weights_may_be_bfloat16():
    model = make(dtype="bfloat16")
    requests = [asked(steps, steps) for steps in (1, 4, 9)]
    with bm.Engine(model, threads=1) as engine:
        results = engine.map(requests, progress=False)
    for result, request in zip(results, requests, strict=True):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, model.alone(request), atol=0.1, rtol=0.1)


BAD = (
    ({"noise": np.zeros(WIDTH), "steps": 0}, "from 1 to 1000, got 0"),
    ({"noise": np.zeros(WIDTH), "steps": 1001}, "from 1 to 1000"),
    ({"noise": np.zeros(WIDTH), "steps": True}, "from 1 to 1000, got True"),
    ({"noise": np.zeros(WIDTH), "steps": 2.0}, "from 1 to 1000"),
    ({"noise": np.zeros(WIDTH + 1), "steps": 2}, r"must be a vector \[12\]"),
    ({"steps": 2}, "got the keys"),
    ({"noise": np.zeros(WIDTH), "seed": 2}, "got the keys"),
    (np.zeros(WIDTH, np.int64), r"must be a vector \[12\]"),
)


@pytest.mark.parametrize("policy", ["cellular", "padded"])
def test_a_bad_request_fails_alone_and_says_what_was_wanted(engines, model, policy):
    engine, good = engines(policy), asked(3, 0)
    answers = [(engine.submit(bad), message, engine.submit(good)) for bad, message in BAD]
    for failed, message, answered in answers:
        with pytest.raises(InvalidRequestError, match=message):
            failed.result()
        check_close(answered.result(), model.alone(good))


def test_options_that_cannot_be_are_refused():
    with pytest.raises(OptionError, match="times must be at least 1"):
        make(times=0)
    with pytest.raises(OptionError, match="dtype must be one of"):
        make(dtype="int8")


def test_a_simulation_knows_the_number_of_steps():
    plan = blueprint("diffusion", lambda: zoo.make("diffusion"))
    request = plan.request({"noise": np.zeros(256), "steps": 30})
    assert [(run.length, run.open_ended) for run in request.graph.runs] == [(30, False)]
    assert request.length == 30


@pytest.mark.slow
def test_a_saved_network_answers_as_before(model, tmp_path):
    requests = [asked(steps, steps) for steps in (1, 4, 9)]
    bm.save(model, tmp_path / "saved")
    with bm.Engine(bm.load(tmp_path / "saved"), threads=1) as engine:
        for result, request in zip(engine.map(requests, progress=False), requests, strict=True):
            check_close(result, model.alone(request))
