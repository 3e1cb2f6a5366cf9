"""What every command has in common: help, the version, and errors of one line."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import batchmaker
from batchmaker.cli.main import COMMANDS
from batchmaker.extensions import commands
from batchmaker.lab import zoo


@pytest.mark.parametrize("name", ["demo", "run", "bench", "profile"])
def test_help_of_a_command_teaches_with_examples(command, name):
    result = command(name, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.output
    assert f"batchmaker {name}" in result.output


def test_help_lists_the_commands(command):
    result = command("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in ("demo", "run", "bench", "profile"))


@pytest.mark.parametrize("name", [*COMMANDS, *commands()])
def test_the_list_says_of_a_command_what_its_own_help_says_first(name):
    place = (COMMANDS | commands())[name]
    function = getattr(importlib.import_module(place.module), place.function)
    assert place.short == inspect.getdoc(function).splitlines()[0]


def test_the_list_of_commands_loads_none_of_them():
    loaded = "; import sys; print([m for m in sys.modules if m == 'torch' or m.startswith('batchmaker.lab')])"
    code = "from batchmaker.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass\n" + loaded[2:]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_version(command):
    assert command("--version").output == f"batchmaker {batchmaker.__version__}\n"


def test_unknown_option_is_refused_with_the_nearest_name(command):
    result = command("bench", "lstm", "--hiden", "3")
    assert result.exit_code == 2
    assert "--hidden" in result.output


def test_own_errors_are_one_line_on_standard_error_and_status_2(program):
    done = program("bench", "lstn")
    assert done.returncode == 2
    assert done.stdout == ""
    known = ", ".join(sorted(zoo.MODELS))
    assert done.stderr.splitlines() == [f"error: unknown model 'lstn'; known: {known}. Did you mean 'lstm'?"]


def test_a_defect_is_not_hidden(command):
    assert command("bench", "lstm", "--rate", "1", "--load", "0.5").exception is not None


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "batchmaker", "--version"], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == f"batchmaker {batchmaker.__version__}\n", done.stderr
