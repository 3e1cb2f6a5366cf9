"""The tuner on a device that is not there: what it compiles, measures, chooses and keeps."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from batchmaker.errors import DeviceError
from batchmaker.kernels.cache import CacheDirectory
from batchmaker.kernels.configuration import Problem, candidates
from batchmaker.kernels.cost import ranked
from batchmaker.kernels.devices import H200
from batchmaker.kernels.nvrtc import Compiled
from batchmaker.kernels.tuner import (
    DeviceIdentity,
    agreement,
    compiled_best,
    recalled,
    tune,
    winner_name,
)

ASKED = Problem(cell="lstm", dtype="float32", hidden=64, batch=1)
H200_580 = DeviceIdentity("NVIDIA H200", 132, "580.65.6")
SOURCE = "template <...> __global__ void recurrent(...)"


def other(**changed):
    return Problem(**{"cell": "lstm", "dtype": "float32", "hidden": 64, "batch": 1, **changed})


@cache
def order(problem):
    return [config for config, _ in ranked(problem, list(candidates(problem, H200)), H200)]


def expected():
    return order(ASKED)


def first(problem):
    return order(problem)[0]


class FakeCompiler:
    """Compiles everything but what it is told not to, with so many bytes spilled for each rank."""

    version = "1.0"

    def __init__(self, spills=(), broken=()):
        self.spills = {expected()[rank - 1].name_expression: spilled for rank, spilled in dict(spills).items()}
        self.broken = {expected()[rank - 1].name_expression for rank in broken}
        self.asked = []

    def compile(self, source, name_expression, arch):
        self.asked.append((source, name_expression, arch))
        if name_expression in self.broken:
            raise DeviceError(f"{name_expression} does not compile for {arch}")
        return Compiled(arch, b"code", "_symbol", 128, self.spills.get(name_expression, 0), 0)


class FakeTimer:
    """A device on which the configuration of each rank takes so many seconds; None: it fails."""

    def __init__(self, seconds, identity=H200_580):
        self.seconds_of = dict(zip([config.name_expression for config in expected()], seconds, strict=False))
        self.identity = identity

    def seconds(self, problem, config, compiled):
        seconds = self.seconds_of[config.name_expression]
        if seconds is None:
            raise DeviceError("the launch failed: too many resources requested")
        return seconds


def tuned(**options):
    options = {"compiler": FakeCompiler(), **options}
    return tune(ASKED, H200, SOURCE, **options)


def test_the_first_by_the_model_are_compiled_in_order():
    compiler, seen = FakeCompiler(), []
    tuning = tuned(compiler=compiler, top=3, done=seen.append)
    assert compiler.asked == [(SOURCE, config.name_expression, "sm_90") for config in expected()[:3]]
    assert [trial.rank for trial in tuning.trials] == [1, 2, 3]
    assert list(tuning.trials) == seen
    assert tuning.num_candidates == len(expected())


def test_another_architecture_is_compiled_for_when_asked():
    compiler = FakeCompiler()
    tuned(compiler=compiler, top=1, arch="sm_90a")
    assert compiler.asked[0][2] == "sm_90a"


def test_without_a_device_the_first_that_does_not_spill_is_chosen():
    assert tuned().chosen.rank == 1
    assert tuned(compiler=FakeCompiler(spills={1: 40, 2: 8})).chosen.rank == 3
    assert tuned(compiler=FakeCompiler(spills={1: 40, 2: 8}), top=2).chosen.rank == 1


def test_no_more_is_compiled_than_until_one_does_not_spill():
    compiler = FakeCompiler(spills={1: 40, 2: 8})
    config, compiled = compiled_best(ASKED, H200, SOURCE, compiler)
    assert (config, compiled.spill_bytes) == (expected()[2], 0)
    assert len(compiler.asked) == 3
    config, compiled = compiled_best(ASKED, H200, SOURCE, FakeCompiler(spills=dict.fromkeys(range(1, 6), 8)))
    assert (config, compiled.spill_bytes) == (expected()[0], 8)


def test_the_fastest_on_the_device_is_chosen():
    tuning = tuned(timer=FakeTimer([5.0, 3.0, 1.0, 2.0, 4.0]))
    assert tuning.chosen.rank == 3
    assert [tuning.measured_rank(trial) for trial in tuning.trials] == [5, 3, 1, 2, 4]
    assert tuning.measured_on == H200_580


def test_what_spills_may_win_when_it_is_measured_to_be_fastest():
    assert tuned(compiler=FakeCompiler(spills={1: 40}), timer=FakeTimer([1.0, 2.0, 3.0, 4.0, 5.0])).chosen.rank == 1


def test_what_does_not_compile_or_run_is_left_out_and_said():
    tuning = tuned(compiler=FakeCompiler(broken=[1]), timer=FakeTimer([9.0, None, 3.0, 2.0, 4.0]))
    assert tuning.chosen.rank == 4
    assert "does not compile" in tuning.trials[0].failure
    assert "too many resources" in tuning.trials[1].failure
    assert (tuning.trials[0].registers, tuning.trials[1].registers) == (None, 128)
    assert [tuning.measured_rank(trial) for trial in tuning.trials] == [None, None, 2, 1, 3]


def test_when_nothing_can_be_used_the_first_failure_is_told():
    with pytest.raises(
        DeviceError, match=r"none of 2 configurations can be used; the first: recurrent<.* does not compile"
    ):
        tuned(compiler=FakeCompiler(broken=[1, 2]), top=2)


def test_a_layer_that_does_not_fit_has_no_trials():
    large = Problem(cell="lstm", dtype="float32", hidden=4096, batch=1)
    tuning = tune(large, H200, SOURCE, FakeCompiler(), timer=FakeTimer([]))
    assert (tuning.trials, tuning.chosen) == ((), None)
    assert compiled_best(large, H200, SOURCE, FakeCompiler()) is None


def test_the_winner_is_recalled_for_the_same_device_driver_source_and_problem(tmp_path):
    kept = CacheDirectory(tmp_path)
    tuned(timer=FakeTimer([5.0, 3.0, 1.0, 2.0, 4.0]), cache=kept)
    assert recalled(ASKED, H200, H200_580, SOURCE, kept) == expected()[2]
    assert recalled(other(batch=20), H200, H200_580, SOURCE, kept) is None
    assert recalled(ASKED, H200, DeviceIdentity("NVIDIA H200", 132, "590.1.0"), SOURCE, kept) is None
    assert recalled(ASKED, H200, DeviceIdentity("NVIDIA H100", 132, "580.65.6"), SOURCE, kept) is None
    assert recalled(ASKED, H200, H200_580, "newer source", kept) is None


def test_the_number_of_steps_does_not_matter_to_what_is_recalled(tmp_path):
    kept = CacheDirectory(tmp_path)
    tuned(timer=FakeTimer([1.0] * 5), cache=kept)
    assert recalled(other(steps=7), H200, H200_580, SOURCE, kept) == expected()[0]


def test_a_winner_serves_batches_up_to_the_next_power_of_two(tmp_path):
    kept = CacheDirectory(tmp_path)
    kept.write(winner_name(other(batch=10), H200_580, SOURCE), msgspec.json.encode(first(other(batch=10))))
    found = [recalled(other(batch=batch), H200, H200_580, SOURCE, kept) is not None for batch in (8, 9, 16, 17)]
    assert found == [False, True, True, False]


def test_predictions_are_not_kept_as_winners(tmp_path):
    tuned(cache=CacheDirectory(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        b"{}", b"not json",
        msgspec.json.encode(first(other(cell="gru"))),
        msgspec.json.encode({**msgspec.to_builtins(first(ASKED)), "group_size": 3}),
        msgspec.json.encode({**msgspec.to_builtins(first(ASKED)), "group_size": 0}),
    ],
)  # fmt: skip
def test_a_winner_that_cannot_be_one_is_forgotten(tmp_path, damage):
    kept = CacheDirectory(tmp_path)
    kept.write(winner_name(ASKED, H200_580, SOURCE), damage)
    assert recalled(ASKED, H200, H200_580, SOURCE, kept) is None


def test_agreement_is_one_for_the_same_order_and_minus_one_for_the_reverse():
    assert agreement(tuned(timer=FakeTimer([1.0, 2.0, 3.0, 4.0, 5.0])).trials) == 1
    assert agreement(tuned(timer=FakeTimer([5.0, 4.0, 3.0, 2.0, 1.0])).trials) == -1
    assert agreement(tuned(timer=FakeTimer([1.0, 2.0, 4.0, 3.0, None])).trials) == pytest.approx(4 / 6)
    assert agreement(tuned().trials) is None
