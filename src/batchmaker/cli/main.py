"""The command line: `batchmaker COMMAND ...`."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

import batchmaker
from batchmaker.cli import options
from batchmaker.cli.bench.command import bench
from batchmaker.cli.demo.command import demo
from batchmaker.cli.learn.command import learn
from batchmaker.cli.npu import npu
from batchmaker.cli.plan import plan
from batchmaker.cli.profile import profile
from batchmaker.cli.run import run
from batchmaker.cli.serve import serve
from batchmaker.cli.simulate.command import simulate
from batchmaker.cli.tune import tune_command
from batchmaker.errors import BatchmakerError

app = typer.Typer(
    name="batchmaker",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
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

    batchmaker plan gatewise --cell lstm                   what batching inside a cell gains

    batchmaker npu 49 4608 512 --dataflow ws               cycles of a matrix product on an NPU

    batchmaker simulate lstm --npu --rate 500              compare policies under a virtual clock

    batchmaker learn treelstm --data trees.txt --out policy.json    learn which cell to run next
    """


app.command()(demo)
app.command()(run)
app.command()(serve)
app.command()(bench)
app.command()(profile)
app.command()(npu)
app.command()(plan)
app.command()(simulate)
app.command()(learn)
app.command(name="tune")(tune_command)


def main() -> None:
    """Run the command line. Errors of batchmaker's own are one line on standard error and exit status 2."""
    if sys.stderr.isatty():
        _tell_of_first_start()
    try:
        app()
    except BatchmakerError as error:
        options.err().print(f"[bold red]error:[/bold red] {_plain(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _tell_of_first_start() -> None:
    """Let whoever sits before a terminal know what takes so long."""
    logger = logging.getLogger("batchmaker.engine.first_start")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)


def _plain(text: str) -> str:
    """Keep square brackets in a message from being read as markup."""
    return text.replace("[", "\\[")
