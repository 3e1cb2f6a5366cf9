"""Models whose clients send something else than the network takes: `encode` and `decode` of a signature."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from served_models import Spelled

from batchmaker.server.faults import ServiceError
from batchmaker.server.formats.messages import InferRequest
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.limits import Limits
from batchmaker.server.service.engine_port import EngineOptions
from batchmaker.server.service.served_model import ServedModel


def spelled(word):
    return InferRequest((Tensor("word", "BYTES", np.array([word.encode()], object)),))


@pytest.fixture
def served():
    return ServedModel("spelled", "1", Spelled(), EngineOptions(threads=1), Limits(), 10)


def answers(served, call):
    async def body():
        try:
            return await call()
        finally:
            await served.close(5.0)

    return asyncio.run(body())


def test_the_network_gets_what_encode_makes_and_the_client_what_decode_makes(served):
    async def call():
        return await asyncio.gather(*(served.infer(spelled(word)) for word in ("b", "cc", "abcb")))

    found = answers(served, call)
    assert [answer.outputs[0].data.tolist() for answer in found] == [[b"b 1"], [b"cc 4"], [b"abcb 4"]]


def test_what_is_decoded_is_streamed_as_a_whole(served):
    async def call():
        return [part async for part in served.stream(spelled("cc"))]

    (part,) = answers(served, call)
    assert part.outputs[0].data.tolist() == [b"cc 4"]


def test_a_request_that_cannot_be_encoded_is_the_clients_fault_and_a_result_that_cannot_be_decoded_the_models(
    served, caplog
):
    async def call():
        return await asyncio.gather(
            *(served.infer(spelled(word)) for word in ("axb", "bc", "c")), return_exceptions=True
        )

    wrong, broken, good = answers(served, call)
    assert isinstance(wrong, ServiceError)
    assert (wrong.kind.name, broken.kind.name) == ("INVALID", "INTERNAL")
    assert good.outputs[0].data.tolist() == [b"c 2"]
    assert "secret" not in str(broken)
    assert "axb" not in str(wrong)
    said = [record.error for record in caplog.records]
    assert any("encode raised ValueError" in line for line in said)
    assert any("decode raised KeyError" in line for line in said)
    assert served.statistics.accepted == 2
