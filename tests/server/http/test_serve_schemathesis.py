"""What schemathesis makes of the OpenAPI description: calls that it allows, and calls that it does not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from server_process import LIMIT_S

from batchmaker.server.http.openapi import openapi_description

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, of the extra `dev`")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.slow

NUM_EXAMPLES = 25
INTENDED = {501, 503, 504}
"""Not supported, no room, too late: what a client may be told in good order."""

DESCRIBED = [content_type_conformance, response_schema_conformance, status_code_conformance]
SCHEMA = schemathesis.openapi.from_dict(openapi_description())
OPERATIONS = {operation.ok().label: operation.ok() for operation in SCHEMA.get_all_operations()}
CALLS = [(label, schemathesis.GenerationMode.POSITIVE) for label in OPERATIONS] + [
    (label, schemathesis.GenerationMode.NEGATIVE)
    for label, operation in OPERATIONS.items()
    if operation.body or operation.query  # else there is nothing that could be wrong
]


@pytest.fixture(scope="module")
def server(serve):
    return serve("lstm:hidden=4,vocabulary_size=9", "--max-body-mb", 1)


@pytest.mark.parametrize(("label", "mode"), CALLS, ids=[f"{label}-{mode.value}" for label, mode in CALLS])
def test_every_answer_is_one_that_is_described(server, label, mode):
    operation = OPERATIONS[label]
    named = {"path_parameters": {"model": "lstm"}} if "/v2/models/{model}" in label else {}

    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode, **named))
    def check(case):
        answer = case.call(base_url=f"http://{server.address}", timeout=LIMIT_S)
        case.validate_response(answer, checks=DESCRIBED)
        if answer.status_code not in INTENDED:
            case.validate_response(answer, checks=[not_a_server_error])

    check()


def test_nothing_is_left_behind(server):
    server.wait_idle()
    assert server.metric("batchmaker_open_streams") == 0
    assert server.post("/v2/models/lstm/generate", {"input_0": [1, 2]}).status == 200
