"""What unmodified stubs of tritonclient ask a fleet that serves `scales` and `counter`."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import tritonclient.grpc as triton

LIMIT_S = 120.0


def given(*numbers):
    tensor = triton.InferInput("input_0", [len(numbers)], "INT64")
    tensor.set_data_from_numpy(np.array(numbers))
    return [tensor]


def ask(address):
    client = triton.InferenceServerClient(address)
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("scales")
        assert client.get_model_metadata("scales").name == "scales"
        single = [client.infer("scales", given(n)).as_numpy("output_0").item() for n in range(6)]
        chunks = [
            client.infer("scales", given(n), sequence_id=9, sequence_start=n == 1, sequence_end=n == 3)
            for n in (1, 2, 3)
        ]
        with pytest.raises(triton.InferenceServerException, match="nothing") as missing:
            client.infer("nothing", given(1))
        assert missing.value.status() == "StatusCode.NOT_FOUND"
        with pytest.raises(triton.InferenceServerException, match="each replica"):
            client.get_inference_statistics()
        return single, [chunk.as_numpy("output_0").item() for chunk in chunks]
    finally:
        client.close()


def ask_in_a_stream(address):
    """Twenty requests, a sequence among them, sent without waiting; and one in parts."""
    received: queue.Queue = queue.Queue()
    client = triton.InferenceServerClient(address)
    client.start_stream(lambda result, error: received.put((result, error)))
    for n in range(20):
        chunk = {"sequence_id": 5, "sequence_start": n == 1, "sequence_end": n == 19} if n % 2 else {}
        client.async_stream_infer("scales", given(n % 4), request_id=str(n), **chunk)
    whole = [received.get(timeout=LIMIT_S) for _ in range(20)]
    client.async_stream_infer("counter", given(4), request_id="parts", enable_empty_final_response=True)
    parts = [received.get(timeout=LIMIT_S)[0] for _ in range(5)]
    client.stop_stream()
    client.close()
    assert [error for _, error in whole] == [None] * 20
    ids = [result.get_response().id for result, _ in whole]
    return ids, [result.as_numpy("output_0").item() for result, _ in whole], parts
