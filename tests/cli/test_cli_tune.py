"""`batchmaker tune` chooses how a recurrent kernel is laid onto a GPU, with and without one."""

from __future__ import annotations

import sys

import pytest

from batchmaker.cli import tune as tuning
from batchmaker.errors import DeviceError
from batchmaker.kernels.devices import H200
from batchmaker.kernels.found import FoundDevice
from batchmaker.kernels.tuner import DeviceIdentity

GPU = FoundDevice(DeviceIdentity("NVIDIA H200", 132, "580.65.6"), "sm_90", H200)


class BackwardsTimer:
    """A device that finds the model's order to be the reverse of the truth, and cannot run the first at all."""

    def __init__(self, found, prepare):
        self.identity = found.identity
        self.left = 5

    def seconds(self, problem, config, compiled):
        self.left -= 1
        if self.left == 4:
            raise DeviceError("the launch failed")
        return 1e-3 * (1 + self.left)


@pytest.fixture
def no_gpu(monkeypatch):
    def found_device():
        raise DeviceError("there is no NVIDIA driver on this machine")

    monkeypatch.setattr(tuning, "found_device", found_device)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(tuning, "found_device", lambda: GPU)
    monkeypatch.setattr(tuning, "CudaTimer", BackwardsTimer)


@pytest.fixture
def tune(command, tmp_path):
    return lambda *arguments: command("tune", *arguments, "--cache", tmp_path / "cache")


def test_without_a_gpu_the_best_are_compiled_and_described(no_gpu, tune, tmp_path, read_json):
    asked = ("lstm", "--hidden", 64, "--batch", 10, "--top", 3, "--arch", "sm_90")
    done = tune(*asked, "--json", tmp_path / "found.json", "--png", tmp_path / "found.png")
    assert done.exit_code == 0, done.output
    assert "nothing is measured: there is no NVIDIA driver on this machine\n" in done.stderr
    assert "lstm hidden 64 batch 10 float32, 100 steps, sm_90 (H200, predicted)" in done.stdout
    assert "number 1 by the model is taken: it is the first that does not spill" in done.stdout
    found = read_json(tmp_path / "found.json")
    assert (found["arch"], found["measured_on"], found["chosen"]) == ("sm_90", None, 1)
    assert [row["rank"] for row in found["configurations"]] == [1, 2, 3]
    assert found["configurations"][0]["spill_bytes"] == 0
    for row in found["configurations"]:
        assert row["registers"] > row["weight_registers"] > 0
        assert row["spill_bytes"] >= 0
        assert row["measured_ms"] is None
        assert row["predicted_ms"] > 0
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"


def test_without_an_architecture_it_says_which_it_takes(no_gpu, tune):
    done = tune("gru", "--hidden", 64, "--batch", 1, "--top", 1, "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert "this machine; compiling for sm_90, give --arch for another" in done.stderr


def test_with_a_gpu_the_fastest_is_chosen_and_ranks_are_compared(gpu, tune, tmp_path, read_json):
    asked = ("lstm", "--hidden", 64, "--batch", 10, "--json", tmp_path / "found.json", "--png", tmp_path / "found.png")
    done = tune(*asked)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert "number 5 by the model is the fastest of 4 measured" in done.stdout
    assert "agree with Kendall's tau -1.00" in done.stdout
    assert "1: the launch failed" in done.stdout
    found = read_json(tmp_path / "found.json")
    assert found["measured_on"] == {"name": "NVIDIA H200", "sms": 132, "driver": "580.65.6"}
    assert [row["measured_rank"] for row in found["configurations"]] == [None, 4, 3, 2, 1]
    assert [row["measured_ms"] for row in found["configurations"]] == [None, *map(pytest.approx, (4, 3, 2, 1))]
    assert len(list((tmp_path / "cache").glob("*.winner.json"))) == 1
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"


def test_another_architecture_than_the_gpu_s_is_compiled_and_not_measured(gpu, tune):
    done = tune("lstm", "--hidden", 64, "--batch", 1, "--top", 1, "--arch", "sm_80")
    assert done.exit_code == 0, done.output
    assert "nothing is measured: --arch is sm_80, this GPU (NVIDIA H200) is sm_90" in done.stderr


def test_a_layer_that_does_not_fit_names_the_fallback(no_gpu, tune, tmp_path, read_json):
    done = tune("lstm", "--hidden", 4096, "--batch", 1, "--arch", "sm_90", "--json", tmp_path / "found.json")
    assert done.exit_code == 0, done.output
    assert "PyTorch's operations, step by step" in read_json(tmp_path / "found.json")["fallback"]
    assert "no persistent kernel fits" in done.stdout


def test_a_cache_that_cannot_be_written_is_a_warning(no_gpu, command, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    asked = ("--hidden", 64, "--batch", 1, "--top", 1, "--arch", "sm_90", "--cache", tmp_path / "file" / "cache")
    assert command("tune", "lstm", *asked).exit_code == 0
    assert "the cache cannot be written" in caplog.text


def test_wrong_input_is_answered_in_one_line(no_gpu, tune, monkeypatch):
    given = ("--hidden", 64, "--batch", 1)
    assert "unknown cell 'seq2seq'; known: gru, gru-before, gru-before-once, lstm." in str(
        tune("seq2seq", *given).exception
    )
    assert "unknown dtype 'float8'" in str(tune("lstm", *given, "--dtype", "float8").exception)
    assert "arch 'sm_75': there is a cost model for" in str(tune("lstm", *given, "--arch", "sm_75").exception)
    assert tune("lstm", "--hidden", 0, "--batch", 1).exit_code == 2
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert "pip install 'batchmaker[cuda]'" in str(tune("lstm", *given).exception)


def test_help_teaches(tune):
    told = " ".join(tune("--help").stdout.split())
    assert "pip install 'batchmaker[cuda]'" in told
    assert "batchmaker tune gru --hidden 256 --batch 10 --arch sm_90 --json tuning.json" in told
