"""`--device`: GPUs are named the same way everywhere, and without one each command says so in one line."""

from __future__ import annotations

import pytest
import torch

from batchmaker.errors import DeviceError, OptionError
from batchmaker.server import read_config


def commands(path):
    text = path / "text.txt"
    text.write_text("a line of words\n", encoding="utf-8")
    return {
        "bench": ("bench", "lstm", "--hidden", 8, "--requests", 4),
        "run": ("run", "lstm", "--hidden", 8, "--input", text, "--output", path / "out.jsonl"),
    }


@pytest.mark.parametrize("name", ["bench", "run"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_line_says_what_is_missing(command, tmp_path, name):
    error = command(*commands(tmp_path)[name], "--device", "cuda:0").exception
    assert isinstance(error, DeviceError)
    assert "device 'cuda:0'" in str(error)
    assert "use device 'cpu'" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["bench", "run"])
def test_a_device_that_is_none_is_refused(command, tmp_path, name):
    error = command(*commands(tmp_path)[name], "--device", "gpu").exception
    assert isinstance(error, OptionError)
    assert "'cpu', 'cuda' or like 'cuda:0'" in str(error)


def test_a_served_model_gets_its_device_from_the_file(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text('[[models]]\nsource = "lstm"\ndevice = "cuda:0,1"\n[[models]]\nsource = "gru"\n', encoding="utf-8")
    assert [entry.options.device for entry in read_config(path).entries()] == ["cuda:0,1", "cpu"]
