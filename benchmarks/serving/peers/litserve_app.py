"""LitServe with the benchmarks' tasks, where it is installed: python litserve_app.py TASK PORT."""

from __future__ import annotations

import sys

import litserve as ls
import numpy as np
import torch
from fastapi import Response
from padded_lstm import PaddedLstm


class Trivial(ls.LitAPI):
    """n -> n + 1, in batches."""

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)

    def decode_request(self, request: dict) -> int:
        return request["input"][0]

    def batch(self, inputs: list[int]) -> torch.Tensor:
        return torch.tensor(inputs)

    def predict(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + 1

    def unbatch(self, output: torch.Tensor) -> list[int]:
        return output.tolist()

    def encode_response(self, output: int) -> dict:
        return {"output": [output]}


class LstmPadded(ls.LitAPI):
    """Tokens -> the last state, by nn.LSTM over padded batches."""

    packed = False

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.model = PaddedLstm(packed=self.packed)

    def decode_request(self, request: dict) -> np.ndarray:
        return np.array(request["input"], np.int64)

    def batch(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return inputs

    def predict(self, batch: list[np.ndarray]) -> list[np.ndarray]:
        return self.model(batch)

    def unbatch(self, output: list[np.ndarray]) -> list[np.ndarray]:
        return output

    def encode_response(self, output: np.ndarray) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


class LstmPacked(LstmPadded):
    """The same, packed."""

    packed = True


TASKS = {"trivial": Trivial, "lstm-padded": LstmPadded, "lstm-packed": LstmPacked}

if __name__ == "__main__":
    api = TASKS[sys.argv[1]](max_batch_size=64, batch_timeout=0.002)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=120, fast_queue=False)
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, generate_client_file=False, log_level="error"
    )
