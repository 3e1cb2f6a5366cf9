"""An OpenAPI description of all HTTP calls, for people, client generators and tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

import batchmaker
from batchmaker.server.formats.audio import ENCODINGS
from batchmaker.server.formats.completions import MAX_CHOICES
from batchmaker.server.formats.openai_errors import OPENAI
from batchmaker.server.formats.tensors import NUMPY
from batchmaker.server.observe.live import SPANS_S, LiveView

_REF: Final = "#/components/schemas/"
_SAID: Final = {
    400: "the request is wrong; the error says what to mend",
    401: "no API key that is known",
    403: "not with this API key",
    404: "there is no such model or version",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "the body is compressed",
    426: "this is a WebSocket: connect with one",
    429: "too often with this API key",
    500: "the model failed",
    501: "what this server does not do",
    503: "too much at once, or stopping; try again after Retry-After seconds",
    504: "the deadline passed",
}
_READING: Final = (400, 408, 413, 415, 503)
_INFERRING: Final = (*_READING, 404, 500, 501, 504)


@dataclass(frozen=True, slots=True)
class _ApiCall:
    """One method of one path. body: its schema, None without a body. answer: the schema of its answer.

    body_media: of the body. media: the type of the answer, "" for no body. errors: statuses besides 401 and 429, which
    every call can get. versioned: whether there is a second path that names the version. status: of the answer.
    """

    method: str
    path: str
    summary: str
    answer: dict[str, Any]
    media: str = "application/json"
    body: dict[str, Any] | None = None
    body_media: str = "application/json"
    body_required: bool = True
    query: tuple[dict[str, Any], ...] = ()
    errors: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    versioned: bool = False
    status: int = 200


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF + name}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _query(name: str, meaning: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": meaning, "schema": schema}


_TEXT: Final = {"type": "string"}
_WHOLE: Final = {"type": "integer"}
_FREE: Final = {"type": "object"}
_SHAPE: Final = _list({"type": "integer"})
_DATATYPE: Final = {"type": "string", "enum": [*NUMPY, *({"BYTES"} - set(NUMPY))]}
_SPEC: Final = _object(("name", "datatype", "shape"), name=_TEXT, datatype=_DATATYPE, shape=_SHAPE)
_EVENTS: Final = "text/event-stream"

_SCHEMAS: Final[dict[str, Any]] = {
    "Error": _object(("error",), error=_TEXT),
    "Parameters": {
        "type": "object",
        "additionalProperties": {"anyOf": [{"type": kind} for kind in ("boolean", "number", "string", "null")]},
    },
    "RequestParameters": {
        **_object(
            timeout={"type": "number", "minimum": 0, "description": "Microseconds from arrival; 0 is none."},
            deadline_ms={"type": "number", "exclusiveMinimum": 0, "description": "Milliseconds from arrival."},
            priority={"type": "integer", "minimum": 0, "description": "1 is the highest; 0 comes after all others."},
            sequence_id={"type": ["integer", "string"], "description": "Of what the request is a chunk; 0 is none."},
            sequence_start={"type": "boolean"}, sequence_end={"type": "boolean"},
            sequence_reset={"type": "boolean", "description": "Forget the state before this chunk."},
            sequence_state={
                "type": ["boolean", "string"],
                "description": "true: answer with the state after the chunk. Text, with sequence_start: go on from it.",
            },
            binary_data_output={"type": "boolean"},
        ),
        "additionalProperties": {"anyOf": [{"type": kind} for kind in ("boolean", "number", "string", "null")]},
    },
    "InputTensor": _object(
        ("name", "shape", "datatype"),
        name=_TEXT, shape=_list({"type": "integer", "minimum": 0}), datatype=_DATATYPE, parameters=_ref("Parameters"),
        data={"type": "array", "items": {}},
    ),
    "InferRequest": _object(
        ("inputs",),
        id=_TEXT, inputs=_list(_ref("InputTensor")), parameters=_ref("RequestParameters"),
        outputs=_list(_object(("name",), name=_TEXT, parameters=_ref("Parameters"))),
    ),
    "OutputTensor": _object(
        ("name", "shape", "datatype"),
        name=_TEXT, shape=_SHAPE, datatype=_DATATYPE, parameters=_ref("Parameters"), data=_list({}),
    ),
    "InferResponse": _object(
        ("model_name", "model_version", "outputs"),
        id=_TEXT, model_name=_TEXT, model_version=_TEXT, outputs=_list(_ref("OutputTensor")),
        parameters=_ref("Parameters"),
    ),
    "GenerateRequest": {
        **_object(id=_TEXT, parameters=_ref("RequestParameters")),
        "additionalProperties": {},
        "description": "Each input of the model under its name, as plain JSON.",
    },
    "GenerateResponse": {
        **_object(
            ("model_name", "model_version"), id=_TEXT, model_name=_TEXT, model_version=_TEXT,
            parameters=_ref("Parameters"),
        ),
        "additionalProperties": {},
        "description": "Each output of the model under its name, as plain JSON.",
    },
    "OpenAIError": _object(
        ("error",), error=_object(("message", "type"), message=_TEXT, type=_TEXT, param={}, code={})
    ),
    "CompletionRequest": {
        **_object(
            ("model", "prompt"),
            model=_TEXT,
            prompt={"anyOf": [_TEXT, _list({"anyOf": [_TEXT, _WHOLE, _list(_WHOLE)]})]},
            max_tokens={"type": "integer", "minimum": 1}, temperature={"type": "number", "minimum": 0},
            top_p={"type": "number", "exclusiveMinimum": 0, "maximum": 1}, top_k=_WHOLE, seed=_WHOLE,
            n={"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
            stop={"anyOf": [_TEXT, {**_list(_TEXT), "maxItems": 4}]},
            stream={"type": "boolean"}, stream_options=_object(include_usage={"type": "boolean"}),
            echo={"type": "boolean"}, user=_TEXT,
        ),
        "description": "As in OpenAI's API. Without `temperature` tokens are drawn, where the model can.",
    },
    "Completion": _object(
        ("id", "object", "created", "model", "choices", "usage"),
        id=_TEXT, object=_TEXT, created=_WHOLE, model=_TEXT, usage=_FREE,
        choices=_list(_object(("text", "index", "finish_reason"), text=_TEXT, index=_WHOLE, finish_reason=_TEXT)),
    ),
    "TranscriptionRequest": {
        **_object(
            ("file", "model"),
            file={"type": "string", "contentMediaType": "application/octet-stream"}, model=_TEXT, language=_TEXT,
            response_format={"type": "string", "enum": ["json", "text", "verbose_json"]}, stream={"type": "boolean"},
        ),
        "description": "As in OpenAI's API. The file is WAV of one channel, at the model's rate.",
    },
    "Transcription": _object(
        ("text",),
        text=_TEXT, usage=_FREE, task=_TEXT, language=_TEXT, duration={"type": "number"},
    ),
    "TextModel": _object(("id", "object"), id=_TEXT, object=_TEXT, created=_WHOLE, owned_by=_TEXT),
    "TextModels": _object(("object", "data"), object=_TEXT, data=_list(_ref("TextModel"))),
    "Server": _object(("name", "version", "extensions"), name=_TEXT, version=_TEXT, extensions=_list(_TEXT)),
    "Model": _object(
        ("name", "versions", "platform", "inputs", "outputs"),
        name=_TEXT, versions=_list(_TEXT), platform=_TEXT, inputs=_list(_SPEC), outputs=_list(_SPEC),
    ),
    "Config": _object(("name", "max_batch_size"), name=_TEXT, max_batch_size=_WHOLE),
    "Statistics": _object(("model_stats",), model_stats=_list(_object(("name", "version"), name=_TEXT, version=_TEXT))),
    "IndexRequest": _object(ready={"type": "boolean"}),
    "Index": _list(
        _object(("name", "version", "state", "reason"), name=_TEXT, version=_TEXT, state=_TEXT, reason=_TEXT)
    ),
    "Trace": _object(("traceEvents",), traceEvents=_list(_FREE)),
}  # fmt: skip

_M: Final = "/v2/models/{model}"
_CHUNKS: Final = (
    _query("answers", "What answers hold", {"type": "string", "enum": ["json", "binary"]}),
    _query("output", "The output wanted, by default all", _TEXT),
    _query("audio", "How binary messages are sound", {"type": "string", "enum": list(ENCODINGS)}),
    _query("rate", "Samples a second of the sound, which must be the model's", _WHOLE),
    _query("deadline_ms", "Of each chunk", {"type": "number", "exclusiveMinimum": 0}),
    _query("priority", "Of the sequence", {"type": "integer", "minimum": 0}),
)
"""The query of connections with sequences."""

_CALLS: Final = (
    _ApiCall("get", "/", "The page that shows what is running now", _TEXT, "text/html"),
    _ApiCall("get", "/page", "The page of the server's owner", _TEXT, "text/html", errors=(404,)),
    _ApiCall("get", "/openapi.json", "This description", _FREE),
    _ApiCall("get", "/metrics", "Metrics for Prometheus", _TEXT, "text/plain"),
    _ApiCall("get", "/v2", "Name, version and extensions", _ref("Server")),
    _ApiCall("get", "/v2/health/live", "Whether the server runs", {}, ""),
    _ApiCall("get", "/v2/health/ready", "Whether requests are taken", {}, "", silent=(503,)),
    _ApiCall("get", f"{_M}/ready", "Whether a model takes requests", {}, "", silent=(404, 503), versioned=True),
    _ApiCall("get", "/v2/models/stats", "Counts and times of all models", _ref("Statistics")),
    _ApiCall("get", _M, "Inputs and outputs of a model", _ref("Model"), errors=(404,), versioned=True),
    _ApiCall("get", f"{_M}/config", "Configuration of a model", _ref("Config"), errors=(404,), versioned=True),
    _ApiCall("get", f"{_M}/stats", "Counts and times of a model", _ref("Statistics"), errors=(404,), versioned=True),
    _ApiCall(
        "post", f"{_M}/infer", "Tensors in, tensors out; binary tensors may follow the JSON of either",
        _ref("InferResponse"), body=_ref("InferRequest"), errors=_INFERRING, versioned=True,
    ),
    _ApiCall(
        "post", f"{_M}/generate", "Plain JSON in, plain JSON out",
        _ref("GenerateResponse"), body=_ref("GenerateRequest"), errors=_INFERRING, versioned=True,
    ),
    _ApiCall(
        "post", f"{_M}/generate_stream", "Plain JSON in; each value as an event as soon as it is computed",
        _TEXT, _EVENTS, _ref("GenerateRequest"), errors=_INFERRING, versioned=True,
    ),
    _ApiCall(
        "post", "/v1/completions", "A text that goes on with a prompt, in the form of OpenAI's API; as events if asked",
        _ref("Completion"), body=_ref("CompletionRequest"), errors=_INFERRING,
    ),
    _ApiCall(
        "post", "/v1/audio/transcriptions", "What is said in a file, in the form of OpenAI's API; as events if asked",
        _ref("Transcription"), body=_ref("TranscriptionRequest"), body_media="multipart/form-data", errors=_INFERRING,
    ),
    _ApiCall(
        "get", "/v1/realtime", "A WebSocket of OpenAI's realtime API: live sound in, its text out as it is heard",
        _FREE, "",
        query=(
            _query("model", "The model that hears; otherwise the first session.update names it", _TEXT),
            _query("intent", "The kind of session", {"type": "string", "enum": ["transcription"]}),
        ),
        errors=(400, 403, 404, 426, 503), status=101,
    ),
    _ApiCall("get", "/v1/models", "The models that write texts", _ref("TextModels")),
    _ApiCall("get", "/v1/models/{model}", "A model that writes texts", _ref("TextModel"), errors=(404,)),
    _ApiCall(
        "get", f"{_M}/sequence", "A WebSocket: each message a chunk of one sequence, each answered by one", _FREE, "",
        query=_CHUNKS, errors=(400, 403, 404, 426, 503), status=101, versioned=True,
    ),
    _ApiCall(
        "get", f"{_M}/sequences", "A WebSocket: each message frames of many sequences, each answered by one", _FREE, "",
        query=_CHUNKS, errors=(400, 403, 404, 426, 503), status=101, versioned=True,
    ),
    _ApiCall(
        "post", "/v2/repository/index", "What is loaded and what could be",
        _ref("Index"), body=_ref("IndexRequest"), body_required=False, errors=_READING,
    ),
    *(
        _ApiCall(
            "post", f"/v2/repository/models/{{model}}/{what}", summary,
            _FREE, body=_FREE, body_required=False, errors=(*_READING, 403, 404, 500, 501),
        )
        for what, summary in (("load", "Load a model anew"), ("unload", "Unload a model"))
    ),
    _ApiCall(
        "get", "/v2/trace", "The last seconds in Chrome's trace format", _ref("Trace"), errors=(400,),
        query=(_query("seconds", "How many", {"type": "number", "exclusiveMinimum": 0, "maximum": 60}),),
    ),
    _ApiCall(
        "get", "/v2/live", "What a model is doing now, as the page shows it", _ref("LiveView"), errors=(400, 404),
        query=(
            _query("model", "Its name, by default the first", _TEXT),
            _query("version", "Its version, by default the newest", _TEXT),
            _query("span", "Seconds to look at", {"type": "string", "enum": list(SPANS_S)}),
            _query("after", "The now_s of the last answer", {"type": "number", "minimum": 0}),
        ),
    ),
)  # fmt: skip


def openapi_description() -> dict[str, Any]:
    """Return the description, in OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for call in _CALLS:
        paths.setdefault(call.path, {})[call.method] = _operation(call, call.path)
        if call.versioned:
            path = call.path.replace(_M, f"{_M}/versions/{{version}}")
            paths.setdefault(path, {})[call.method] = _operation(call, path)
    _, live = msgspec.json.schema_components([LiveView], ref_template=_REF + "{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "batchmaker", "version": batchmaker.__version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {**_SCHEMAS, **live},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(call: _ApiCall, path: str) -> dict[str, Any]:
    named = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"\{(\w+)\}", path)]
    answer: dict[str, Any] = {"description": call.summary}
    if call.media:
        answer["content"] = {call.media: {"schema": call.answer}}
    form = "OpenAIError" if path.startswith(OPENAI) else "Error"
    error = {"application/json": {"schema": _ref(form)}}
    responses: dict[str, Any] = {str(call.status): answer}
    for status in sorted({*call.errors, 401, 429}):
        responses[str(status)] = {"description": _SAID[status], "content": error}
    for status in call.silent:
        responses[str(status)] = {"description": _SAID[status]}
    operation: dict[str, Any] = {"summary": call.summary, "parameters": [*named, *call.query], "responses": responses}
    if call.body is not None:
        content = {call.body_media: {"schema": call.body}}
        operation["requestBody"] = {"required": call.body_required, "content": content}
    return operation
