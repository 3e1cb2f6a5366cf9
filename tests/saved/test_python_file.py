"""Models from Python files: what `batchmaker serve FILE.py` runs."""

from __future__ import annotations

import sys

import pytest

import batchmaker as bm
from batchmaker.errors import ModelError, OptionError
from batchmaker.saved.sources import ModelFile, parse_source

SOURCE = """
import torch
import batchmaker as bm


class Doubled(bm.Model):
    example_request = [1.0]

    def __init__(self, width=1):
        self.width = width
        self.double = bm.Cell(torch.nn.Identity())

    def unfold(self, x):
        return self.double(x)


def build(width=1):
    return Doubled(width)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file of models; what it has imported and where it looked is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def written(text, name="model_of_a_test"):
        path = tmp_path / f"{name}.py"
        path.write_text(text, "utf-8")
        monkeypatch.setitem(sys.modules, name, None)  # so that it is taken out again at the end
        del sys.modules[name]
        return path

    return written


def built(text):
    (versions,) = parse_source(str(text)).scan().values()
    return versions["1"].make()


def test_a_file_is_a_model_named_after_it(write):
    path = write(SOURCE)
    source = parse_source(str(path))
    assert source == ModelFile("model_of_a_test", path, {})
    model = built(path)
    assert isinstance(model, bm.Model)
    assert model.width == 1


def test_build_gets_the_options_behind_the_colon(write):
    path = write(SOURCE)
    assert built(f"{path}:width=3").width == 3
    assert parse_source(f"mine={path}").scan().keys() == {"mine"}
    with pytest.raises(OptionError, match=r"unknown option of build.*'widht'.*Did you mean 'width'"):
        built(f"{path}:widht=3")


def test_a_file_is_run_anew_each_time_and_its_neighbours_can_be_imported(write):
    write("WIDTH = 7\n", "neighbour_of_a_test")
    path = write(SOURCE)
    assert built(path).width == 1
    path.write_text(SOURCE.replace("Doubled(width)", "Doubled(neighbour_of_a_test.WIDTH)"), "utf-8")
    path.write_text("import neighbour_of_a_test\n" + path.read_text("utf-8"), "utf-8")
    assert built(path).width == 7


def test_a_model_of_a_file_is_saved_and_loaded(write, tmp_path):
    bm.save(built(write(SOURCE)), tmp_path / "saved")
    assert bm.load(tmp_path / "saved").width == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", r"has no function build\(\)"),
        ("def build():\n    return 3\n", r"build\(\) returned int, expected a batchmaker.Model"),
        ("def build():\n    raise KeyError('no weights')\n", r"build\(\) raised KeyError: 'no weights'"),
        ("import no_such_package\n", "raised ModuleNotFoundError: .* while it was imported"),
    ],
)  # fmt: skip
def test_a_file_without_a_model_says_what_is_wrong(write, text, said):
    with pytest.raises(ModelError, match=said):
        built(write(text))


def test_a_file_that_is_not_there_and_one_named_as_a_module_that_is_are_refused(write, tmp_path):
    with pytest.raises(OptionError, match="there is no such file"):
        parse_source(str(tmp_path / "nothing.py"))
    with pytest.raises(OptionError, match="a module named 'json' has been imported from elsewhere"):
        built(write_beside(tmp_path))


def write_beside(folder):
    path = folder / "json.py"
    path.write_text(SOURCE, "utf-8")
    return path
