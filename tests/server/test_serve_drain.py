"""SIGTERM under load: what was accepted is answered, what is new is refused, and the process ends."""

from __future__ import annotations

import json
import queue
import signal
import threading

import numpy as np
import pytest
import tritonclient.grpc as triton
from server_process import LIMIT_S, read_head, request_bytes

GENERATE = "/v2/models/{}/generate"


def ask(server, n, connection=None, model="counter"):
    """Send a request and leave its answer for later."""
    connection = connection or server.connect()
    connection.sendall(request_bytes(GENERATE.format(model), {"input_0": n}))
    return connection


def answer(connection):
    """Return status and body of an answer."""
    received = read_head(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while len(body) < length:
        body += connection.recv(1 << 20)
    return int(head.split()[1]), json.loads(body)


@pytest.mark.slow
def test_every_accepted_request_is_answered_and_new_ones_are_refused(serve, gated):
    folder, gate = gated
    patient = gate.with_name("patient.toml")
    patient.write_text("[limits]\nhung_seconds = 1e6\n")  # behind its gate the model hangs, as far as one can see
    server = serve(folder, "--config", patient, "--drain-seconds", LIMIT_S)
    accepted = [ask(server, 250 + n, model="gated") for n in range(24)]
    late, idle = server.connect(), server.connect()
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == len(accepted))
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
    assert server.get("/v2/health/live").status == 200
    status, refused = answer(ask(server, 1, late, model="gated"))
    assert (status, refused) == (503, {"error": "the server is shutting down"})
    gate.touch()
    answers = [answer(connection) for connection in accepted]
    assert [(status, len(content["output_0"])) for status, content in answers] == [(200, 250 + n) for n in range(24)]
    assert server.process.wait(LIMIT_S) == 0
    for connection in (*accepted, late, idle):
        connection.close()


@pytest.mark.slow
def test_a_server_under_steady_load_answers_all_that_it_took(serve, saved_models):
    """Clients call until they are refused or cut off; nobody gets half an answer or waits in vain."""
    server = serve(saved_models)
    seen: list[int] = []
    broken: list[str] = []

    def client():
        connection = server.connect()
        try:
            while True:
                try:
                    ask(server, 40, connection)
                except OSError:
                    return  # the connection was idle when it was closed
                received = read_head(connection)
                if not received:
                    return
                status = int(received.split()[1])
                body = received.partition(b"\r\n\r\n")[2]
                while status == 200 and not body.endswith(b"]}"):
                    more = connection.recv(1 << 20)
                    if not more:
                        broken.append("half an answer")
                        return
                    body += more
                seen.append(status)
                if status != 200:
                    return
        except ConnectionResetError:
            return  # closed before the request was read, so it was not accepted
        except OSError as error:
            broken.append(repr(error))
        finally:
            connection.close()

    clients = [threading.Thread(target=client) for _ in range(12)]
    for thread in clients:
        thread.start()
    server.wait_for(lambda: len(seen) > 100)
    assert server.terminate() == 0
    for thread in clients:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in clients)
    assert broken == []
    assert set(seen) <= {200, 503}


@pytest.mark.slow
def test_what_does_not_end_in_time_is_given_up_with_an_answer(serve, saved_models):
    server = serve(saved_models, "--drain-seconds", 0.2)
    waiting = ask(server, 90_000)
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    assert server.terminate() == 1
    status, content = answer(waiting)
    assert status == 503
    assert "stopped before the request was done" in content["error"]
    waiting.close()


@pytest.mark.slow
def test_an_idle_server_ends_at_once(serve):
    server = serve("lstm:hidden=4,vocabulary_size=9", "--drain-seconds", 100 * LIMIT_S)  # or it would be waited for
    assert server.terminate() == 0
    assert '"event":"stopping"' in server.log.read_text()


@pytest.mark.slow
def test_a_second_signal_ends_a_server_that_drains(serve, saved_models):
    server = serve(saved_models)
    waiting = ask(server, 90_000)
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    server.process.send_signal(signal.SIGINT)
    server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(LIMIT_S) == 1
    waiting.close()


@pytest.mark.slow
def test_a_stream_goes_on_until_it_ends_and_no_other_begins(serve, saved_models):
    server = serve(saved_models, "--grpc-port", 0, "--drain-seconds", 100 * LIMIT_S)
    with triton.InferenceServerClient(server.grpc_address) as client, Stream(client) as stream:
        assert stream.counted(2, sequence_id=7, sequence_start=True) == [1, 2]
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
        assert stream.counted(1, sequence_id=7) == [3]
        assert stream.counted(2) == [1, 2]
        assert stream.counted(2, sequence_id="new", sequence_start=True, sequence_end=True) == [1, 2]
        with triton.InferenceServerClient(server.grpc_address) as other, Stream(other) as refused:
            _, error = refused.received.get(timeout=LIMIT_S)
            assert "the server is shutting down" in str(error)
        assert server.process.poll() is None
        assert stream.counted(1, sequence_id=7, sequence_end=True) == [4]
    assert server.process.wait(LIMIT_S) == 0


@pytest.mark.slow
def test_a_stream_that_outlasts_the_drain_is_told(serve, saved_models):
    server = serve(saved_models, "--grpc-port", 0, "--drain-seconds", 0.5)
    with triton.InferenceServerClient(server.grpc_address) as client, Stream(client) as stream:
        assert stream.counted(2, sequence_id=7, sequence_start=True) == [1, 2]
        server.process.send_signal(signal.SIGTERM)
        _, error = stream.received.get(timeout=LIMIT_S)
        assert "the server is shutting down" in str(error)
    assert server.process.wait(LIMIT_S) == 0


class Stream:
    """One call of ModelStreamInfer, for one request after the other to the model `counter`."""

    def __init__(self, client):
        self.client = client
        self.received: queue.Queue = queue.Queue()

    def __enter__(self):
        self.client.start_stream(lambda result, error: self.received.put((result, error)))
        return self

    def __exit__(self, *_):
        self.client.stop_stream()

    def counted(self, n, **marks):
        """What a request for n numbers is answered: the numbers, or the error."""
        number = triton.InferInput("input_0", [1], "INT64")
        number.set_data_from_numpy(np.array([n]))
        self.client.async_stream_infer("counter", [number], **marks)
        result, error = self.received.get(timeout=LIMIT_S)
        return str(error) if error is not None else result.as_numpy("output_0").tolist()
