"""Sound as bytes, files and forms, without a server."""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
import wave
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scribe
from hypothesis import given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.errors import ModelError
from batchmaker.server import Audio, Signature, TensorSpec, Transcriptions
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.audio import PCM16, PCMU
from batchmaker.server.formats.chunk_form import ChunkForm
from batchmaker.server.formats.derived_signature import signature_of
from batchmaker.server.formats.form_body import read_form
from batchmaker.server.formats.pieces import at_once
from batchmaker.server.formats.resampling import PASSBAND, STOPBAND_DB, Resampler
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.formats.transcriptions import Transcriber, transcriber_of
from batchmaker.server.formats.wav import read_wav
from batchmaker.server.http.middleware import key_in_protocols
from batchmaker.server.limits import Limits
from batchmaker.server.service.transcript import Transcript

SAMPLES = TensorSpec("sound", "FP32", (-1,))
ROWS = TensorSpec("sound", "FP32", (-1, 4))
LOUD = TensorSpec("loud", "INT64", (-1,))


def refused(work: Any) -> str:
    with pytest.raises(ServiceError) as caught:
        work()
    assert caught.value.kind is FaultKind.INVALID
    return str(caught.value)


# --- samples ---------------------------------------------------------------------------------------------------------


def test_pcm_of_16_bits_is_scaled_and_little_endian():
    data = struct.pack("<5h", 0, 1, -1, 32767, -32768)
    np.testing.assert_array_equal(Audio(8000).samples(data, PCM16), np.array([0, 1, -1, 32767, -32768]) / 32768)
    kaldi = Audio(8000, scale=1.0).samples(data, PCM16)
    assert (kaldi.dtype, kaldi.tolist()) == (np.float32, [0.0, 1.0, -1.0, 32767.0, -32768.0])


def test_mu_law_has_the_values_of_the_standard():
    steps = Audio(8000, scale=1.0).samples(bytes(range(256)), PCMU)
    # ITU-T G.711, table 2a: decision values in 14 bits, times 4: the ends, the first steps and the sign
    known = {0x80: 32124, 0x00: -32124, 0xFF: 0, 0x7F: 0, 0xFE: 8, 0x7E: -8, 0xEF: 132, 0x8F: 16764, 0xF0: 120}
    assert {code: steps[code] for code in known} == known
    positive = steps[0x80:]
    assert (np.diff(positive) < 0).all(), "the larger the code, the smaller the sample"
    np.testing.assert_array_equal(steps[:0x80], -positive)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        audioop = pytest.importorskip("audioop", reason="gone from the standard library in Python 3.13")
    np.testing.assert_array_equal(steps, np.frombuffer(audioop.ulaw2lin(bytes(range(256)), 2), "<i2"))


def test_sound_of_another_rate_or_encoding_is_refused_with_what_is_wanted():
    audio = Audio(16000)
    assert audio.encoding("pcm16") is PCM16
    assert audio.encoding("pcm16", 16000) is PCM16
    assert Audio(8000).encoding("mulaw") is Audio(8000).encoding("pcmu", 8000) is PCMU
    assert "pcmu is sound of 8000 Hz, and the model takes 16000 Hz" in refused(lambda: audio.encoding("pcmu"))
    assert "sound of 48000 Hz" in refused(lambda: audio.encoding("pcm16", 48000))
    assert "Did you mean 'pcm16'" in refused(lambda: audio.encoding("pcm_16"))
    assert "3 bytes of sound are no whole number" in refused(lambda: audio.samples(bytes(3), PCM16))


@pytest.mark.parametrize("options", [{"sample_rate": 0}, {"scale": 0.0}, {"scale": float("nan")}])
def test_audio_that_cannot_be_is_refused(options):
    with pytest.raises(ModelError, match="the rate must be"):
        Audio(**{"sample_rate": 8000, **options})


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_binary_messages_are_sound_if_the_query_says_so():
    signature = Signature((ROWS,), (LOUD,), audio=Audio(8000))
    sent = np.arange(-4, 4, dtype="<i2")
    (read,) = ChunkForm(signature, {"audio": "pcm16"}).read(sent.tobytes()).inputs
    np.testing.assert_array_equal(read.data, sent.reshape(2, 4) / 32768)
    assert (read.name, read.datatype) == ("sound", "FP32")
    (coded,) = ChunkForm(signature, {"audio": "pcmu"}).read(bytes([0xFF, 0x00, 0x80, 0x7F])).inputs
    np.testing.assert_array_equal(coded.data, [[0, -32124 / 32768, 32124 / 32768, 0]])
    form = ChunkForm(signature, {"audio": "pcm16", "rate": "8000"})
    assert "6 samples are no whole number of rows of 4" in refused(lambda: form.read(bytes(12)))
    assert "rate must be a number" in refused(lambda: ChunkForm(signature, {"audio": "pcm16", "rate": "fast"}))
    silent = Signature((ROWS,), (LOUD,))
    assert "no serving_audio" in refused(lambda: ChunkForm(silent, {"audio": "pcm16"}))
    (plain,) = ChunkForm(signature, {}).read(np.ones(4, "<f4").tobytes()).inputs
    np.testing.assert_array_equal(plain.data, np.ones((1, 4)))


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16"])
def test_a_tensor_of_int16_is_sound_for_the_input_that_says_so_alone(datatype):
    gain = TensorSpec("gain", "FP32", (-1,), optional=True)
    signature = Signature((TensorSpec("sound", datatype, (-1,)), gain), (LOUD,), audio=Audio(8000))
    steps = np.array([0, 16384, -32768], np.int16)
    given = signature.to_request([Tensor("sound", "INT16", steps)], Limits())
    np.testing.assert_array_equal(given["sound"], [0, 0.5, -1])
    for name, kind in (("gain", "INT16"), ("sound", "INT32")):
        tensors = [Tensor("sound", "FP32", np.zeros(1, np.float32)), Tensor(name, kind, steps)][-1:]
        assert f"got {kind}" in refused(lambda tensors=tensors: signature.to_request(tensors, Limits()))


@pytest.mark.parametrize(
    "inputs",
    [
        (TensorSpec("sound", "INT64", (-1,)),),
        (TensorSpec("sound", "FP32", (8,)),),
        (TensorSpec("sound", "FP32", (-1, -1)),),
        (TensorSpec("sound", "FP32", (-1, 0)),),
        (SAMPLES, TensorSpec("other", "FP32", (-1,))),
        (),
    ],
)
def test_an_input_that_cannot_be_sound_is_the_models_error(inputs):
    with pytest.raises(ModelError, match="sound must be a tensor of floats"):
        Signature(inputs, (LOUD,), audio=Audio(8000))


def test_the_input_that_is_sound_can_be_named():
    signature = Signature((SAMPLES, TensorSpec("other", "FP32", (-1,))), (LOUD,), audio=Audio(8000, input="sound"))
    assert signature.audio_input is SAMPLES


class Deaf(bm.Model):
    example_request = np.zeros(3, np.float32)

    def unfold(self, sound: Any) -> Any:
        return sound

    def serving_audio(self) -> Any:
        return 8000


def test_serving_audio_that_returns_something_else_is_the_models_error():
    with pytest.raises(ModelError, match=r"Deaf.serving_audio\(\) returned int"):
        signature_of(Deaf(), np.zeros(3), [])


# --- transcribers ----------------------------------------------------------------------------------------------------


class Hearing(bm.Model):
    """A model whose declarations are whatever a test wants."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def unfold(self, sound: Any) -> Any:
        return sound

    def unfold_chunk(self, sound: Any, state: Any) -> Any:
        return sound, None

    def serving_transcriptions(self) -> Any:
        return self.said


class Whole(Hearing):
    unfold_chunk = bm.Model.unfold_chunk


TOKENS = Transcriptions(decode=scribe.letters)
AUDIBLE = Signature((SAMPLES,), (LOUD,), audio=Audio(8000))
TEXT = TensorSpec("text", "BYTES", (1,))


def test_a_model_that_writes_tokens_or_texts_is_a_transcriber():
    found = transcriber_of(Hearing(TOKENS), AUDIBLE, Limits())
    assert (found.spec, found.output, found.chunk_size, found.row) == (SAMPLES, LOUD, 8000, 1)
    rows = Signature((ROWS,), (LOUD, TEXT), audio=Audio(8000))
    found = transcriber_of(Hearing(Transcriptions(output="text", chunk_s=0.01)), rows, Limits())
    assert (found.output, found.chunk_size, found.row) == (TEXT, 80, 4)
    small = transcriber_of(Hearing(TOKENS), AUDIBLE, Limits(max_sequence=100))
    assert small.chunk_size == 100
    assert transcriber_of(Hearing(None), AUDIBLE, Limits()) is None


@pytest.mark.parametrize(
    ("model", "signature", "said"),
    [
        (Hearing("text"), AUDIBLE, "returned str"),
        (Hearing(TOKENS), Signature((SAMPLES,), (LOUD,)), r"define serving_audio\(\)"),
        (Whole(TOKENS), AUDIBLE, "needs an unfold_chunk"),
        (
            Hearing(TOKENS),
            Signature((SAMPLES, TensorSpec("who", "INT64", (1,))), (LOUD,), audio=Audio(8000, input="sound")),
            "the inputs who must be optional",
        ),
        (Hearing(TOKENS), Signature((SAMPLES,), (LOUD,), audio=Audio(8000), decode=min), "has no `decode`"),
        (Hearing(TOKENS), Signature((SAMPLES,), (TEXT,), audio=Audio(8000)), "must be new tokens"),
        (Hearing(Transcriptions()), AUDIBLE, "must be a text"),
        (Hearing(TOKENS), Signature((SAMPLES,), (LOUD, LOUD), audio=Audio(8000)), "name it if there are others"),
    ],
)
def test_a_model_that_cannot_be_a_transcriber_says_why(model, signature, said):
    with pytest.raises(ModelError, match=said):
        transcriber_of(model, signature, Limits())


def test_chunks_of_no_length_are_refused():
    with pytest.raises(ModelError, match="chunk_s"):
        Transcriptions(chunk_s=0.0)


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(0, 50), max_size=12), row=st.integers(1, 7), rows=st.integers(1, 4))
def test_sound_in_whatever_pieces_becomes_the_same_rows(sizes, row, rows):
    spec = TensorSpec("sound", "FP32", (-1, row))
    transcriber = Transcriber(TOKENS, Audio(8000), spec, LOUD, rows * row)
    transcript = Transcript(SimpleNamespace(), transcriber, SimpleNamespace())  # type: ignore[arg-type]
    pcm = np.arange(1, sum(sizes) + 1, dtype="<i2")
    cuts = np.split(pcm, np.cumsum(sizes)[:-1]) if sizes else []
    chunks = [chunk for cut in cuts for chunk in transcript.chunks(cut.tobytes(), PCM16, 8000)]
    chunks += transcript.rest()
    assert all(len(chunk) % row == 0 and 0 < len(chunk) <= rows * row for chunk in chunks)
    heard = np.concatenate([np.zeros(0, np.float32), *chunks])
    padded = np.concatenate([pcm, np.zeros(-len(pcm) % row)])
    np.testing.assert_array_equal(heard, padded / 32768)
    assert transcript.seconds == len(pcm) / 8000
    assert list(transcript.rest()) == []


# --- resampling ------------------------------------------------------------------------------------------------------

RATES = [(24000, 16000), (8000, 16000), (48000, 16000), (44100, 16000), (24000, 8000), (16000, 24000), (11025, 8000)]


def resampled(sound: Any, rate: int, wanted: int, cuts: Any = ()) -> Any:
    resampler = Resampler(rate, wanted)
    parts = [resampler.feed(part) for part in np.split(sound.astype(np.float32), sorted(cuts))]
    return np.concatenate([*parts, resampler.rest()])


@pytest.mark.parametrize(("rate", "wanted"), RATES)
def test_a_tone_of_one_rate_is_the_same_tone_of_another(rate, wanted):
    for part in (0.0, 0.1, 0.5, PASSBAND):
        hz = part * min(rate, wanted) / 2
        heard = resampled(np.cos(2 * np.pi * hz * np.arange(rate) / rate + 0.3), rate, wanted)
        assert len(heard) == wanted
        inner = slice(wanted // 10, -wanted // 10)  # the sound begins and ends at once, so its ends are blurred
        expected = np.cos(2 * np.pi * hz * np.arange(wanted) / wanted + 0.3)
        np.testing.assert_allclose(heard[inner], expected[inner], atol=3e-4)


@pytest.mark.parametrize(("rate", "wanted"), [(rate, wanted) for rate, wanted in RATES if rate > wanted])
def test_what_the_lower_rate_cannot_have_is_left_out(rate, wanted):
    for hz in (wanted / 2 * 1.001, wanted / 2 * 1.05, rate / 2 * 0.99):
        heard = resampled(np.cos(2 * np.pi * hz * np.arange(rate) / rate), rate, wanted)
        inner = heard[wanted // 10 : -wanted // 10]
        assert 20 * np.log10(np.abs(inner).max()) < -STOPBAND_DB + 1


@settings(max_examples=100)
@given(
    rates=st.sampled_from(RATES),
    length=st.integers(0, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=8),
)
def test_pieces_of_sound_are_resampled_as_the_whole(rates, length, cuts):
    sound = np.random.default_rng(length).standard_normal(length)
    whole, pieces = resampled(sound, *rates), resampled(sound, *rates, [min(cut, length) for cut in cuts])
    assert len(whole) == -(-length * rates[1] // rates[0])
    np.testing.assert_allclose(pieces, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rate", [1, 15_999, 1_000_003, 4_000_000_000])
def test_rates_that_would_need_a_huge_filter_are_refused(rate):
    assert f"sound of {rate} Hz cannot be made one of 16000 Hz" in refused(lambda: Resampler(rate, 16000))


# --- WAV files -------------------------------------------------------------------------------------------------------


def riff(*chunks: tuple[bytes, bytes], claimed: int | None = None) -> bytes:
    parts = []
    for name, data in chunks:
        size = len(data) if claimed is None or name != b"data" else claimed
        parts.append(name + struct.pack("<I", size) + data + b"\0" * (len(data) % 2))
    body = b"".join(parts)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def form_of(tag: int, bits: int, channels: int = 1, rate: int = 8000) -> bytes:
    return struct.pack("<HHIIHH", tag, channels, rate, rate * bits // 8, bits // 8, bits)


def test_a_file_of_the_standard_library_is_read():
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(11025)
        out.writeframes(bytes(range(8)))
    found = read_wav(file.getvalue())
    assert (found.encoding, found.rate, bytes(found.data), found.num_samples) == (PCM16, 11025, bytes(range(8)), 4)


def test_other_chunks_the_extensible_format_and_unknown_sizes_are_read():
    plain = form_of(1, 16)
    extended = form_of(0xFFFE, 16) + struct.pack("<HHI", 22, 16, 4) + struct.pack("<H", 1) + bytes(14)
    sound = bytes(range(10))
    for file in (
        riff((b"LIST", b"odd"), (b"fmt ", plain), (b"fact", bytes(4)), (b"data", sound), (b"id3 ", b"x")),
        riff((b"fmt ", extended), (b"data", sound)),
        riff((b"fmt ", plain), (b"data", sound), claimed=0xFFFFFFFF),
        b"RIFF" + bytes(4) + riff((b"fmt ", plain), (b"data", sound), claimed=0)[8:],
    ):
        assert bytes(read_wav(file).data) == sound


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"", "no WAV file"),
        (b"fLaC" + bytes(40), "the file is FLAC"),
        (bytes(4) + b"ftypM4A " + bytes(40), "the file is MP4"),
        (riff((b"fmt ", form_of(1, 16))), "has no sound in it"),
        (riff((b"data", bytes(4))), "has no sound in it"),
        (riff((b"fmt ", form_of(1, 16)[:9]), (b"data", bytes(4))), "is cut in its chunk"),
        (riff((b"fmt ", form_of(1, 16)), (b"data", bytes(4)), claimed=6), "the file is cut"),
        (riff((b"fmt ", form_of(1, 16)), (b"data", bytes(5))), "no whole number of samples"),
        (riff((b"fmt ", form_of(1, 16, 2)), (b"data", bytes(4))), "has 2 channels"),
        (riff((b"fmt ", form_of(1, 8)), (b"data", bytes(4))), "samples of 8 bits in format 0x0001"),
        (riff((b"fmt ", form_of(6, 8)), (b"data", bytes(4))), "samples of 8 bits in format 0x0006"),
        (riff(*[(b"LIST", b"")] * 1000, (b"fmt ", form_of(1, 16)), (b"data", bytes(4))), "has no sound in it"),
    ],
)
def test_a_file_that_is_no_sound_of_one_channel_is_refused(file, said):
    assert said in refused(lambda: read_wav(file))


@settings(max_examples=300)
@given(st.binary(max_size=80), st.booleans())
def test_whatever_a_file_holds_it_is_read_or_refused(data, has_head):
    with contextlib.suppress(ServiceError):
        read_wav(b"RIFF\0\0\0\0WAVE" + data if has_head else data)


# --- forms -----------------------------------------------------------------------------------------------------------

NAME = st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n;'), min_size=1, max_size=8).filter(
    lambda name: name == name.strip()
)


@settings(max_examples=200)
@given(
    fields=st.dictionaries(NAME, st.text(max_size=20), max_size=3),
    file=st.one_of(
        st.binary(max_size=300), st.lists(st.sampled_from([b"\r\n--B", b"\r", b"--B--", b"x"])).map(b"".join)
    ),
)
def test_a_form_is_read_as_it_was_written(fields, file):
    boundary = "B-of-the-form"
    body = b""
    for name, value in fields.items():
        head = f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'
        body += head.encode() + value.encode() + b"\r\n"
    body += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a b.wav"\r\n'.encode()
    body += b"Content-Type: audio/wav\r\n\r\n" + file + f"\r\n--{boundary}--\r\n".encode()
    found = at_once(read_form(body, f'multipart/form-data; boundary="{boundary}"'))
    assert found.files == {"file": file}
    assert found.fields == {name: [value] for name, value in fields.items()}


def test_a_large_form_is_read_in_pieces():
    file = np.random.default_rng(0).bytes(300_000)
    body = b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + file + b"\r\n--B--"
    turns: list[None] = []

    def counted() -> Iterator[None]:
        found = yield from read_form(body, "multipart/form-data; boundary=B")
        assert found.files["file"] == file

    turns.extend(counted())
    assert len(turns) >= 4


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([b'Content-Disposition: form-data; name="a"\r\n\r\n\xff'], "is not UTF-8"),
        ([b'Content-Disposition: form-data; name="a"; filename="x"\r\n\r\n'] * 2, "two files 'a'"),
        ([b'Content-Disposition: form-data; name="a"\r\n\r\n'] * 65, "more than 64 parts"),
        ([b'Content-Disposition: form-data; name="a"\r\n\r\n' + bytes(70_000)], "70000 bytes; at most 65536"),
    ],
)
def test_a_form_that_is_wrong_is_refused(parts, said):
    body = b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + b"--B--\r\n"
    assert said in refused(lambda: at_once(read_form(body, "multipart/form-data; boundary=B")))


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_whatever_a_body_holds_it_is_read_or_refused(data):
    for body in (data, b"--B\r\n" + data, b"--B\r\nContent-Disposition: " + data):
        with contextlib.suppress(ServiceError):
            at_once(read_form(body, "multipart/form-data; boundary=B"))


def test_a_browsers_key_of_openais_realtime_api_is_found():
    assert key_in_protocols(["realtime", "openai-insecure-api-key.0123456789abcdef"]) == "0123456789abcdef"
