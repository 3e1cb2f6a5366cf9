"""Completions in the form of OpenAI's API: what a client asks for as requests to a model, and tokens as text."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, Protocol, final, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import ModelError, said_by
from batchmaker.model.model import Model
from batchmaker.server.faults import invalid
from batchmaker.server.formats.growing_text import GrowingText, echoed
from batchmaker.server.formats.infer_body import at_most, decode_json, items_of
from batchmaker.server.formats.json_keys import keys_once
from batchmaker.server.formats.json_tensors import read_json
from batchmaker.server.formats.messages import InferRequest
from batchmaker.server.formats.pieces import Pieces
from batchmaker.server.formats.signature import Signature
from batchmaker.server.formats.tensors import Tensor, kind_of
from batchmaker.server.limits import Limits

_LOG = logging.getLogger("batchmaker.server")
MAX_CHOICES: Final = 128
"""Most texts in one answer: prompts times `n`."""
MAX_TOKENS: Final = 16
"""As in OpenAI's API."""
MAX_STOPS: Final = 4
"""As in OpenAI's API."""
MOST_CHARACTERS: Final = 16
"""Of a text for each token that a prompt may have: a longer one is not made into tokens."""
_NEUTRAL: Final[dict[str, tuple[bytes, ...]]] = {
    "suffix": (b'""',),
    "logprobs": (),
    "best_of": (b"1",),
    "presence_penalty": (b"0", b"0.0"),
    "frequency_penalty": (b"0", b"0.0"),
    "logit_bias": (b"{}",),
}
"""Fields that are not supported, with the values besides null that ask for nothing, in JSON."""


@final
@dataclass(frozen=True, slots=True)
class Completions:
    """How a language model answers /v1/completions: the result of its `serving_completions()`.

    encode: a text -> its tokens. decode: tokens -> their text. end: the token that ends a text; it is not shown. With a
    tokenizer of the library transformers: `Completions(it.encode, it.decode, it.eos_token_id)`.

    `unfold` gets a dict with `prompt`, an array [n] of tokens, and `max_tokens`; also `temperature`, `top_p`, `top_k`
    and `seed` as far as the model has such inputs. Its result is the new tokens [m], which stream one by one.

    Both functions are called in the server's own thread, so they must be fast.
    """

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    end: int | None = None


@runtime_checkable
class DeclaresCompletions(Protocol):
    """A model that may answer completions; None if it does not."""

    def serving_completions(self) -> Completions | None: ...


def completions_of(model: Model, signature: Signature) -> Completions | None:
    """Return how a model answers completions, None if it does not. ModelError if its tensors are not those needed."""
    completions = model.serving_completions() if isinstance(model, DeclaresCompletions) else None
    if completions is None:
        return None
    if not isinstance(completions, Completions):
        raise ModelError(f"{type(model).__name__}.serving_completions() returned {type(completions).__name__}")
    inputs = {spec.name: (kind_of(spec.datatype), spec.shape) for spec in signature.inputs}
    fits = inputs.get("prompt") == ("i", (-1,)) and inputs.get("max_tokens") == ("i", (1,))
    if not fits or signature.stream != "elements" or signature.encode or signature.decode:
        raise ModelError(
            f"{type(model).__name__} has serving_completions(), so its requests need `prompt`, a list of tokens, and "
            "`max_tokens`, and its result must be tokens that stream one by one. Its example request shows "
            f"{', '.join(inputs)}; its result streams as {signature.stream!r}"
        )
    return completions


Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class CompletionAsk(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a call. What may be long is read later: skipping it is fast, and making objects of it is not."""

    model: str
    prompt: msgspec.Raw
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Whole | None = None
    seed: Whole | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: msgspec.Raw = msgspec.Raw()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    user: str | None = None
    suffix: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()
    best_of: msgspec.Raw = msgspec.Raw()
    presence_penalty: msgspec.Raw = msgspec.Raw()
    frequency_penalty: msgspec.Raw = msgspec.Raw()
    logit_bias: msgspec.Raw = msgspec.Raw()

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. INVALID for anything else."""
        if not bytes(self.stop).startswith(b"["):
            stop = decode_json(_STOP, self.stop, ".stop") if self.stop else None
            return () if stop is None else (stop,)
        stops = items_of(decode_json(_STOPS, self.stop, ".stop"))
        if len(stops) > MAX_STOPS:
            raise invalid(f"stop: at most {MAX_STOPS} strings are taken")
        return tuple(stops)


_ASK: Final = msgspec.json.Decoder(CompletionAsk)
_KEYS: Final = keys_once(msgspec.Raw)
_STOP: Final = msgspec.json.Decoder(Stop | None)
_STOPS: Final = at_most(Stop, MAX_STOPS)
_TEXT: Final = msgspec.json.Decoder(str)
_SEVERAL: Final = re.compile(rb'\[\s*["\[]')
_PROMPTS: Final = at_most(msgspec.Raw, MAX_CHOICES)


def read_ask(body: bytes) -> CompletionAsk:
    """Return what a body asks for. INVALID if it is wrong, or asks for what is not supported."""
    ask: CompletionAsk = decode_json(_ASK, body)
    decode_json(_KEYS, body)
    for name, neutral in _NEUTRAL.items():
        if bytes(getattr(ask, name)) not in (b"", b"null", *neutral):
            raise invalid(f"{name} is not supported; leave it out")
    ask.stops  # noqa: B018 - refused before anything is computed
    return ask


class Continuation(NamedTuple):
    """One text to be written. begin: what it begins with, the prompt if it is asked for."""

    number: int
    request: InferRequest
    num_prompt: int
    begin: str


def choices_of(
    ask: CompletionAsk, completions: Completions, signature: Signature, limits: Limits
) -> Pieces[list[Continuation]]:
    """Return the texts that are asked for, in order. INVALID if the model cannot write them so."""
    count = ask.n or 1
    several = _several(ask.prompt)
    if len(several) * count > MAX_CHOICES:
        raise invalid(f"prompt and n={count}: at most {MAX_CHOICES} texts can be asked for at once")
    options = _options(ask, {spec.name for spec in signature.inputs})
    choices: list[Continuation] = []
    for one in several:
        if choices:
            yield
        if one.startswith(b"["):
            check = partial(signature.check_input, "prompt", "INT64", limits=limits)
            prompt = yield from read_json("prompt", "INT64", None, one, check)
            if prompt.data.min(initial=0) < 0:
                raise invalid(f"prompt: tokens are numbers from 0 on, got {prompt.data.min()}")
            begin = echoed(prompt.data.tolist(), completions.decode) if ask.echo else ""
        else:
            text = decode_json(_TEXT, one, ".prompt")
            prompt = Tensor("prompt", "INT64", _encoded(text, completions, limits))
            begin = text if ask.echo else ""
        for number in range(count):
            inputs = (prompt, *(Tensor(name, kind, value) for name, kind, value in options))
            if ask.seed is not None:
                inputs = tuple(_with_seed(tensor, number) for tensor in inputs)
            choices.append(Continuation(len(choices), InferRequest(inputs), len(prompt.data), begin))
    return choices


def _several(prompt: msgspec.Raw) -> list[bytes]:
    """Return each prompt in JSON: all are texts, or all lists; no more than one too many."""
    whole = bytes(prompt)
    several = [whole]
    if _SEVERAL.match(whole):
        several = [bytes(one) for one in items_of(decode_json(_PROMPTS, whole, ".prompt"))]
    if {one[:1] for one in several} not in ({b'"'}, {b"["}):
        raise invalid("prompt must be a text, a list of texts, a list of tokens or a list of such lists")
    return several


def _encoded(text: str, completions: Completions, limits: Limits) -> NDArray[np.int64]:
    most = MOST_CHARACTERS * limits.max_sequence
    if len(text) > most:
        raise invalid(f"a prompt of {len(text)} characters is more than {most}")
    try:
        return np.array([int(token) for token in completions.encode(text)], np.int64)
    except Exception as error:
        _LOG.warning("encode raised", extra={"error": said_by(error)})
        raise invalid("the model cannot make tokens of this prompt") from error


def _options(ask: CompletionAsk, inputs: set[str]) -> list[tuple[str, str, NDArray[Any]]]:
    """Return the model's inputs besides the prompt: name, datatype, value. INVALID for one that it does not have."""
    temperature = 1.0 if ask.temperature is None and "temperature" in inputs else ask.temperature
    seed = secrets.randbits(62) if ask.seed is None else ask.seed
    fields: dict[str, tuple[Any, str, tuple[Any, ...]]] = {
        "max_tokens": (MAX_TOKENS if ask.max_tokens is None else ask.max_tokens, "INT64", ()),
        "temperature": (temperature, "FP64", (0,)),
        "top_p": (ask.top_p, "FP64", (1,)),
        "top_k": (ask.top_k, "INT64", (0, -1)),
        "seed": (seed, "INT64", (seed,)),
    }
    options = []
    for name, (value, datatype, neutral) in fields.items():
        if name in inputs and value is not None:
            options.append((name, datatype, np.array([value], np.float64 if datatype == "FP64" else np.int64)))
        elif value is not None and value not in neutral:
            raise invalid(f"the model {ask.model!r} takes no {name}; leave it out")
    return options


def _with_seed(tensor: Tensor, number: int) -> Tensor:
    """Return the tensor; the seed of the text with this number among those of a prompt."""
    if tensor.name != "seed" or not number:
        return tensor
    seed = (int(tensor.data[0]) + number + (1 << 63)) % (1 << 64) - (1 << 63)
    return Tensor(tensor.name, tensor.datatype, np.array([seed], np.int64))


@final
class Writing:
    """The text of one choice while its tokens come.

    Of text that `add` returns, nothing is taken back (see GrowingText), and what may be the beginning of a stop string
    is held until it is none. finished: None while it is written, then why it has
    ended.
    """

    def __init__(self, completions: Completions, stops: Sequence[str], most: int) -> None:
        self.num_tokens = 0
        self.finished: str | None = None
        self._completions, self._stops, self._most = completions, stops, most
        self._text = GrowingText(completions.decode)
        self._held = ""

    def add(self, token: int) -> str:
        """Return the text that is certain now. What comes after the end is no part of it."""
        if self.finished is not None:
            return ""
        self.num_tokens += 1
        if token == self._completions.end:
            return self.end(stopped=True)
        return self._until_stop(self._text.add([token]))

    def end(self, *, stopped: bool = False) -> str:
        """No token comes any more: return the rest of the text. stopped: the model has said so."""
        if self.finished is not None:
            return ""
        text = self._until_stop(self._text.rest())
        if self.finished is None:
            self.finished = "stop" if stopped or self.num_tokens < self._most else "length"
            text, self._held = text + self._held, ""
        return text

    def _until_stop(self, text: str) -> str:
        """Return what is certain of the held text and this. Finishes at a stop string, which is left out."""
        text = self._held + text
        ends = [at for at in map(text.find, self._stops) if at >= 0]
        if ends:
            self.finished, self._held = "stop", ""
            return text[: min(ends)]
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        num_held = next(
            (
                size
                for size in range(min(longest, len(text)), 0, -1)
                if any(s.startswith(text[-size:]) for s in self._stops)
            ),
            0,
        )
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def tokens_in(part: Sequence[Tensor]) -> list[int]:
    """Return the tokens in an answer, or in a part of a stream."""
    return [int(token) for token in part[0].data.reshape(-1).tolist()]
