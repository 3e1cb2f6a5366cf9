"""`bench` writes one object per policy with every number that is promised."""

from __future__ import annotations

import math

import pytest

from batchmaker.cli.bench import load, report
from batchmaker.errors import OptionError

KEYS = {
    "model", "policy", "dtype", "hidden", "threads", "offered_rps", "served_rps", "requests", "p50_ms", "p90_ms",
    "p99_ms", "queue_p99_ms", "useful_cells_per_s", "reference_cells_per_s", "padding_share", "mean_batch",
    "scheduler_share", "scheduler_us_per_node", "task_ms", "load", "seconds", "machine", "commit", "torch",
    "generator_late_ms", "sweep",
}  # fmt: skip


TINY = ("--hidden", 8, "--max-batch", 8, "--no-sweep")  # an engine warms up every size of a batch


def test_requests_at_once_are_all_answered(command, tmp_path, read_json):
    path = tmp_path / "out.json"
    done = command("bench", "lstm", *TINY, "--requests", 40, "--lengths", "fixed:5", "--json", path)
    assert done.exit_code == 0, done.output
    default, padded = read_json(path)
    assert set(default) >= KEYS
    usual = "padded:bucket_width=10,max_batch=64,full_first=yes"
    assert (default["policy"], padded["policy"]) == ("auto", usual)
    assert default["sweep"] is padded["sweep"] is None
    assert default["requests"] == padded["requests"] == 40
    assert default["useful_cells_per_s"] == pytest.approx(default["served_rps"] * 5)
    assert padded["padding_share"] == 0.0
    assert "throughput_over_baseline" in default
    assert default["p50_ms"] <= default["p90_ms"] <= default["p99_ms"]


@pytest.fixture
def whole_windows(monkeypatch):
    """A backlog is warm when its window begins, which ends after many steps, however long a busy machine takes."""
    monkeypatch.setattr(load, "LEAST_STEPS", 100)
    monkeypatch.setattr(load, "LONGEST_WARM_UP", math.inf)
    monkeypatch.setattr(load, "LONGEST_WINDOW", math.inf)


def test_a_saturated_window_counts_padding(command, tmp_path, read_json, whole_windows):
    path = tmp_path / "out.json"
    batches = ("--max-batch", 8, "--padded-batch", 4, "--no-sweep")
    done = command("bench", "gru", "--hidden", 8, "--seconds", 0.2, *batches, "--json", path)
    assert done.exit_code == 0, done.output
    cellular, padded = read_json(path)
    assert cellular["offered_rps"] is None
    assert 4 < cellular["mean_batch"] <= 8
    assert 0 < padded["padding_share"] < 0.5
    assert padded["mean_batch"] == 4


def test_the_best_of_the_swept_settings_is_shown(command, tmp_path, read_json):
    path = tmp_path / "out.json"
    sizes = ("--requests", 30, "--lengths", "fixed:5", "--policy", "padded:bucket_width=5", "--hidden", 8)
    done = command("bench", "lstm", *sizes, "--max-batch", 8, "--json", path)
    assert done.exit_code == 0, done.output
    (padded,) = read_json(path)
    widths = {text.partition(",")[0] for text in padded["sweep"]}
    assert widths == {"padded:bucket_width=5"}
    assert len(padded["sweep"]) == 3
    assert padded["policy"] == max(padded["sweep"], key=padded["sweep"].__getitem__)


def test_equal_work_gives_whole_requests_the_cells_of_the_engine(command, tmp_path, read_json):
    path = tmp_path / "out.json"
    done = command("bench", "lstm", *TINY, "--equal-work", "--requests", 20, "--lengths", "clip:9", "--json", path)
    assert done.exit_code == 0, done.output
    cellular, padded, closed = read_json(path)
    assert closed["policy"] == padded["policy"].replace("padded", "closed")
    assert padded["padding_share"] > 0 == closed["padding_share"]
    assert cellular["baseline"] == closed["policy"]
    assert cellular["cells_bring"]["over"] == padded["policy"]
    together = cellular["cells_bring"]["throughput"] * cellular["throughput_over_baseline"]
    assert together == pytest.approx(cellular["useful_cells_per_s"] / padded["useful_cells_per_s"])


@pytest.mark.slow
def test_trees_are_batched_whole_with_equal_work(command, tmp_path, read_json):
    path = tmp_path / "out.json"
    done = command("bench", "treelstm", *TINY, "--equal-work", "--requests", 6, "--json", path)
    assert done.exit_code == 0, done.output
    assert [line["policy"].partition(":")[0] for line in read_json(path)] == ["auto", "closed"]


@pytest.mark.slow
def test_missed_deadlines_are_counted(command, tmp_path, read_json):
    path = tmp_path / "out.json"
    lstm = ("bench", "lstm", *TINY, "--requests", 20, "--lengths", "fixed:5", "--json", path)
    for deadline_ms, missed in ((0.001, 1.0), (60_000, 0.0)):
        done = command(*lstm, "--deadline-ms", deadline_ms)
        assert done.exit_code == 0, done.output
        for line in read_json(path):
            assert (line["deadline_ms"], line["violation_share"]) == (deadline_ms, missed)
            assert (line["requests"], line["failed"]) == (20, 0)
            assert line["goodput_rps"] == pytest.approx((1 - missed) * line["served_rps"])
    assert command(*lstm).exit_code == 0
    assert {line["violation_share"] for line in read_json(path)} == {None}


@pytest.mark.slow
def test_load_offers_every_policy_the_same(command, tmp_path, read_json, whole_windows):
    path = tmp_path / "out.json"
    done = command("bench", "lstm", *TINY, "--load", 0.2, "--seconds", 0.1, "--lengths", "clip:9", "--json", path)
    assert done.exit_code == 0, done.output
    cellular, padded = read_json(path)
    assert cellular["offered_rps"] == padded["offered_rps"] > 0
    assert cellular["load"] == 0.2
    for line in (cellular, padded):
        assert line["requests"] >= 0 == line["failed"]  # how many are answered in time is the machine's


@pytest.mark.slow
def test_pairs_and_trees_from_files(command, tmp_path, text_file, tree_file, read_json):
    path = tmp_path / "out.json"
    pairs = ("--data", text_file, "--data", text_file)
    done = command("bench", "seq2seq", *pairs, *TINY, "--requests", 4, "--json", path)
    assert done.exit_code == 0, done.output
    assert read_json(path)[0]["data"] == "text.txt -> text.txt"
    tree_file.write_text("(3 (2 a) (1 b))\n(1 word)\n")
    done = command("bench", "treelstm", "--data", tree_file, *TINY, "--requests", 6, "--json", path)
    assert done.exit_code == 0, done.output
    assert [line["policy"] for line in read_json(path)] == ["auto", "serial"]


@pytest.mark.slow
@pytest.mark.parametrize("from_file", [True, False])
def test_dependencies_are_generated_or_from_a_file(command, tmp_path, read_json, from_file):
    path, data = tmp_path / "out.json", tmp_path / "a.conllu"
    data.write_text("".join(f"{k}\tw\t_\t_\t_\t_\t{head}\t_\t_\t_\n" for k, head in ((1, 2), (2, 0), (3, 2))))
    given = ("--data", data) if from_file else ()
    done = command("bench", "treelstm-childsum", *given, *TINY, "--requests", 6, "--json", path)
    assert done.exit_code == 0, done.output
    assert [line["policy"].partition(":")[0] for line in read_json(path)] == ["auto", "padded"]
    assert read_json(path)[0]["failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lstm", "--rate", "1", "--load", "1"), "one of --rate, --load and --requests"),
        (("lstm", "--rate", "-1"), "above 0"),
        (("lstm", "--lengths", "long"), "fixed:24 or clip:50"),
        (("treelstm", "--layers", "2"), "no option --layers"),
        (("treelstm", "--policy", "padded"), "cannot be padded"),
        (("lstm", "--equal-work", "--workers", "2"), "use --workers 1"),
        (("treelstm", "--policy", "padded:bucket_width=5"), "cannot be padded"),
        (("lstm", "--policy", "celular"), "Did you mean 'cellular'"),
    ],
)
def test_wrong_options_are_refused(command, arguments, message):
    error = command("bench", *arguments).exception
    assert isinstance(error, OptionError)
    assert message in str(error)


@pytest.mark.slow
def test_policies_are_told_apart_by_kind_however_they_are_written(command, tmp_path, read_json):
    path = tmp_path / "out.json"
    given = ("cellular:max_steps=1", "sufficient", "padded:bucket_width=5", "padded:max_batch=3", "cellular")
    names = [part for policy in given for part in ("--policy", policy)]
    sizes = (
        "--hidden",
        8,
        "--requests",
        12,
        "--lengths",
        "fixed:5",
        "--max-batch",
        32,
        "--padded-batch",
        4,
        "--no-sweep",
    )
    done = command("bench", "lstm", *sizes, "--threads", 1, *names, "--json", path)
    assert done.exit_code == 0, done.output
    lines = read_json(path)
    assert [line["max_batch"] for line in lines] == [32, 32, 4, 3, 32]
    fastest = max(lines[2:4], key=lambda line: line["useful_cells_per_s"])
    assert {line["baseline"] for line in lines} == {fastest["policy"]}
    assert all(1 <= line["mean_batch"] <= line["max_batch"] for line in lines)  # the first may be begun alone
    assert "1 thread:" in done.output


def test_cells_alone_have_no_baseline():
    lines = [{"policy": "sufficient"}, {"policy": "cellular:max_steps=1"}]
    report.add_ratios(lines)
    assert not any("baseline" in line for line in lines)
