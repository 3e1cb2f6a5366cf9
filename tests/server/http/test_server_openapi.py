"""The OpenAPI description and the routes say the same."""

from __future__ import annotations

import re

import pytest
from starlette.routing import Route

from batchmaker.saved.sources import parse_source
from batchmaker.server.access.auth import KeyRing
from batchmaker.server.access.connections import Connections
from batchmaker.server.access.origins import Origins
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.http.app import all_routes
from batchmaker.server.http.openapi import openapi_description
from batchmaker.server.limits import Limits
from batchmaker.server.observe.metrics import Metrics
from batchmaker.server.service.engine_port import EngineOptions
from batchmaker.server.service.repository import Entry, Repository
from batchmaker.server.service.service import Service
from batchmaker.server.service.site import Site

ANY_ORIGIN = Origins((), only_this_machine=False)


@pytest.fixture(scope="module")
def description():
    return openapi_description()


def test_every_route_is_described_and_nothing_else(description):
    limits = Limits()
    entry = Entry(parse_source("lstm:hidden=4,vocabulary_size=9"), EngineOptions(threads=1))
    service = Service(Repository([entry], limits), limits)
    routes = all_routes(Site(service, KeyRing({}), ANY_ORIGIN, Metrics(service, Connections(9, 9)), BodyBudget(limits)))
    real = {(route.path, method) for route in routes if isinstance(route, Route) for method in route.methods - {"HEAD"}}
    described = {(path, method.upper()) for path, calls in description["paths"].items() for method in calls}
    assert described == real


def test_every_name_in_a_path_is_a_parameter(description):
    for path, calls in description["paths"].items():
        for call in calls.values():
            named = {given["name"] for given in call["parameters"] if given["in"] == "path"}
            assert named == set(re.findall(r"\{(\w+)\}", path))


def test_every_schema_that_is_named_is_there(description):
    def refs(part):
        if isinstance(part, dict):
            yield from ([part["$ref"]] if "$ref" in part else [])
            for value in part.values():
                yield from refs(value)
        elif isinstance(part, list):
            for value in part:
                yield from refs(value)

    named = {ref.removeprefix("#/components/schemas/") for ref in refs(description)}
    assert named <= set(description["components"]["schemas"])
    assert {"LiveView", "InferRequest", "Error"} <= named


@pytest.fixture(scope="module")
def server(serve):
    return serve("lstm:hidden=4,vocabulary_size=9")


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("get", "/", None),
        ("get", "/metrics", None),
        ("get", "/openapi.json", None),
        ("get", "/v2", None),
        ("get", "/v2/health/live", None),
        ("get", "/v2/models/{model}/ready", None),
        ("get", "/v2/models/{model}/config", None),
        ("get", "/v2/trace", None),
        ("get", "/v2/live", None),
        ("post", "/v2/models/{model}/generate", {"input_0": [1]}),
        ("post", "/v2/models/{model}/generate_stream", {"input_0": [1]}),
        ("post", "/v2/repository/index", {}),
    ],
)
def test_answers_are_of_the_type_described(server, description, method, path, content):
    where = path.replace("{model}", "lstm")
    answer = server.get(where) if content is None else server.post(where, content)
    assert answer.status == 200
    media = description["paths"][path][method]["responses"]["200"].get("content", {"": None})
    assert [answer.headers.get("content-type", "").partition(";")[0]] == list(media)


def test_a_wrong_question_about_now_is_told_what_to_mend(server):
    assert server.get("/v2/live?model=lstm&version=1&span=0.1&after=5").json["name"] == "lstm"
    for query, status, said in (
        ("span=7", 400, "span must be one of 10, 1, 0.1"),
        ("after=x", 400, "after must be the now_s"),
        ("model=nobody", 404, "there is no model 'nobody'"),
    ):
        answer = server.get(f"/v2/live?{query}")
        assert (answer.status, said in answer.json["error"]) == (status, True)
