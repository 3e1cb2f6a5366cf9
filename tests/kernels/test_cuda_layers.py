"""Which kernel a call of a layer gets, with fakes for the compiler and for what loads kernels."""

from __future__ import annotations

import msgspec
import pytest
import torch

from batchmaker.errors import DeviceError
from batchmaker.kernels import launch
from batchmaker.kernels.cache import CacheDirectory
from batchmaker.kernels.configuration import Problem
from batchmaker.kernels.devices import H200
from batchmaker.kernels.fallback import SteppedLayer
from batchmaker.kernels.found import FoundDevice
from batchmaker.kernels.launch import CudaLayers
from batchmaker.kernels.layer import LayerWeights
from batchmaker.kernels.nvrtc import Compiled
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.template import KernelConfig
from batchmaker.kernels.tuner import DeviceIdentity, winner_name

IDENTITY = DeviceIdentity("H200", 132, "580.1")


class FakeCompiler:
    version = "13.0"

    def __init__(self):
        self.asked = []

    def compile(self, source, name_expression, arch):
        self.asked.append((name_expression, arch))
        return Compiled(arch, b"", name_expression, 100, 0, 0)


class Plain:
    """Records by doing work again."""

    num_recorded = 0

    def compute(self, work):
        return work()

    def record(self, work):
        self.num_recorded += 1
        return work


class LoadedInMemory:
    """Computes with plain operations what the kernel would, and says which one it is."""

    made = ()

    def __init__(self, config, compiled, weights):
        assert compiled.symbol == config.name_expression
        LoadedInMemory.made += (config,)
        self.run = SteppedLayer(weights).run_rows


@pytest.fixture
def layers(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "LoadedKernel", LoadedInMemory)
    monkeypatch.setattr(LoadedInMemory, "made", ())
    return CudaLayers(FoundDevice(IDENTITY, "sm_90", H200), FakeCompiler(), CacheDirectory(tmp_path), Plain())


def call(layer, batch, hidden):
    h, c = torch.ones(batch, hidden), torch.ones(batch, hidden)
    layer.run(torch.zeros(batch, 4 * hidden), range(batch), range(batch), [1] * batch, h, c)
    return c


def test_a_kernel_is_loaded_once_for_each_power_of_two_of_the_batch(layers):
    layer = layers.layer(LayerWeights("lstm", torch.zeros(256, 64), None))
    for batch in (3, 4, 4, 5, 8, 1):
        assert (call(layer, batch, 64) == 0.5).all()
    assert len(LoadedInMemory.made) == 3
    assert {(config.cell, config.dtype, config.hidden) for config in LoadedInMemory.made} == {("lstm", "float32", 64)}


def test_a_layer_that_no_kernel_holds_replays_recorded_steps_and_says_so_once(layers, caplog):
    layer = layers.layer(LayerWeights("lstm", torch.zeros(8192, 2048), None))
    for _ in range(2):
        assert (call(layer, 2, 2048) == 0.5).all()
    assert LoadedInMemory.made == ()
    (record,) = caplog.records
    assert "no persistent kernel fits" in record.getMessage()
    assert layers.recorder.num_recorded == 1


def test_weights_on_the_host_are_refused_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(launch, "found_device", lambda ordinal: FoundDevice(IDENTITY, "sm_90", H200))
    with pytest.raises(DeviceError, match=r"the weights are on cpu; move the module there \(module.cuda\(\)\)"):
        CudaLayers.for_device(torch.device("cpu"))


def weights(hidden, dtype=torch.float32):
    return LayerWeights("lstm", torch.zeros(4 * hidden, hidden, dtype=dtype), None)


@pytest.mark.slow
def test_a_task_runs_at_once_where_the_model_says_that_it_is_faster(layers):
    kernel, least = layers.at_once(weights(64), rows=4, steps=8)
    assert isinstance(kernel, LoadedInMemory)
    assert least == 2
    kernel, least = layers.at_once(weights(1024), rows=256, steps=8)
    assert 2 < least <= 8
    made = len(LoadedInMemory.made)
    assert layers.at_once(weights(1024), rows=256, steps=2) is None
    assert layers.at_once(weights(1024), rows=1024, steps=8) is None  # a library's product is faster
    assert layers.at_once(weights(2048), rows=1, steps=8) is None  # no kernel holds it
    assert layers.at_once(weights(64, torch.float64), rows=1, steps=8) is None
    assert len(LoadedInMemory.made) == made


def test_a_task_runs_at_once_where_the_tuner_has_measured_a_kernel(layers, tmp_path):
    config = KernelConfig("lstm", "float32", "grid", 1024, 1, 16, 16, 16, 4, 7)
    problem = Problem(cell="lstm", dtype="float32", hidden=1024, batch=1024)
    name = winner_name(problem, IDENTITY, kernel_source())
    CacheDirectory(tmp_path).write(name, msgspec.json.encode(config))
    _, least = layers.at_once(weights(1024), rows=1024, steps=8)
    assert least == 2
    assert LoadedInMemory.made[-1] == config
