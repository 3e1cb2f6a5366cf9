"""One LSTM in ONNX Runtime, as people who serve one request at a time have it: the file an exporter writes, one thread.

Only imported where it is measured: onnx and onnxruntime are optional (`pip install 'batchmaker[onnx]'`).
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

OPSET: Final = 17
IR_VERSION: Final = 8


@final
class OnnxLstm:
    """An embedding and an LSTM of the same weights: words [words] -> the last h, [hidden].

    Always float32: ONNX Runtime has no LSTM of bfloat16 on the CPU, so bfloat16 weights are widened.
    """

    def __init__(self, embedding: nn.Embedding, cell: nn.LSTMCell) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        model = exported(embedding, cell).SerializeToString()
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def alone(self, words: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the last h of one request, [hidden]."""
        (h,) = self._session.run(None, {"words": words})
        return h


def exported(embedding: nn.Embedding, cell: nn.LSTMCell) -> onnx.ModelProto:
    """Return the graph: a look-up, one LSTM, and its last h. words: int64 [words]; h: float32 [hidden]."""
    hidden = cell.hidden_size
    weights = {
        "embedding": _array(embedding.weight),
        "w": _in_order(cell.weight_ih, hidden)[None],
        "r": _in_order(cell.weight_hh, hidden)[None],
        "b": np.concatenate((_in_order(cell.bias_ih, hidden), _in_order(cell.bias_hh, hidden)))[None],
        "batch": np.array([1], np.int64),
        "parts": np.array([0, 1], np.int64),
    }
    nodes = [
        helper.make_node("Gather", ["embedding", "words"], ["looked_up"]),
        helper.make_node("Unsqueeze", ["looked_up", "batch"], ["x"]),
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["", "last"], hidden_size=hidden),
        helper.make_node("Squeeze", ["last", "parts"], ["h"]),
    ]
    graph = helper.make_graph(
        nodes, "lstm",
        [helper.make_tensor_value_info("words", TensorProto.INT64, ["words"])],
        [helper.make_tensor_value_info("h", TensorProto.FLOAT, [hidden])],
        [numpy_helper.from_array(np.ascontiguousarray(values), name) for name, values in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    return model


def _in_order(values: Tensor, hidden: int) -> NDArray[np.float32]:
    """Return gates in ONNX's order i, o, f, c from torch's i, f, g, o. values: [4 hidden, ...]."""
    i, f, g, o = _array(values).reshape(4, hidden, *values.shape[1:])
    return np.concatenate((i, o, f, g))


def _array(values: Tensor) -> NDArray[Any]:
    return values.detach().float().numpy()
