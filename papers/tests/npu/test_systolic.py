"""Cycle counts of matrix products, against SCALE-Sim's own."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scalesim_layers import LAYERS, Layer, Product

from batchmaker.errors import OptionError
from batchmaker_papers.npu.systolic import Gemm, dataflow_named, scalesim_os, scalesim_ws, tpu

SIZES = st.integers(1, 5000)
ARRAYS = st.integers(1, 256)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_cycles_are_those_that_scalesim_counted(layer: Layer):
    assert layer.shape.gemm.cycles(scalesim_ws) == layer.ws
    assert layer.shape.gemm.cycles(scalesim_os) == layer.os


def test_there_are_more_than_twenty_different_layers():
    assert len({layer.shape.gemm for layer in LAYERS}) > 20


RUN_SCALESIM = (
    "import sys; from scalesim.scale_sim import scalesim; "
    "scalesim(True, False, *sys.argv[1:4], {gemm}).run_scale(sys.argv[4])"
)
CONFIG = """
[general]
run_name = run
[architecture_presets]
ArrayHeight: 128
ArrayWidth: 128
IfmapSramSzkB: 8192
FilterSramSzkB: 8192
OfmapSramSzkB: 8192
IfmapOffset: 0
FilterOffset: 100000000
OfmapOffset: 200000000
Dataflow: {dataflow}
Bandwidth: 10
ReadRequestBuffer: 32
WriteRequestBuffer: 32
[layout]
IfmapCustomLayout: False
FilterCustomLayout: False
IfmapSRAMBankBandwidth: 10
IfmapSRAMBankNum: 10
IfmapSRAMBankPort: 2
FilterSRAMBankBandwidth: 10
FilterSRAMBankNum: 10
FilterSRAMBankPort: 2
[sparsity]
SparsitySupport: false
[run_presets]
InterfaceBandwidth: CALC
UseRamulatorTrace: False
"""


def scalesim_cycles(folder: Path, layer: Layer, dataflow: str) -> int:
    """Run SCALE-Sim on one layer, where it finds the bandwidth that it needs, so that nothing stalls."""
    config, topology, layout = folder / "scale.cfg", folder / "topology.csv", folder / "layout.csv"
    config.write_text(CONFIG.format(dataflow=dataflow))
    topology.write_text("a header,\n" + ",".join(map(str, ("layer", *layer.shape.topology))) + ",\n")
    layout.write_text("a header,\n")
    program = RUN_SCALESIM.format(gemm=isinstance(layer.shape, Product))
    arguments = [str(path) for path in (config, topology, layout, folder / "out")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True)
    with (folder / "out" / "run" / "COMPUTE_REPORT.csv").open() as report:
        row = next(csv.DictReader(report, skipinitialspace=True))
    assert int(row["Stall Cycles"]) == 0
    return int(row["Total Cycles"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("scalesim") is None, reason="needs the package scalesim 3.0.0")
@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) >= "2.0.0", reason="scalesim 3.0.0 needs numpy 1.26")
@pytest.mark.parametrize("dataflow", ["ws", "os"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_scalesim_itself_counts_the_same(tmp_path, layer: Layer, dataflow: str):
    assert scalesim_cycles(tmp_path, layer, dataflow) == layer.shape.gemm.cycles(dataflow_named(dataflow))


@given(m=SIZES, k=SIZES, n=SIZES, array=ARRAYS, flow=st.sampled_from([scalesim_ws, scalesim_os, tpu(), tpu(1.0)]))
def test_no_dataflow_is_faster_than_a_full_array(m: int, k: int, n: int, array: int, flow):
    cycles = Gemm(m, k, n).cycles(flow, array) + 1  # SCALE-Sim numbers cycles from 0 and reports the last
    assert cycles * array * array >= m * k * n


@given(m=SIZES, k=SIZES, n=SIZES, flow=st.sampled_from([scalesim_ws, scalesim_os, tpu(), tpu(1.0)]))
def test_all_batch_sizes_at_once_are_each_by_itself(m: int, k: int, n: int, flow):
    sizes = np.arange(1, 6)
    at_once = flow(sizes * m, k, n, np.ones_like(sizes), 128)
    assert at_once.tolist() == [Gemm(size * m, k, n).cycles(flow) for size in sizes.tolist()]


def test_the_next_tile_is_loaded_while_the_present_one_is_used():
    one_tile, two_tiles = Gemm(500, 128, 128).cycles(tpu(4)), Gemm(500, 256, 128).cycles(tpu(4))
    assert one_tile == 32 + 500 + 254
    assert two_tiles - one_tile == 500
    assert Gemm(1, 256, 128).cycles(tpu(4)) == 32 + 2 * 32 + 254  # loading is what takes the time


def test_products_in_a_row_load_each_others_tiles_ahead():
    m, count = np.array([1]), np.array([8])
    assert tpu(4)(m, 64, 10, count, 128).item() == 32 + 8 * 32 + 254
    for flow in (scalesim_ws, scalesim_os):
        assert flow(m, 64, 10, count, 128).item() == 8 * Gemm(1, 64, 10).cycles(flow)


def test_counts_are_exact_however_large():
    huge = 10**15
    assert Gemm(huge, huge, 128).cycles(scalesim_ws) == -(-huge // 128) * (huge + 382) - 1


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_products_of_nothing_are_refused(sizes):
    with pytest.raises(OptionError, match="at least 1"):
        Gemm(*sizes)


@pytest.mark.parametrize("rho", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_never_load_are_refused(rho):
    with pytest.raises(OptionError, match="rho"):
        tpu(rho)


def test_unknown_dataflow_is_answered_with_the_known_ones():
    with pytest.raises(OptionError, match="known: os, tpu, ws"):
        dataflow_named("is")
