"""Ray Serve with the benchmarks' tasks, where it is installed: python ray_app.py TASK PORT."""

from __future__ import annotations

import sys
import time

import numpy as np
import ray
import torch
from padded_lstm import PaddedLstm
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response


@serve.deployment(
    max_ongoing_requests=2048, ray_actor_options={"num_cpus": 1}, logging_config={"enable_access_log": False}
)
class Trivial:
    """n -> n + 1, in batches."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002, max_concurrent_batches=1)
    async def predict(self, inputs: list[int]) -> list[int]:
        return (torch.tensor(inputs) + 1).tolist()

    async def __call__(self, request: Request) -> JSONResponse:
        return JSONResponse({"output": [await self.predict((await request.json())["input"][0])]})


@serve.deployment(
    max_ongoing_requests=2048, ray_actor_options={"num_cpus": 1}, logging_config={"enable_access_log": False}
)
class Lstm:
    """Tokens -> the last state, by nn.LSTM over padded batches."""

    def __init__(self, packed: bool) -> None:
        torch.set_num_threads(1)
        self.model = PaddedLstm(packed=packed)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002, max_concurrent_batches=1)
    async def predict(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return self.model(inputs)

    async def __call__(self, request: Request) -> Response:
        state = await self.predict(np.array((await request.json())["input"], np.int64))
        return Response(state.tobytes(), media_type="application/octet-stream")


TASKS = {
    "trivial": lambda: Trivial.bind(),
    "lstm-padded": lambda: Lstm.bind(False),
    "lstm-packed": lambda: Lstm.bind(True),
}

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", configure_logging=True)
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(sys.argv[2])}, logging_config={"enable_access_log": False}
    )
    serve.run(TASKS[sys.argv[1]](), route_prefix="/predict")
    while True:
        time.sleep(60)
