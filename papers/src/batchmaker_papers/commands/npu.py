"""`batchmaker npu`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from batchmaker.cli import options
from batchmaker_papers.npu.accelerator import Npu
from batchmaker_papers.npu.systolic import ARRAY, RHO, Gemm, dataflow_named


def npu(
    m: Annotated[int, typer.Argument(min=1, help="Rows of the input: batch times rows of one request.")],
    k: Annotated[int, typer.Argument(min=1, help="Columns of the input, rows of the weights.")],
    n: Annotated[int, typer.Argument(min=1, help="Columns of the weights.")],
    dataflow: Annotated[
        str, typer.Option(help="ws or os, as SCALE-Sim counts them; tpu: weights loaded ahead of their use.")
    ] = "ws",
    rho: Annotated[float, typer.Option(help="tpu: weight rows loaded per cycle.")] = RHO,
    array: Annotated[int, typer.Option(min=1, help="Rows and columns of the systolic array.")] = ARRAY,
    json: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
) -> None:
    """Count the cycles of one matrix product [M, K] x [K, N] on a systolic array.

    A convolution is such a product by im2col: M output pixels, K values under the filter, N filters. The last line is
    the number of cycles. Memory traffic is not counted.

    [bold]Examples[/bold]

    batchmaker npu 49 4608 512 --dataflow ws

    batchmaker npu 64 2048 4096 --dataflow tpu --rho 4
    """
    options.check_writable(json)
    accelerator = Npu(array=array)
    cycles = Gemm(m, k, n).cycles(dataflow_named(dataflow, rho), array)
    used = m * k * n / (cycles * array * array)
    seconds = cycles / accelerator.clock_hz
    table = Table(title=f"[{m}, {k}] x [{k}, {n}] on {array} x {array}, {dataflow}", title_style="bold")
    for name in ("cycles", f"us at {accelerator.clock_hz / 1e6:.0f} MHz", "of the array in use"):
        table.add_column(name, justify="right")
    table.add_row(f"{cycles:,}", f"{1e6 * seconds:,.3f}", f"{used:.1%}")
    options.out().print(table)
    if json is not None:
        facts = {"m": m, "k": k, "n": n, "array": array, "dataflow": dataflow}
        if dataflow == "tpu":
            facts["rho"] = rho
        options.write_json(json, {**facts, "cycles": cycles, "seconds": seconds, "used": used})
    typer.echo(cycles)
