"""Operations are read off the module that runs, with or without weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.shapes import ShapeRegistry
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding
from batchmaker_papers.npu import Activations, OwnGemm, SharedGemm, Streamed, VectorWork, Weights
from batchmaker_papers.npu.operations import operations_of, registry_operations


def rows(*shapes: tuple[int, ...], dtype: str = "float32") -> list[ValueSpec]:
    return [ValueSpec(shape, dtype) for shape in shapes]


TOKEN = ValueSpec((), "int64")


class Calls(nn.Module):
    """A module whose forward is a function, with weights by name."""

    def __init__(self, function, **weights: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            self.register_buffer(name, weight)

    def forward(self, *values: Tensor):
        return self.function(*self.buffers(), *values)


@pytest.fixture(params=["cpu", "meta"], autouse=True)
def _device(request):
    """Everything holds for weights that are there and for weights on the meta device alike."""
    with torch.device(request.param):
        yield


def kinds(operations, kind):
    return [operation for operation in operations if isinstance(operation, kind)]


def test_padding_counts_in_pixels_not_in_values_read():
    found = operations_of(nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), rows((3, 224, 224)))
    assert found[:2] == (SharedGemm(112 * 112, 147, 64), Activations(3 * 224 * 224, 64 * 112 * 112))


def test_groups_are_products_of_their_own():
    found = operations_of(nn.Conv2d(8, 16, 3, groups=2, padding=1, bias=False), rows((8, 10, 10)))
    assert found == (SharedGemm(100, 36, 8, 2), Activations(800, 1600), Weights(16 * 4 * 9))


def test_depthwise_convolutions_are_work_for_the_vector_unit():
    found = operations_of(nn.Conv2d(8, 8, 3, groups=8, padding=1, bias=False), rows((8, 10, 10)))
    assert found == (Activations(800, 800), VectorWork(800 * 9), Weights(72))


def test_transposed_convolutions_multiply_their_inputs():
    found = operations_of(nn.ConvTranspose2d(8, 4, 3, 2, bias=False), rows((8, 10, 10)))
    assert kinds(found, SharedGemm) == [SharedGemm(100, 8, 36)]


def test_linear_layers_share_their_weights_over_rows_and_positions():
    assert operations_of(nn.Linear(32, 64), rows((32,))) == (
        SharedGemm(1, 32, 64), Activations(32, 64), Weights(32 * 64 + 64),
    )  # fmt: skip
    assert kinds(operations_of(nn.Linear(32, 64), rows((7, 32))), SharedGemm) == [SharedGemm(7, 32, 64)]


def test_products_of_two_values_of_a_request_share_nothing():
    found = operations_of(Calls(torch.bmm), rows((5, 8), (8, 6)))
    assert found == (OwnGemm(1, 5, 8, 6), Activations(40 + 48, 30))


def test_a_weight_spread_over_the_batch_is_one_weight():
    module = Calls(lambda weight, x: torch.matmul(x, weight), weight=torch.empty(8, 6))
    assert kinds(operations_of(module, rows((5, 7, 8))), SharedGemm) == [SharedGemm(35, 8, 6)]
    left = Calls(lambda weight, x: torch.matmul(weight, x), weight=torch.empty(6, 8))
    found = operations_of(left, rows((8, 3)))
    assert kinds(found, SharedGemm) == [SharedGemm(3, 8, 6)]
    assert kinds(found, Weights) == [Weights(48)]


def test_weights_of_their_own_for_each_head_are_products_of_their_own():
    module = Calls(lambda weight, x: torch.bmm(x[0], weight), weight=torch.empty(4, 8, 6))
    found = operations_of(
        Calls(lambda weight, x: module.function(weight, x)[None], weight=module.weight), rows((4, 5, 8))
    )
    assert kinds(found, SharedGemm) == [SharedGemm(5, 8, 6, 4)]


def test_lstm_cells_are_two_products_and_their_gates():
    found = operations_of(nn.LSTMCell(64, 128), rows((64,), (128,), (128,)))
    assert sorted(kinds(found, SharedGemm), key=lambda gemm: gemm.k) == [
        SharedGemm(1, 64, 512),
        SharedGemm(1, 128, 512),
    ]
    assert kinds(found, VectorWork) == [VectorWork(512 + 9 * 128)]  # the sum; 5 nonlinear, 3 products, 1 sum
    assert kinds(found, Weights) == [Weights(512 * (64 + 128) + 2 * 512)]


def test_whole_recurrent_layers_are_looked_into():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(64, 128, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    found = operations_of(Layer(), rows((5, 64)))
    multiplications = sum(gemm.m * gemm.k * gemm.n * gemm.count for gemm in kinds(found, SharedGemm))
    # torch may take the first state, zeros, for a weight, and so leave its product out
    assert multiplications in (5 * 512 * 64 + 5 * 512 * 128, 5 * 512 * 64 + 4 * 512 * 128)


def test_an_encoder_layer_has_attention_without_shared_weights():
    encoder = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    found = operations_of(encoder, rows((10, 64)))
    assert sorted((gemm.k, gemm.n) for gemm in kinds(found, SharedGemm)) == [(64, 64), (64, 192), (64, 256), (256, 64)]
    assert kinds(found, OwnGemm) == [OwnGemm(4, 10, 16, 10), OwnGemm(4, 10, 10, 16)]
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    assert kinds(found, Weights) == [Weights(parameters)]


def test_tables_move_only_the_rows_that_are_looked_up():
    assert operations_of(nn.Embedding(30_000, 64), [TOKEN]) == (Streamed(64),)
    assert operations_of(nn.Embedding(30_000, 64), rows((9,), dtype="int64")) == (Streamed(9 * 64),)


def test_writing_into_a_cache_moves_only_what_is_written():
    def write(cache: Tensor, value: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        put = cache.index_put((torch.arange(cache.shape[0], device=cache.device), at), value)
        spread = at[:, None, None].expand(-1, 1, value.shape[-1])
        return put, cache.scatter(1, spread, value[:, None])

    found = operations_of(Calls(write), [*rows((1000, 8), (8,)), TOKEN])
    assert found == (Activations(8, 8), Activations(8, 8))


def test_softmax_and_norms_take_several_passes():
    assert kinds(operations_of(nn.Softmax(-1), rows((100,))), VectorWork) == [VectorWork(400)]
    assert kinds(operations_of(nn.LayerNorm(100), rows((100,))), VectorWork) == [VectorWork(400)]


def test_work_on_single_values_is_fused_with_what_made_the_first():
    assert operations_of(nn.ReLU(inplace=True), rows((100,))) == (VectorWork(100),)
    assert operations_of(Calls(torch.add), rows((100,), (100,))) == (Activations(100, 0), VectorWork(100))


def test_pooling_looks_at_its_whole_window():
    assert kinds(operations_of(nn.MaxPool2d(3, 2, 1), rows((4, 8, 8))), VectorWork) == [VectorWork(4 * 16 * 9)]
    assert kinds(operations_of(nn.AdaptiveAvgPool2d(1), rows((4, 8, 8))), VectorWork) == [VectorWork(4 * 64)]


def test_shapes_without_work_are_free():
    assert operations_of(Calls(lambda x: x.view(x.shape[0], 4, 5).transpose(1, 2)[:, 1:]), rows((20,))) == ()


def test_a_weight_that_is_used_twice_is_read_once():
    module = Calls(lambda weight, x: F.linear(F.linear(x, weight), weight), weight=torch.empty(16, 16))
    found = operations_of(module, rows((16,)))
    assert kinds(found, Weights) == [Weights(256)]
    assert len(kinds(found, SharedGemm)) == 2


def test_what_is_made_of_weights_alone_costs_no_request_anything():
    module = Calls(lambda a, b, x: F.linear(x, a @ b), a=torch.empty(6, 50), b=torch.empty(50, 8))
    assert kinds(operations_of(module, rows((8,))), SharedGemm) == [SharedGemm(1, 8, 6)]


def test_what_forward_makes_itself_is_on_the_device_of_the_weights():
    module = Calls(lambda weight, x: x * weight + torch.arange(8), weight=torch.empty(8))
    assert kinds(operations_of(module, rows((8,))), VectorWork) == [VectorWork(16)]


def test_an_example_batch_says_what_a_row_is():
    assert operations_of(nn.Linear(32, 64), [torch.zeros(5, 32)]) == operations_of(nn.Linear(32, 64), rows((32,)))


def test_modules_that_do_not_fit_are_answered_with_advice():
    with pytest.raises(ModelError, match=r"module 'Linear'.*cannot be called with the shapes"):
        operations_of(nn.Linear(32, 64), rows((31,)))
    with pytest.raises(ModelError, match="depend on values"):
        operations_of(Calls(lambda x: x if bool(x.sum() > 0) else -x), rows((3,)))
    with pytest.raises(ShapeError, match="output 0"):
        operations_of(Calls(lambda x: x.sum()), rows((3,)))


def test_weights_in_an_unknown_operator_are_refused_rather_than_forgotten():
    module = Calls(lambda weight, x: torch.cdist(x, weight), weight=torch.empty(50, 8))
    with pytest.raises(ModelError, match="weights"):
        operations_of(module, rows((4, 8)))


class Chain(bm.Model):
    example_request = (1, 2, 3)

    def __init__(self) -> None:
        self.embed = bm.Cell(nn.Embedding(100, 8))
        self.step = bm.Cell(nn.LSTMCell(8, 16))

    def unfold(self, words):
        return self.step.run(self.embed.map(list(words)))[0]


def test_a_model_is_unfolded_without_being_bound():
    registry = ShapeRegistry()
    Unfolding(Chain(), registry, Chain.example_request).start()
    assert [cell.name for cell in registry.types] == ["embed", "step"]
    operations = registry_operations(registry)
    assert operations["embed"] == (Streamed(8),)
    assert kinds(operations["step"], SharedGemm) == [SharedGemm(1, 16, 64), SharedGemm(1, 8, 64)]
    assert list(registry.num_step_inputs.values()) == [1]


def test_bound_cells_have_the_operations_of_their_modules():
    with torch.device("cpu"):
        bound, shapes = CellRegistry(), ShapeRegistry()
        Unfolding(Chain(), bound, Chain.example_request).start()
        Unfolding(Chain(), shapes, Chain.example_request).start()
        assert registry_operations(bound) == registry_operations(shapes)
