"""The command line: `batchmaker COMMAND ...`."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Annotated, Any, Final, final

import typer
from typer.core import TyperCommand, TyperGroup

import batchmaker
from batchmaker.cli.grouped_options import expanded
from batchmaker.cli.imports import collector_paused
from batchmaker.errors import BatchmakerError, OptionError
from batchmaker.extensions import PAPERS, Command, commands

COMMANDS: Final = {
    "demo": Command(
        "batchmaker.cli.demo.command", "demo",
        "See cellular and padded batching serve the same requests, one after the other, side by side.",
    ),
    "run": Command("batchmaker.cli.run", "run", "Push a file through a model, all lines batched together."),
    "serve": Command(
        "batchmaker.cli.serve", "serve",
        "Serve models over HTTP and gRPC (Open Inference Protocol v2), all requests batched together.",
    ),
    "bench": Command(
        "batchmaker.cli.bench.command", "bench",
        "Measure policies against each other and against the best of plain torch, all in one run.",
    ),
    "profile": Command(
        "batchmaker.cli.profile", "profile",
        "Measure every cell of a model at every batch size, and choose where larger batches stop paying.",
    ),
    "simulate": Command(
        "batchmaker.cli.simulate.command", "simulate",
        "Compare policies under a virtual clock: the scheduler and policies that serve, with a model of cost as "
        "device.",
    ),
    "tune": Command(
        "batchmaker.cli.tune", "tune_command", "Choose how a recurrent layer's persistent kernel is laid onto a GPU."
    ),
}  # fmt: skip
"""Commands in the order of `batchmaker --help`; those of other distributions follow. Each is loaded when it is called:
most need torch, some the lab."""

_IN_PAPERS: Final = frozenset({"learn", "npu", "plan"})

_HELP: Final = {"help_option_names": ["-h", "--help"]}


@final
class _Commands(TyperGroup):
    """The commands. Listing them loads none. Contexts are those of typer's own click."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name) or commands().get(cmd_name)
        if command is None:
            if cmd_name in _IN_PAPERS:
                raise OptionError(f"`batchmaker {cmd_name}` is in a distribution of its own: {PAPERS}")
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=command.short, rich_markup_mode="rich")
        with collector_paused():
            module = importlib.import_module(command.module)
        one = typer.Typer(rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False)
        one.command(name=cmd_name, context_settings=_HELP)(expanded(getattr(module, command.function)))
        return typer.main.get_command(one)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = typer.Typer(
    name="batchmaker",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)


def _show_version(show: bool) -> None:
    if show:
        typer.echo(f"batchmaker {batchmaker.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Continuous batching for any dynamic PyTorch model: recurrent networks, translation, trees.

    [bold]Start here[/bold]

    batchmaker demo                                        see cellular and padded batching side by side

    batchmaker run lstm --input text.txt --output out.jsonl    push a file through a model

    batchmaker serve lstm                                  answer requests over HTTP

    batchmaker bench lstm --seconds 10                     measure policies on this machine

    batchmaker profile lstm                                find good batch sizes

    batchmaker tune lstm --hidden 256 --batch 10 --arch sm_90    lay a recurrent kernel onto a GPU

    batchmaker simulate lstm --latency-table profile.json --rate 500    compare policies under a virtual clock
    """


def main() -> None:
    """Run the command line. A batchmaker error is one line on standard error and exit status 2."""
    if sys.stderr.isatty():
        _tell_of_first_start()
    try:
        app()
    except BatchmakerError as error:
        from batchmaker.cli.options import err  # imports torch, which commands have already loaded

        err().print(f"[bold red]error:[/bold red] {_plain(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _tell_of_first_start() -> None:
    """Let whoever sits before a terminal know what takes so long."""
    logger = logging.getLogger("batchmaker.engine.setup")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)


def _plain(text: str) -> str:
    """Escape square brackets, which are markup."""
    return text.replace("[", "\\[")
