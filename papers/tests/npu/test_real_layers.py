"""The products that SCALE-Sim was asked about are those that the modules themselves make."""

from __future__ import annotations

import pytest
import torch
from scalesim_layers import LAYERS, Convolution, Layer
from torch import nn

from batchmaker.graph.spec import ValueSpec
from batchmaker_papers.npu.accelerator import Activations, SharedGemm, Weights
from batchmaker_papers.npu.operations import operations_of


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_a_module_on_the_meta_device_makes_the_product_of_its_layer(layer: Layer):
    shape, gemm = layer.shape, layer.shape.gemm
    with torch.device("meta"):
        if isinstance(shape, Convolution):
            module: nn.Module = nn.Conv2d(shape.channels, shape.filters, shape.window, shape.stride, bias=False)
            row = (shape.channels, shape.size, shape.size)
        else:
            module, row = nn.Linear(shape.k, shape.n, bias=False), (shape.m, shape.k)
    product, moved, weights = operations_of(module, [ValueSpec(row, "float32")])
    assert product == SharedGemm(gemm.m, gemm.k, gemm.n)
    assert moved == Activations(torch.Size(row).numel(), gemm.m * gemm.n)
    assert weights == Weights(gemm.k * gemm.n)
