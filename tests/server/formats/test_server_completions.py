"""What OpenAI's API asks for, and the text of tokens while they come."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot import END, decode, encode

import batchmaker as bm
from batchmaker.errors import ModelError
from batchmaker.server import Completions, Signature, TensorSpec
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.completions import MOST_CHARACTERS, Writing, choices_of, completions_of, read_ask
from batchmaker.server.formats.pieces import at_once
from batchmaker.server.limits import Limits

BYTES = Completions(encode, decode, END)
INPUTS = (TensorSpec("prompt", "INT64", (-1,)), TensorSpec("max_tokens", "INT64", (1,), optional=True))
SAMPLED = (
    TensorSpec("temperature", "FP32", (1,)),
    TensorSpec("top_p", "FP32", (1,)),
    TensorSpec("seed", "INT64", (1,)),
)
OUTPUT = (TensorSpec("output_0", "INT64", (-1,)),)
GREEDY = Signature(INPUTS, OUTPUT, stream="elements")
FULL = Signature((*INPUTS, *SAMPLED), OUTPUT, stream="elements")


def written(text: str | bytes, *stops: str, most: int = 1000, ends: bool = True) -> tuple[list[str], Writing]:
    """The pieces of a text that comes byte by byte."""
    writing, pieces = Writing(BYTES, stops, most), []
    tokens = [*(text.encode() if isinstance(text, str) else text), *([END] if ends else [])]
    for token in tokens[:most]:
        pieces.append(writing.add(token))
        if writing.finished is not None:
            return pieces, writing
    return [*pieces, writing.end()], writing


@settings(max_examples=200)
@given(st.text(max_size=30))
def test_pieces_are_whole_characters_and_together_the_text(text):
    pieces, writing = written(text)
    assert "".join(pieces) == text
    assert writing.finished == "stop"
    assert writing.num_tokens == len(text.encode()) + 1
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.startswith(shown)


@settings(max_examples=200)
@given(st.text("ab€", max_size=20), st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_text_ends_before_the_first_stop_string_however_it_comes(text, stops):
    pieces, writing = written(text, *stops)
    ends = [text.index(stop) for stop in stops if stop in text]
    whole = "".join(pieces)
    assert writing.finished == "stop"
    if not ends:
        assert whole == text
    else:  # a stop string that ends earlier is seen earlier, even if another began before it
        assert text.startswith(whole)
        assert not any(stop in whole for stop in stops)
        assert any(text.startswith(stop, len(whole)) for stop in stops)


def test_a_character_that_never_comes_is_shown_at_the_end():
    assert "".join(written(b"a\xe2\x82")[0]) == "a\ufffd"
    assert "".join(written(b"\xff\xfea\xff")[0]) == "\ufffd\ufffda\ufffd"
    pieces, writing = written("a€", most=3, ends=False)
    assert ("".join(pieces), writing.finished) == ("a\ufffd", "length")


def test_a_held_beginning_of_a_stop_string_is_shown_if_the_text_ends():
    pieces, writing = written("abc", "cd", most=3, ends=False)
    assert pieces == ["a", "b", "", "c"]
    assert writing.finished == "length"


def test_a_tokenizer_that_drops_the_space_of_a_first_word_keeps_it_between_words():
    words = ["▁good", "▁morn", "ing", "▁all"]
    pieces = Completions(list, lambda tokens: "".join(words[token] for token in tokens).replace("▁", " ").lstrip())
    writing = Writing(pieces, (), 9)
    assert [writing.add(token) for token in range(4)] == ["good", " morn", "ing", " all"]


def test_what_comes_after_the_end_of_a_text_is_no_part_of_it():
    for stops, tokens in (((), [97, END, 98]), (("b",), b"abc")):
        writing = Writing(BYTES, stops, 9)
        assert "".join([*map(writing.add, tokens), writing.end()]) == "a"
        assert (writing.finished, writing.num_tokens) == ("stop", 2)


def asked(**fields: Any) -> Any:
    return read_ask(json.dumps({"model": "m", "prompt": "ab", **fields}).encode())


def choices(ask: Any, completions: Completions, signature: Signature) -> list[Any]:
    return at_once(choices_of(ask, completions, signature, Limits(max_sequence=1000)))


def inputs(choice: Any) -> dict[str, Any]:
    return {tensor.name: tensor.data.tolist() for tensor in choice.request.inputs}


def test_fields_become_the_inputs_that_the_model_has():
    (choice,) = choices(asked(temperature=0.5, top_p=0.9, seed=4, max_tokens=7), BYTES, FULL)
    assert inputs(choice) == {
        "prompt": [97, 98], "max_tokens": [7], "temperature": [0.5], "top_p": [0.9], "seed": [4],
    }  # fmt: skip
    (plain,) = choices(asked(), BYTES, GREEDY)
    assert inputs(plain) == {"prompt": [97, 98], "max_tokens": [16]}
    (drawn,) = choices(asked(), BYTES, FULL)
    assert inputs(drawn)["temperature"] == [1.0]
    assert inputs(drawn)["seed"] != inputs(choices(asked(), BYTES, FULL)[0])["seed"]


def test_prompts_are_texts_or_tokens_one_or_several_and_each_is_continued_n_times():
    for prompt, tokens in (
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ):
        found = choices(asked(prompt=prompt, n=2, seed=5, echo=True), BYTES, FULL)
        assert [inputs(choice)["prompt"] for choice in found] == [each for each in tokens for _ in range(2)]
        assert [inputs(choice)["seed"] for choice in found] == [[5], [6]] * len(tokens)
        assert [choice.number for choice in found] == list(range(len(found)))
        assert [choice.begin for choice in found] == [decode(each) for each in tokens for _ in range(2)]
    (last,) = choices(asked(n=2, seed=(1 << 63) - 1), BYTES, FULL)[1:]
    assert inputs(last)["seed"] == [-(1 << 63)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 200}, "`\\$.n`"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"seed": 1 << 70}, "."),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt must be a text"),
        ({"prompt": ["a"] * 129}, "at most 128 texts"),
        ({"prompt": ["a"] * 65, "n": 2}, "at most 128 texts"),
        ({"prompt": [[]] * 1_000_000}, "at most 128 texts"),
        ({"prompt": True}, "prompt must be a text"),
        ({"prompt": [None]}, "'prompt'.*got `null`"),
        ({"prompt": [1.5]}, "'prompt'.*got `float`"),
        ({"prompt": [[1], 3]}, "prompt must be a text"),
        ({"prompt": [1, [3]]}, "'prompt'"),
        ({"prompt": [[[1]]]}, "'prompt': got shape"),
        ({"prompt": [1] * 1001}, "a dimension of 1001 is more than 1000"),
        ({"prompt": "a" * (1000 * MOST_CHARACTERS + 1)}, "16001 characters is more than 16000"),
        ({"stop": ["a"] * 1_000_000}, "at most 4 strings"),
        ({"stop": [""]}, "length >= 1 - at `\\$.stop"),
        ({"best_of": True}, "best_of is not supported"),
        ({"suffix": [[]] * 1_000_000}, "suffix is not supported"),
        ({"prompt": "\N{SNOWMAN}"}, "cannot make tokens of this prompt"),
        ({"logprobs": 2}, "logprobs is not supported"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"messages": []}, "messages"),
        ({"temperature": 0.5}, "takes no temperature"),
        ({"top_p": 0.5}, "takes no top_p"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(fields, said):
    with pytest.raises(ServiceError, match=said) as caught:
        choices(asked(**fields), BYTES, GREEDY)
    assert caught.value.kind is FaultKind.INVALID
    assert "secret" not in str(caught.value)


def test_a_field_that_is_sent_twice_is_refused_and_named():
    with pytest.raises(ServiceError, match="the key 'prompt' is sent twice"):
        read_ask(b'{"model": "m", "prompt": "ab", "stream": false, "prompt": "cd"}')


def test_fields_that_ask_for_nothing_are_taken():
    neutral = {"logprobs": None, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    assert len(choices(asked(**neutral, temperature=0, top_p=1, seed=3, user="ann"), BYTES, GREEDY)) == 1


def of_ascii(tokens: Any) -> str:
    return bytes(tokens).decode("ascii")


@pytest.mark.parametrize(
    ("decode", "said"),
    [
        (of_ascii, r"the model computed the token 200, of which its own decode makes no text"),
        (lambda tokens: 200 if 200 in tokens else "", r"computed the token 200"),
        (lambda tokens: tokens[9], r"computed the token 97"),
        (lambda tokens: "" if len(tokens) < 2 else 1, r"computed tokens, of which its own decode makes no text"),
    ],
)
def test_a_decode_that_refuses_what_the_model_computed_is_the_models_fault(decode, said):
    writing = Writing(Completions(encode, decode), (), 9)
    with pytest.raises(ServiceError, match=said) as caught:
        "".join(map(writing.add, (97, 98, 200)))
    assert caught.value.kind is FaultKind.INTERNAL


def test_an_echo_of_tokens_that_decode_refuses_is_the_clients_fault():
    strict = Completions(encode, of_ascii)
    ask = asked(prompt=[97, 300, 98, 300, 99], echo=True)
    with pytest.raises(ServiceError, match=r"echo needs .* decode makes none of the token 300") as caught:
        choices(ask, strict, GREEDY)
    assert caught.value.kind is FaultKind.INVALID
    assert len(choices(asked(prompt=[97, 300]), strict, GREEDY)) == 1


class Texts(bm.Model):
    def serving_completions(self) -> Any:
        return BYTES

    def unfold(self, prompt: Any) -> Any:
        return prompt


def test_a_model_whose_tensors_are_not_those_of_completions_is_refused():
    assert completions_of(Texts(), FULL) is BYTES
    for signature in (
        Signature(INPUTS[:1], OUTPUT, stream="elements"),
        Signature((TensorSpec("prompt", "FP32", (-1,)), INPUTS[1]), OUTPUT, stream="elements"),
        Signature(INPUTS, OUTPUT, stream="result"),
        Signature(INPUTS, OUTPUT, stream="elements", encode=np.asarray),
    ):
        with pytest.raises(ModelError, match=r"serving_completions\(\), so its requests need `prompt`"):
            completions_of(Texts(), signature)
