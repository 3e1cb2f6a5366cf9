"""The example `voice_activity` against the network that it takes its weights from, alone, in batches and live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import wave
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import batchmaker as bm
import batchmaker.client
from waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "voice_activity"
SERVER_TESTS = REPOSITORY / "tests" / "server"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FRAME, RATE = 512, 16_000
TOLERANCE = 2e-5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:DeprecationWarning"),
    pytest.mark.skipif(find_spec("silero_vad") is None, reason="needs silero-vad, of the extra `examples`"),
]


def vowel(num_frames: int, pitch: float, seed: int) -> NDArray[np.float32]:
    """Something like a voice for a while, with silence before and after: pulses through three formants."""
    samples, rng = np.zeros(num_frames * FRAME), np.random.default_rng(seed)
    times = np.arange(len(samples)) / RATE
    spoken = slice(len(samples) // 4, 3 * len(samples) // 4)
    phase = np.cumsum(pitch * (1 + 0.1 * np.sin(2 * np.pi * 3 * times))) / RATE
    samples[spoken] = (np.diff(np.floor(phase), prepend=0) * 20)[spoken]
    spectrum, frequencies = np.fft.rfft(samples), np.fft.rfftfreq(len(samples), 1 / RATE)
    heard = sum(1 / (1 + ((frequencies - formant) / 90) ** 2) for formant in (700, 1220, 2600))
    sound = np.fft.irfft(spectrum * heard, len(samples))
    return (0.4 * sound / np.abs(sound).max() + 1e-3 * rng.standard_normal(len(samples))).astype(np.float32)


SOUNDS = [vowel(8 + 11 * seed, 100 + 20 * seed, seed) for seed in range(6)]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The package's own network. Its reader of recordings is not needed."""
    (folder,) = find_spec("silero_vad").submodule_search_locations
    network = torch.jit.load(Path(folder) / "data" / "silero_vad.jit", map_location="cpu")
    network.eval()
    return network


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import voice_activity

        yield voice_activity.build()
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def engine(model) -> Iterator[bm.Engine]:
    with bm.Engine(model) as engine:
        yield engine


def answers_of(network: Any, sound: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the package's network says to each frame."""
    network.reset_states()
    with torch.no_grad():
        return np.array([network(torch.from_numpy(frame), RATE).item() for frame in sound.reshape(-1, FRAME)])


def test_recordings_get_the_networks_own_probabilities(engine, theirs):
    results = engine.map([torch.from_numpy(sound.reshape(-1, FRAME)) for sound in SOUNDS], progress=False)
    for sound, result in zip(SOUNDS, results, strict=True):
        np.testing.assert_allclose(result, answers_of(theirs, sound), atol=TOLERANCE)
    heard = torch.cat(list(results))
    assert heard.max() > 0.5 > 0.1 > heard.min()


@pytest.mark.parametrize("size", [1, 3])
def test_live_streams_get_them_too(engine, theirs, size):
    sequences = [engine.open_sequence() for _ in SOUNDS]
    chunks = [torch.from_numpy(sound.reshape(-1, FRAME)).split(size) for sound in SOUNDS]
    futures = [[sequence.submit(chunk) for chunk in parts] for sequence, parts in zip(sequences, chunks, strict=True)]
    for sound, parts, sequence in zip(SOUNDS, futures, sequences, strict=True):
        heard = torch.cat([future.result() for future in parts])
        np.testing.assert_allclose(heard, answers_of(theirs, sound), atol=TOLERANCE)
        sequence.close()


# --- a server, and the way to it in the documentation -----------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    """A sound as a file, and what it holds once it has been one."""
    path = tmp_path_factory.mktemp("sound") / "vowel.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((SOUNDS[-1] * 32_767).astype("<i2").tobytes())
    return path


@pytest.fixture(scope="module")
def served(model, tmp_path_factory) -> Iterator[Any]:
    sys.path.append(str(SERVER_TESTS))
    from server_process import RunningServer

    folder = tmp_path_factory.mktemp("models")
    bm.save(model, folder / "voice_activity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(EXAMPLE), os.environ.get("PYTHONPATH")])))
        server = RunningServer((str(folder), "--page", str(EXAMPLE / "page.html")), folder / "server.log")
    yield server
    server.close()
    sys.path.remove(str(SERVER_TESTS))


def test_the_documented_way_from_a_file_to_many_streams_is_that_of_this_network(served, recording, theirs):
    """The functions on the page, with silero-vad in place of the page's own small network."""
    text = (REPOSITORY / "docs" / "live-audio.md").read_text("utf-8")
    section = text.partition("## From a file to 500 live streams")[2].partition("\n## ")[0]
    names: dict[str, Any] = {
        "asyncio": asyncio, "contextlib": contextlib, "np": np, "wave": wave, "Client": batchmaker.client.Client,
    }  # fmt: skip
    for block in re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        if "def " in block:
            exec(block, names)
    frames, address = names["frames_of"](str(recording)), f"http://{served.address}"
    answers = asyncio.run(names["hear"](address, "voice_activity", frames))
    expected = answers_of(theirs, frames.reshape(-1))
    np.testing.assert_allclose([answer["speech"] for answer in answers], expected[:, None], atol=1e-3)
    late_ms = asyncio.run(names["play"](address, "voice_activity", frames[:5], streams=20, connections=2))
    assert len(late_ms) == 5 * 20
    assert served.metric("batchmaker_sequences_ended_total", why="finished") == 1 + 20


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(served, recording, tmp_path_factory) -> Iterator[Any]:
    """The page in a browser whose microphone plays the recording."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream", f"--use-file-for-fake-audio-capture={recording}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    browser.get(f"http://{served.address}/page")
    yield browser
    browser.quit()


def test_the_page_draws_a_recording_with_its_probabilities(page, served, recording, theirs):
    page.find_element("id", "file").send_keys(str(recording))
    wait_until(lambda: "Speech in" in page.find_element("id", "said").text)
    wait_until(
        lambda: page.execute_script("return heard.speech.length === heard.frames.length && heard.ended !== null")
    )
    with wave.open(str(recording)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / np.float32(32_768)
    expected = answers_of(theirs, samples.astype(np.float32))
    np.testing.assert_allclose(page.execute_script("return heard.speech"), expected, atol=1e-3)
    seconds = (expected >= 0.5).sum() * FRAME / RATE
    assert (
        f"Speech in {seconds:.1f} of {len(expected) * FRAME / RATE:.1f} seconds" in page.find_element("id", "said").text
    )
    assert drawn(page, "--speech") > 100 < drawn(page, "--heard")
    served.wait_for(lambda: served.metric("batchmaker_open_websockets") == 0)
    assert [entry["message"] for entry in page.get_log("browser")] == []


def test_the_page_listens_to_the_microphone(page, served):
    button = page.find_element("id", "microphone")
    button.click()
    wait_until(lambda: page.execute_script("return heard?.live && heard.speech.length > 60"))
    assert served.metric("batchmaker_open_websockets", model="voice_activity") == 1
    assert page.execute_script("return Math.max(...heard.speech) > 0.5 && Math.min(...heard.speech) < 0.5")
    button.click()
    served.wait_for(lambda: served.metric("batchmaker_open_websockets") == 0)
    assert button.text == "Microphone"


def drawn(page: Any, colour: str) -> int:
    """Pixels of the canvas that have exactly the colour of one of the page's variables."""
    return page.execute_script(
        """
        const text = getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim();
        const wanted = [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
        copy.drawImage(canvas, 0, 0);
        const {data} = copy.getImageData(0, 0, canvas.width, canvas.height);
        let found = 0;
        for (let at = 0; at < data.length; at += 4) found += wanted.every((value, part) => data[at + part] === value);
        return found;
        """,
        colour,
    )
