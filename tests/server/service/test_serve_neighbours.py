"""One request that fails while it is computed, among many in the same batches: the others never hear of it."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from served_models import Scales

import batchmaker as bm

GENERATE = "/v2/models/scales/generate"


@pytest.fixture(scope="module")
def server(serve, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scales")
    bm.save(Scales(), folder / "scales")
    return serve(folder)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 150, 299])
def test_a_request_whose_cell_raises_harms_none_of_63_good_ones(server, at):
    numbers = random.Random(at)
    requests = [[numbers.randrange(10) for _ in range(300)] for _ in range(64)]
    requests[17][at] = 99  # there is no such square
    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(lambda request: server.post(GENERATE, {"input_0": request}), requests))
    bad = answers.pop(17)
    assert bad.status == 500
    assert b"99" not in bad.content
    assert b"Traceback" not in bad.content
    assert set(json.loads(bad.content)) == {"error"}
    good = [request for request in requests if 99 not in request]
    assert [answer.status for answer in answers] == [200] * 63
    assert [answer.json["output_0"] for answer in answers] == [sum(n * n for n in request) for request in good]
    server.wait_idle()
