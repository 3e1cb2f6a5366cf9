"""The dashboard, the alerts and Prometheus's settings in deploy/, with Prometheus itself where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import DEPLOY, METRIC, RUNBOOK, alerts, documents, exported
from server_process import LIMIT_S, RunningServer

from waiting import wait_until

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")

DASHBOARD = json.loads((DEPLOY / "grafana" / "batchmaker.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {one["name"]: one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"}


def queries() -> list[str]:
    """All queries of the dashboard, with what Grafana puts in place of its variables."""
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]]
    asked += [one["expr"] for one in DASHBOARD["annotations"]["list"]]
    return [re.sub(r"\$(job|instance|model)\b", ".+", one).replace("$__rate_interval", "1m") for one in asked]


def test_the_dashboard_and_the_alerts_ask_only_for_what_the_server_has():
    asked = [*queries(), *VARIABLES.values(), *(rule["expr"] for rule in alerts())]
    named = {name for query in asked for name in METRIC.findall(query)}
    assert len(named) > 25
    assert sorted(named - exported()) == []


def test_every_panel_has_its_own_place_and_says_what_it_shows():
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        box = panel["gridPos"]
        cells = {(box["x"] + i, box["y"] + j) for i in range(box["w"]) for j in range(box["h"])}
        assert not cells & places, panel["title"]
        assert box["x"] + box["w"] <= 24
        places |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert [panel["id"] for panel in PANELS if not panel["title"] or not panel["fieldConfig"]["defaults"]["unit"]] == []


def test_every_alert_leads_to_a_part_of_the_runbook_that_names_it():
    parts = re.split(r"^#+ (.+)$", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_anchor = {
        re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-"): text
        for head, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    for rule in alerts():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/operations.md"
        assert f"`{rule['alert']}`" in by_anchor[anchor], rule["alert"]


@needs_promtool
def test_promtool_finds_no_fault_with_rules_and_settings():
    for check, path in (("rules", "alerts.yaml"), ("config", "prometheus.yaml")):
        subprocess.run(["promtool", "check", check, DEPLOY / "prometheus" / path], check=True, capture_output=True)


SERVER = 'job="batchmaker", instance="a"'
MODEL = f'{SERVER}, model="m", version="1"'
GOOD_DAY = {
    f"up{{{SERVER}}}": "1",
    f"process_start_time_seconds{{{SERVER}}}": "1000",
    f"batchmaker_ready{{{SERVER}}}": "1",
    f"batchmaker_draining{{{SERVER}}}": "0",
    f"batchmaker_engine_up{{{MODEL}}}": "1",
    f"batchmaker_engine_restarts_total{{{MODEL}}}": "2",
    f'batchmaker_requests_total{{{MODEL}, outcome="success"}}': "0+1000",
    f'batchmaker_requests_total{{{MODEL}, outcome="backend"}}': "0+5",
    f'batchmaker_requests_total{{{MODEL}, outcome="rejected"}}': "0+40",
    f"batchmaker_requests_in_flight{{{MODEL}}}": "700",
    f'batchmaker_limit{{{SERVER}, limit="max_in_flight"}}': "1024",
    f"batchmaker_deadline_misses_total{{{MODEL}}}": "0+30",
    f'batchmaker_queue_duration_seconds_bucket{{{MODEL}, le="0.5"}}': "0+900",
    f'batchmaker_queue_duration_seconds_bucket{{{MODEL}, le="1.0"}}': "0+1000",
    f'batchmaker_queue_duration_seconds_bucket{{{MODEL}, le="2.5"}}': "0+1000",
    f'batchmaker_queue_duration_seconds_bucket{{{MODEL}, le="+Inf"}}': "0+1000",
    f"batchmaker_config_last_reload_successful{{{SERVER}}}": "1",
    f"batchmaker_dropped_log_lines_total{{{SERVER}}}": "7",
    f"batchmaker_refused_connections_total{{{SERVER}}}": "3",
    f"process_open_fds{{{SERVER}}}": "4000",
    f"process_max_fds{{{SERVER}}}": "8192",
    f'batchmaker_calls_total{{{SERVER}, protocol="http", code="401"}}': "0+5",
}
"""Much to do, few failures. By series: its value, or how it grows every 15 seconds."""

STEPS = 120


@dataclass(frozen=True, slots=True)
class Trouble:
    """What makes an alert fire. series: the name, or a part of it, of one series that is `values` and not as on a good
    day. silent, fires: minutes after which it does not fire yet, and does. summary: what is said then."""

    alert: str
    series: str
    values: str
    silent: str
    fires: str
    summary: str


TROUBLES = [
    Trouble("BatchmakerDown", f"up{{{SERVER}}}", "1x8 0x99", "2m30s", "4m", "a does not answer Prometheus"),
    Trouble(
        "BatchmakerRestartsAgainAndAgain", "process_start_time", "1x8 2x8 3x8 4x99", "1m", "8m",
        "a has started 3 times in 15 minutes",
    ),
    Trouble(
        "BatchmakerNotReady", "batchmaker_ready", "1x8 0x99", "2m30s", "4m",
        "a runs and is not ready, and nobody told it to stop",
    ),
    Trouble("BatchmakerEngineHangs", "engine_up", "1x8 0x99", "2m", "4m", "a: the engine of m hangs or has failed"),
    Trouble(
        "BatchmakerEngineBeginsAnew", "engine_restarts", "2x8 3x99", "1m", "4m",
        "a: the engine of m has failed and begun anew",
    ),
    Trouble("BatchmakerModelFails", '"backend"', "0+21x120", "1m", "10m", "a: 1.979% of m's requests fail inside it"),
    Trouble("BatchmakerRefuses", '"rejected"', "0+4000x120", "4m", "12m", "a: 79.92% of m's requests are refused"),
    Trouble(
        "BatchmakerNearlyFull", "in_flight{", "700x8 1000x99", "5m", "10m",
        "a: m has nearly as many requests in flight as it may",
    ),
    Trouble(
        "BatchmakerMissesDeadlines", "deadline_misses", "0+200x120", "4m", "12m",
        "a: 19.14% of m's requests miss their deadlines",
    ),
    Trouble(
        "BatchmakerWaitsLong", 'le="1.0"', "0+980x120", "8m", "20m",
        "a: 1 % of m's requests wait 1.75s before they begin",
    ),
    Trouble(
        "BatchmakerNotReloaded", "reload_successful", "1x8 0x99", "2m30s", "4m",
        "a runs with older settings or models than it was told to take over",
    ),
    Trouble(
        "BatchmakerDropsLogLines", "log_lines", "7x8 90x99", "1m", "4m",
        "a drops lines of its log: nobody reads them fast enough",
    ),
    Trouble("BatchmakerRefusesConnections", "refused_connections", "3x8 3+9x99", "4m", "12m", "a refuses connections"),
    Trouble(
        "BatchmakerFewFileDescriptorsLeft", "open_fds", "4000x8 8000x99", "5m", "10m",
        "a has 97.66% of its file descriptors open",
    ),
    Trouble(
        "BatchmakerWrongKeys", '"401"', "0+50x120", "4m", "10m", "a gets 3.333 calls a second without a good key"
    ),
]  # fmt: skip


def unit_test(name: str, changed: dict[str, str], checks: list[dict[str, Any]]) -> dict[str, Any]:
    """A test as promtool reads it. changed: values by a part of a series' name, which only one has."""
    series = {name: f"{values}x{STEPS}" for name, values in GOOD_DAY.items()}
    for part, values in changed.items():
        (found,) = [name for name in series if part in name]
        series[found] = values
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"name": name, "interval": "15s", "input_series": inputs, "alert_rule_test": checks}


def checks_of(trouble: Trouble) -> list[dict[str, Any]]:
    (rule,) = [rule for rule in alerts() if rule["alert"] == trouble.alert]
    labels = {"instance": "a", "job": "batchmaker", **rule["labels"]}
    if "{{ $labels.model }}" in rule["annotations"]["summary"]:
        labels["model"] = "m"
    if trouble.alert in ("BatchmakerEngineHangs", "BatchmakerEngineBeginsAnew", "BatchmakerNearlyFull"):
        labels["version"] = "1"
    said = {"summary": trouble.summary, "runbook": rule["annotations"]["runbook"]}
    return [
        {"alertname": trouble.alert, "eval_time": trouble.silent},
        {
            "alertname": trouble.alert,
            "eval_time": trouble.fires,
            "exp_alerts": [{"exp_labels": labels, "exp_annotations": said}],
        },
    ]


@needs_promtool
def test_every_alert_fires_for_its_trouble_and_none_on_a_good_day(tmp_path):
    names = [trouble.alert for trouble in TROUBLES]
    assert sorted(names) == sorted(rule["alert"] for rule in alerts())
    silent = [{"alertname": name, "eval_time": "25m"} for name in names]
    stopped = [{"alertname": "BatchmakerNotReady", "eval_time": "10m"}]
    tests = [
        unit_test("a good day", {}, silent),
        unit_test("told to stop", {"batchmaker_ready": "1x8 0x99", "draining": "0x8 1x99"}, stopped),
        *(unit_test(one.alert, {one.series: one.values}, checks_of(one)) for one in TROUBLES),
    ]
    rules = str(DEPLOY / "prometheus" / "alerts.yaml")
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [rules], "evaluation_interval": "15s", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """Prometheus as a process, with the settings of deploy/, asking one server four times a second."""

    def __init__(self, folder: Path, target: str) -> None:
        (settings,) = documents("prometheus/prometheus.yaml")
        settings["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
        settings["rule_files"] = [str(DEPLOY / "prometheus" / path) for path in settings["rule_files"]]
        (job,) = settings["scrape_configs"]
        job["static_configs"][0]["targets"] = [target]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        self.log = folder / "log"
        command = [
            "prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.wait_for(lambda: self._address() is not None)

    def _address(self) -> str | None:
        found = re.search(r'msg="Listening on" address=(\S+)', self.log.read_text())
        return None if found is None else found[1]

    def ask(self, path: str, **parameters: str) -> Any:
        """What its API answers."""
        address = f"http://{self._address()}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> list[float]:
        """What a query has now, without what is no number."""
        found = [float(one["value"][1]) for one in self.ask("query", query=query)["result"]]
        return [value for value in found if value == value]

    def wait_for(self, holds) -> None:
        def log() -> str:
            return self.log.read_text()[-2000:]

        wait_until(lambda: self.process.poll() is not None or holds(), LIMIT_S, told=log)
        assert self.process.poll() is None, log()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def server(serve, saved_models) -> RunningServer:
    return serve(saved_models)


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), server.address)
    yield started
    started.close()


def ask_something(server: RunningServer) -> None:
    assert server.post("/v2/models/counter/generate", {"input_0": 5, "parameters": {"deadline_ms": 60_000}}).json
    assert server.post("/v2/models/sums/generate", {"no_input": 5}).status == 400


@pytest.mark.slow
@needs_prometheus
def test_every_query_of_the_dashboard_has_an_answer_while_requests_come(server, prometheus):
    asked = queries()
    assert len(asked) > 40
    unanswered = set(asked) - {query for query in asked if query.startswith("changes(")}

    def all_answered() -> bool:
        ask_something(server)
        unanswered.difference_update({query for query in unanswered if prometheus.values(query)})
        return not unanswered

    try:
        prometheus.wait_for(all_answered)
    finally:
        assert sorted(unanswered) == []
    assert prometheus.values('sum(batchmaker_requests_total{model="counter", outcome="success"})')[0] > 0
    for query in asked:  # annotations, which are empty while settings stay
        prometheus.values(query)


@pytest.mark.slow
@needs_prometheus
def test_the_variables_of_the_dashboard_find_servers_and_models(server, prometheus):
    found = {}
    for name, query in VARIABLES.items():
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        series, label = re.sub(r"\$\w+", ".+", match[1]), match[2]
        prometheus.wait_for(lambda series=series: prometheus.values(series))
        found[name] = prometheus.ask(f"label/{label}/values", **{"match[]": series})
    assert found == {"job": ["batchmaker"], "instance": [server.address], "model": ["counter", "sums"]}


@pytest.mark.slow
@needs_prometheus
def test_no_alert_fires_for_a_server_that_is_well_and_all_can_be_evaluated(prometheus):
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    prometheus.wait_for(lambda: prometheus.values("batchmaker_ready"))
    prometheus.wait_for(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert {(rule["name"], rule["health"], rule["state"]) for rule in rules()} == {
        (rule["alert"], "ok", "inactive") for rule in alerts()
    }


@pytest.mark.slow
@needs_prometheus
def test_prometheus_knows_the_units_and_the_help_of_what_it_has_read(server, prometheus):
    prometheus.wait_for(lambda: prometheus.values("batchmaker_ready"))
    known = prometheus.ask("metadata")
    assert known["batchmaker_request_duration_seconds"][0]["unit"] == "seconds"
    assert known["batchmaker_request_duration_seconds"][0]["type"] == "histogram"
    assert [name for name, (about, *_) in known.items() if not about["help"]] == []


@pytest.mark.slow
@needs_promtool
def test_promtool_has_nothing_to_say_of_our_own_metrics(server):
    ask_something(server)
    text = server.get("/metrics").content
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    said = (done.stdout + done.stderr).decode().splitlines()
    assert [line for line in said if not line.startswith("nv_inference_")] == []
