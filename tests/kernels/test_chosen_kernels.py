"""What is chosen without a GPU compiles within its registers, spills nothing and fits the device."""

from __future__ import annotations

import pytest

from batchmaker.kernels.configuration import Problem, register_limit
from batchmaker.kernels.devices import modelled
from batchmaker.kernels.nvrtc import Nvrtc
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.tuner import compiled_best
from covering import covering

TABLE_1 = [(hidden, batch) for hidden in (64, 256, 1024) for batch in (1, 10, 20, 64)]


class Once:
    """Compiles each kernel once, however often it is chosen."""

    def __init__(self):
        self.nvrtc = Nvrtc()
        self.version = self.nvrtc.version
        self.known = {}

    def compile(self, *kernel):
        if kernel not in self.known:
            self.known[kernel] = self.nvrtc.compile(*kernel)
        return self.known[kernel]


@pytest.fixture(scope="module")
def compiler():
    return Once()


def check(compiler, cell, dtype, hidden, batch, arch):
    device = modelled(arch)
    asked = Problem(cell=cell, dtype=dtype, hidden=hidden, batch=batch)
    config, compiled = compiled_best(asked, device, kernel_source(), compiler)
    assert compiled.spill_bytes == 0
    assert compiled.registers <= register_limit(config, device)
    assert compiled.shared_bytes + config.shared_bytes <= device.shared_bytes
    assert compiled.arch == arch


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "gru-before", "gru-before-once"])
def test_a_layer_of_each_cell(compiler, cell, arch):
    check(compiler, cell, "float32", 256, 10, arch)


@pytest.mark.parametrize(("dtype", "arch"), covering(["bfloat16", "float16"], ["sm_90", "sm_80"]))
def test_a_layer_of_each_type(compiler, dtype, arch):
    check(compiler, "lstm", dtype, 1024, 64, arch)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "dtype"), [("lstm", "float32"), ("gru", "bfloat16")])
@pytest.mark.parametrize(("hidden", "batch"), TABLE_1)
def test_the_sizes_of_table_1_on_hopper(compiler, cell, dtype, hidden, batch):
    check(compiler, cell, dtype, hidden, batch, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "batch"), [(64, 10), (256, 64), (1024, 20)])
@pytest.mark.parametrize("cell", ["lstm", "gru-before"])
def test_sizes_of_table_1_on_ampere(compiler, cell, hidden, batch):
    check(compiler, cell, "float32", hidden, batch, "sm_80")
