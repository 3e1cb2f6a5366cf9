"""The page at `/` in a real browser: what it draws, says and does, with a mouse, a keyboard and a narrow screen."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from server_process import LIMIT_S, RunningServer

from waiting import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
KEY = "k" * 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver"),
]

NETWORK = ("lstm:hidden=32,vocabulary_size=50", "seq2seq:hidden=32,vocabulary_size=50")


@pytest.fixture(scope="module")
def server(serve) -> RunningServer:
    return serve(*NETWORK)


@pytest.fixture(scope="module")
def load(server) -> Iterator[None]:
    """A few requests a second for both models, one at a time each, for as long as the module's tests run."""
    over = threading.Event()

    def ask(model: str, content: dict[str, Any]) -> None:
        while not over.wait(0.05):
            assert server.post(f"/v2/models/{model}/generate", content).status == 200

    content = {
        "lstm": {"input_0": [3] * 200, "parameters": {"deadline_ms": 60_000}},
        "seq2seq": {"source": [3] * 60, "words": 60},
    }
    threads = [threading.Thread(target=ask, args=item) for item in content.items()]
    for thread in threads:
        thread.start()
    for model in content:
        server.wait_for(lambda model=model: server.metric("nv_inference_request_success", model=model) > 0)
    yield
    over.set()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    browser.set_script_timeout(LIMIT_S)
    browser.set_page_load_timeout(LIMIT_S)
    yield browser
    browser.quit()


@pytest.fixture
def browser(started) -> webdriver.Chrome:
    """A browser as wide as a desk, with empty logs."""
    started.get("about:blank")
    resize(started, 1200, 900)
    emulate(started)
    for log in ("browser", "performance"):
        started.get_log(log)
    return started


@pytest.fixture
def page(browser, server, load) -> webdriver.Chrome:
    """The page, drawn."""
    browser.get(f"http://{server.address}/")
    wait_until(lambda: at(browser, "#main").is_displayed())
    return browser


def resize(browser: webdriver.Chrome, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def emulate(browser: webdriver.Chrome, **features: str) -> None:
    chosen = {"prefers-color-scheme": "light", "prefers-reduced-motion": "no-preference"}
    chosen |= {name.replace("_", "-"): value for name, value in features.items()}
    listed = [{"name": name, "value": value} for name, value in chosen.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": listed})


def at(browser: webdriver.Chrome, selector: str) -> Any:
    return browser.find_element(By.CSS_SELECTOR, selector)


def tab(browser: webdriver.Chrome, name: str) -> Any:
    return browser.find_element(By.XPATH, f"//*[@role='tab'][text()='{name}']")


def selected(browser: webdriver.Chrome) -> str:
    return at(browser, "[role=tab][aria-selected=true]").text


def pixels(browser: webdriver.Chrome, canvas: str, colour: str) -> int:
    """How many pixels of a canvas have exactly the colour of one of the page's variables."""
    return browser.execute_script(
        """
        const canvas = document.querySelector(arguments[0]);
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
        copy.drawImage(canvas, 0, 0);
        const text = getComputedStyle(document.documentElement).getPropertyValue(arguments[1]).trim();
        const wanted = [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
        const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
        let found = 0;
        for (let at = 0; at < data.length; at += 4) found += wanted.every((value, part) => data[at + part] === value);
        return found;
        """,
        canvas,
        colour,
    )


def percentiles(browser: webdriver.Chrome) -> int:
    """Pixels of all the lines of the latency; where they fall together, the last one hides the others."""
    return sum(pixels(browser, "#latency", colour) for colour in ("--c7", "--c0", "--c3"))


def picture(browser: webdriver.Chrome, canvas: str = "#rows") -> str:
    return browser.execute_script(f"return document.querySelector('{canvas}').toDataURL()")


def requested(browser: webdriver.Chrome) -> list[str]:
    """The addresses that the page has asked for since this was called last."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [params["request"]["url"] for params in sent]


def complaints(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def show(browser: webdriver.Chrome, model: str) -> None:
    tab(browser, model).click()
    wait_until(lambda: browser.execute_script("return view !== null && view.name === arguments[0]", model))


def draw_two_requests(browser: webdriver.Chrome) -> None:
    """Pause, and draw long bars of the first two cells: how long the server's own are is the machine's."""
    at(browser, "#pause").click()
    browser.execute_script(
        """
        const times = {first: view.tick - 200, last: view.tick - 100, rows: 1, computed: 1};
        sight = newSight();
        take({...view, steps: [0, 1].map(cell => ({...times, cell, requests: [3 * cell]}))});
        """
    )


@pytest.mark.slow
def test_rows_are_drawn_in_the_colours_of_their_cells(page, tmp_path):
    show(page, "seq2seq")
    wait_until(lambda: page.execute_script("return new Set(sight.bars.map(bar => bar.cell)).size") == 2)
    assert [item.text for item in page.find_elements(By.CSS_SELECTOR, "#rows-key li")] == ["encoder", "decoder"]
    wait_until(lambda: pixels(page, "#load", "--c7") > 20)
    draw_two_requests(page)
    assert pixels(page, "#rows", "--c0") > 200 < pixels(page, "#rows", "--c1")
    assert page.save_screenshot(str(tmp_path / "live.png"))
    assert complaints(page) == []


def test_latency_is_drawn_against_the_deadline(page):
    tab(page, "lstm").click()
    wait_until(lambda: percentiles(page) > 20 and pixels(page, "#latency", "--alarm") > 5)
    assert "The shortest deadline is 60 s, and 0 were missed" in at(page, "#latency").get_attribute("aria-label")
    assert pixels(page, "#rows", "--c1") == 0  # it has one cell


@pytest.mark.parametrize("latency_ms", [5, 10, 90, 100, 120, 140, 600, 1000, 30_000])
def test_the_deadline_is_drawn_in_full_wherever_the_scale_puts_it(page, latency_ms):
    """Between two pixels a thin line has its own colour in neither."""
    at(page, "#pause").click()
    page.execute_script(
        """
        const told = {p50_ms: arguments[0], p90_ms: arguments[0], p99_ms: arguments[0], deadline_ms: 60000, steps: 0};
        seconds = new Map(Array.from({length: 10}, (_, at) => [at, {...told, second: at}]));
        view.now_s = 10.5;
        drawLatency();
        """,
        latency_ms,
    )
    assert pixels(page, "#latency", "--alarm") > 50


def test_a_server_that_does_not_answer_is_asked_again(page):
    page.execute_script(
        """
        const real = window.fetch, timeout = AbortSignal.timeout.bind(AbortSignal);
        let kept = 0;
        AbortSignal.timeout = milliseconds => timeout(kept ? milliseconds : 10);
        window.fetch = (what, how) => kept++ ? real(what, how) : new Promise((_, reject) =>
            how.signal.addEventListener("abort", () => reject(how.signal.reason)));
        view = null;
        """
    )
    wait_until(lambda: page.execute_script("return view !== null"))


def test_only_its_own_server_is_asked(page, server):
    wait_until(lambda: at(page, "#tiles").text.count("ms") > 2)
    hosts = {address.split("/")[2] for address in requested(page) if not address.startswith("data:")}
    assert hosts == {server.address}
    assert complaints(page) == []


@contextmanager
def standing_still(page: webdriver.Chrome) -> Iterator[None]:
    """Nothing is asked for in a time in which a running page asks twice."""
    requested(page)
    before = picture(page)
    yield
    page.execute_async_script("setTimeout(arguments[0], 1200)")
    assert requested(page) == []
    assert picture(page) == before


def test_pause_stops_and_goes_on(page):
    pause = at(page, "#pause")
    pause.click()
    assert (pause.get_attribute("aria-pressed"), at(page, "#state").text) == ("true", "paused")
    with standing_still(page):
        pass
    pause.click()
    assert pause.get_attribute("aria-pressed") == "false"
    wait_until(lambda: bool(requested(page)))
    wait_until(lambda: at(page, "#state").text == "serving")


def test_the_keyboard_reaches_and_moves_everything(page):
    def focused() -> Any:
        return page.switch_to.active_element

    def press(key: str) -> None:
        focused().send_keys(key)

    at(page, "body").send_keys(Keys.TAB)
    assert focused().get_attribute("id") == "pause"
    press(Keys.TAB)
    assert (focused().get_attribute("role"), focused().text) == ("tab", "lstm")
    press(Keys.ARROW_RIGHT)
    assert (focused().text, selected(page)) == ("seq2seq", "seq2seq")
    press(Keys.ARROW_RIGHT)
    assert (focused().text, selected(page)) == ("lstm", "lstm")
    press(Keys.END)
    wait_until(lambda: at(page, "#rows-key").text.startswith("encoder"))
    press(Keys.TAB)
    assert focused().get_attribute("value") == "10"
    press(Keys.ARROW_RIGHT)
    wait_until(lambda: at(page, "#rows").get_attribute("aria-label").startswith("Rows of the batch over 1 seconds"))
    press(Keys.TAB)
    assert focused().tag_name == "summary"
    press(Keys.ENTER)
    wait_until(lambda: "encoder" in at(page, "#cells").text)
    assert complaints(page) == []


def test_who_cannot_see_is_told_the_same(page):
    wait_until(lambda: "99 percent" in at(page, "#said").get_attribute("textContent"))
    said = at(page, "#said").get_attribute("textContent")
    assert said.startswith("lstm: ")
    assert "requests a second" in said
    assert at(page, "#said").get_attribute("aria-live") == "polite"
    panel = at(page, "[role=tabpanel]")
    assert at(page, "#" + panel.get_attribute("aria-labelledby")).text == "lstm"
    at(page, "summary").click()
    wait_until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#seconds tbody tr")) > 1)
    assert [head.text for head in page.find_elements(By.CSS_SELECTOR, "#cells thead th")][:2] == ["Cell", "Steps"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(page, scheme):
    resize(page, 360, 740)
    emulate(page, prefers_color_scheme=scheme)
    at(page, "summary").click()
    show(page, "seq2seq")
    draw_two_requests(page)
    assert pixels(page, "#rows", "--c0") > 50
    widths = "return [document.documentElement.scrollWidth, document.body.scrollWidth, window.innerWidth]"
    assert page.execute_script(widths) == [360, 360, 360]
    assert at(page, "#pause").rect["height"] >= 40  # a finger's


def test_less_motion_means_fewer_pictures(page):
    emulate(page, prefers_reduced_motion="reduce")
    wait_until(lambda: bool(requested(page)))
    assert page.execute_script("return period()") == 2000


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_for_the_tab(browser, serve, tmp_path):
    (tmp_path / "keys").write_text(f"ann:{KEY}\n")
    server = serve("lstm:hidden=4,vocabulary_size=9", "--api-keys", tmp_path / "keys")
    browser.get(f"http://{server.address}/")
    wait_until(lambda: at(browser, "#ask").is_displayed())
    at(browser, "#secret").send_keys("wrong", Keys.ENTER)
    wait_until(lambda: "does not know" in at(browser, "#wrong").text)
    at(browser, "#secret").send_keys(KEY, Keys.ENTER)
    wait_until(lambda: at(browser, "#main").is_displayed())
    browser.refresh()
    wait_until(lambda: at(browser, "#main").is_displayed())
    assert not at(browser, "#ask").is_displayed()
    assert all("401" in complaint for complaint in complaints(browser))
