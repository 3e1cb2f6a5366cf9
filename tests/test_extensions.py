"""What other distributions add is found by its entry point; without them the errors say what to install."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import batchmaker as bm
from batchmaker import extensions
from batchmaker.cli.main import app
from batchmaker.errors import OptionError
from batchmaker.extensions import PAPERS, commands, extension


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """batchmaker without any other distribution."""
    monkeypatch.setattr(extensions, "entry_points", lambda **_: ())


def test_commands_of_another_distribution_are_listed_after_the_own_ones():
    listed = CliRunner().invoke(app, ["--help"]).output
    assert list(commands()) == ["npu", "plan", "learn"]
    assert listed.index("simulate") < listed.index("learn")


@pytest.mark.usefixtures("alone")
def test_alone_the_list_has_the_own_commands_and_a_papers_command_says_what_to_install():
    assert commands() == {}
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    error = CliRunner().invoke(app, ["npu", "1", "1", "1"]).exception
    assert isinstance(error, OptionError)
    assert PAPERS in str(error)
    assert CliRunner().invoke(app, ["nothing"]).exit_code == 2


@pytest.mark.usefixtures("alone")
def test_alone_a_simulation_on_the_accelerator_says_what_to_install():
    error = CliRunner().invoke(app, ["simulate", "lstm", "--npu", "--requests", "2", "--rate", "9"]).exception
    assert isinstance(error, OptionError)
    assert PAPERS in str(error)


@pytest.mark.usefixtures("alone")
def test_alone_a_cell_to_optimise_says_what_to_install():
    class Planned(bm.Model):
        def __init__(self) -> None:
            self.cell = bm.Cell(torch.nn.Linear(2, 2), optimize=True)

        def unfold(self, row):
            return self.cell(row)

    with bm.Engine(Planned()) as engine, pytest.raises(OptionError, match=PAPERS):
        engine.submit(torch.zeros(2)).result(60)


def test_what_nobody_adds_is_an_error_that_names_its_purpose():
    with pytest.raises(OptionError, match="the purpose is in a distribution of its own"):
        extension("batchmaker.costs", "nothing", "the purpose")
