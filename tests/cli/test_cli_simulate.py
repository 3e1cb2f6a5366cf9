"""`batchmaker simulate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.profile import CostProfile, ProfileOptions
from batchmaker.errors import DataError, OptionError

Command = Callable[..., Result]
FEW = ("--requests", 60, "--max-batch", 4)
SMALL = ("--hidden", 8, *FEW)
FIELDS = {
    "model", "policy", "rate", "sla_ms", "seed", "requests", "mean_ms", "p50_ms", "p90_ms", "p99_ms",
    "throughput_rps", "goodput_rps", "violation_share", "mean_batch",
}  # fmt: skip


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Costs of seq2seq's cells: a millisecond a step."""
    cells = tuple(CellLatency(name, (1, 4), (1e-3, 1e-3), (1e-3, 1e-3)) for name in ("encoder", "decoder"))
    path = tmp_path / "profile.json"
    CostProfile("seq2seq", ProfileOptions("float32", 1, "a machine", "none"), LatencyTable(cells)).write(path)
    return path


def test_every_policy_rate_sla_and_seed_has_its_result(command: Command, tmp_path: Path, read_json: Any) -> None:
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    done = command(
        "simulate", "lstm", *SMALL, "--npu", "--policy", "cellular", "--policy", "graph:window_ms=2,max_batch=4",
        "--policy", "serial", "--rate", 1000, "--rate", 50, "--sla-ms", 1, "--sla-ms", 20, "--seeds", 2,
        "--json", out, "--png", png,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    results = read_json(out)
    assert len(results) == 3 * 2 * 2 * 2
    assert all(result.keys() >= FIELDS for result in results)
    assert [r["seed"] for r in results[:4]] == [0, 1, 0, 1]
    assert [r["sla_ms"] for r in results[:4]] == [1.0, 1.0, 20.0, 20.0]
    assert {r["requests"] for r in results} == {60}
    assert "Difference to cellular" in done.stdout
    assert png.stat().st_size > 10_000


def repeated(command: Command, folder: Path, jobs: tuple[int, ...]) -> list[bytes]:
    """What the same command writes, with these numbers of processes."""
    written = []
    for number, processes in enumerate(jobs):
        out = folder / f"{number}.json"
        done = command(
            "simulate", "seq2seq", *SMALL, "--npu", "--policy", "cellular", "--rate", 300, "--seeds", 2,
            "--arrivals", "mmpp", "--jobs", processes, "--json", out,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        written.append(out.read_bytes())
    return written


def test_the_same_command_gives_the_same_bytes(command: Command, tmp_path: Path) -> None:
    one, other = repeated(command, tmp_path, (1, 1))
    assert one == other


@pytest.mark.slow
def test_several_processes_give_the_same_bytes_as_one(command: Command, tmp_path: Path) -> None:
    one, several = repeated(command, tmp_path, (1, 2))
    assert one == several


def test_a_latency_table_says_what_steps_cost(command: Command, table: Path, tmp_path: Path, read_json: Any) -> None:
    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "out.json"
    pairs.write_text('{"source": 3, "words": 2}\n\n{"source": 3, "words": 2}\n', encoding="utf-8")
    done = command(
        "simulate", "seq2seq", *SMALL, "--latency-table", table, "--workload", pairs, "--policy", "serial",
        "--rate", 1, "--json", out,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (result,) = read_json(out)
    assert result["p50_ms"] == pytest.approx(5.0)  # three words read, two written
    assert (result["workload"], result["costs"]) == ("pairs.jsonl", "profile.json")


@pytest.mark.parametrize(
    ("model", "content"),
    [
        ("lstm", "the cat sat\n\non the mat\n"),
        ("lstm", "[1, 2, 3]\n[4]\n"),
        ("seq2seq", '{"source": [3, 4], "words": 3}\n{"source": 2}\n'),
        ("treelstm", "(3 (2 a) (1 b))\n(3 (2 (1 a) (2 c)) (1 b))\n"),
        ("treelstm", '{"words": [1, 2], "children": [[0, 1]]}\n'),
    ],
)
def test_a_workload_comes_from_a_file(model: str, content: str, command: Command, tmp_path: Path) -> None:
    path = tmp_path / "workload.txt"
    path.write_text(content, encoding="utf-8")
    done = command("simulate", model, *SMALL, "--npu", "--policy", "cellular", "--rate", 100, "--workload", path)
    assert done.exit_code == 0, done.output


def test_a_workload_comes_from_two_aligned_files(command: Command, tmp_path: Path) -> None:
    for name, text in (("a.de", "ein haus\nja\n"), ("a.en", "a house\nyes\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = command(
        "simulate", "seq2seq", *SMALL, "--npu", "--policy", "cellular", "--rate", 100,
        "--workload", tmp_path / "a.de", "--workload", tmp_path / "a.en",
    )  # fmt: skip
    assert done.exit_code == 0, done.output


def test_arrivals_come_from_a_trace_at_its_own_rate(command: Command, tmp_path: Path, read_json: Any) -> None:
    trace, out = tmp_path / "trace.txt", tmp_path / "out.json"
    trace.write_text("\n".join(map(str, np.arange(0, 10, 0.1))), encoding="utf-8")
    done = command(
        "simulate", "lstm", *SMALL, "--npu", "--policy", "cellular", "--arrivals", "trace", trace, "--json", out
    )
    assert done.exit_code == 0, done.output
    assert read_json(out)[0]["rate"] == pytest.approx(10.0)


def test_an_sla_below_the_possible_is_said_and_simulated(command: Command, tmp_path: Path, read_json: Any) -> None:
    out = tmp_path / "out.json"
    done = command(
        "simulate", "lstm", *SMALL, "--npu", "--policy", "serial", "--rate", 10, "--sla-ms", 1e-6, "--json", out
    )
    assert done.exit_code == 0, done.output
    assert "no request can be answered within 1e-06 ms" in " ".join(done.output.split())
    assert read_json(out)[0]["violation_share"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--npu, for LazyBatching's accelerator, or --latency-table"),
        (("--npu", "--rate", 0), "--rate must be a finite number above 0"),
        (("--npu", "--rate", -5), "--rate must be"),
        (("--npu", "--sla-ms", 0), "--sla-ms must be"),
        (("--npu", "--rate", 5, "--rate", 5), "given twice"),
        (("--npu", "--policy", "celular"), "Did you mean 'cellular'"),
        (("--npu", "--policy", "graph:window=3"), "window"),
        (("--npu", "--arrivals", "uniform"), "known: mmpp, poisson, trace"),
        (("--npu", "--arrivals", "trace"), "--arrivals trace FILE"),
        (("--npu", "--dataflow", "wss"), "dataflow"),
        (("--npu", "--seed", 1, "--seeds", 2), "not both"),
    ],
)
def test_bad_options_are_refused(arguments: tuple[Any, ...], message: str, command: Command) -> None:
    rate = () if "--rate" in arguments else ("--rate", 100)
    done = command("simulate", "lstm", *SMALL, *rate, *arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, OptionError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "nothing in this file"),
        ('{"source": 0, "words": 2}\n', "line 1.*at least 1"),
        ('{"source": 1, "words": 2}\n{"source": 1, "wrods": 2}\n', "line 2"),
        ("[1, 2\n", "line 1: no JSON"),
        ('{"source": "abc", "words": 1}\n', "line 1"),
    ],
)
def test_a_bad_workload_is_refused_by_its_line(content: str, message: str, command: Command, tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    path.write_text(content, encoding="utf-8")
    done = command("simulate", "seq2seq", *SMALL, "--npu", "--rate", 100, "--workload", path)
    assert isinstance(done.exception, DataError), done.output
    with pytest.raises(DataError, match=message):
        raise done.exception


def test_a_table_of_another_model_is_refused(command: Command, table: Path) -> None:
    done = command("simulate", "lstm", *SMALL, "--latency-table", table, "--rate", 100)
    assert isinstance(done.exception, DataError)
    assert "no cell 'step' of model 'lstm'; it has decoder, encoder" in str(done.exception)
    table.write_text(json.dumps({"version": 1}), encoding="utf-8")
    done = command("simulate", "lstm", *SMALL, "--latency-table", table, "--rate", 100)
    assert isinstance(done.exception, DataError)


def test_a_rate_is_asked_for(command: Command) -> None:
    done = command("simulate", "lstm", *SMALL, "--npu")
    assert isinstance(done.exception, OptionError)
    assert "Give --rate" in str(done.exception)


def test_a_policy_that_predicts_learns_lengths_from_the_workload(
    command: Command, tmp_path: Path, read_json: Any
) -> None:
    path, out = tmp_path / "pairs.jsonl", tmp_path / "out.json"
    path.write_text('{"source": 3, "words": 2}\n{"source": [3, 4], "words": 5}\n', encoding="utf-8")
    for files in ((), ("--workload", path)):
        done = command(
            "simulate", "seq2seq", *SMALL, "--npu", "--policy", "lazy", "--rate", 2000, "--sla-ms", 1, "--sla-ms", 9,
            *files, "--json", out,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert [result["answered"] for result in read_json(out)] == [60, 60]


def test_requests_of_a_model_that_decides_are_computed_once(command: Command, tmp_path: Path, read_json: Any) -> None:
    out, path = tmp_path / "out.json", tmp_path / "in.jsonl"
    path.write_text("".join(f"{[float(place % 7 + k) for place in range(256)]}\n" for k in range(3)), encoding="utf-8")
    for files in ((), ("--workload", path)):
        done = command(
            "simulate", "early-exit", *FEW, "--npu", "--policy", "cellular", "--policy", "serial", "--policy", "auto",
            "--rate", 3000, *files, "--json", out,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert [result["answered"] for result in read_json(out)] == [60, 60, 60]


def test_a_model_that_decides_takes_whole_requests(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"source": 3}\n', encoding="utf-8")
    done = command("simulate", "early-exit", *FEW, "--npu", "--rate", 100, "--workload", path)
    assert isinstance(done.exception, DataError), done.output
    assert "line 1: EarlyExitModel.unfold decides by values, so it takes whole requests" in str(done.exception)


def test_noise_takes_its_own_number_of_steps(command: Command, tmp_path: Path, read_json: Any) -> None:
    out = tmp_path / "out.json"
    done = command("simulate", "diffusion", *FEW, "--npu", "--policy", "cellular", "--rate", 300, "--json", out)
    assert done.exit_code == 0, done.output
    (result,) = read_json(out)
    assert (result["answered"], result["workload"]) == (60, "generated noise (10 to 50 steps)")
