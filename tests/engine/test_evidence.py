"""benchmarks/evidence.py: every figure is listed, no result of other code passes as current, the page is up to date."""

from __future__ import annotations

import json
import re
import sys

import pytest

from benchmark_scripts import ROOT, imported


@pytest.fixture(scope="module")
def scripts():
    with imported("evidence", "provenance", "runs") as found:
        yield found


# --- what a result is of ---------------------------------------------------------------------------------------------

CODE = '"""What it does."""\n\n\ndef f(x):\n    """Return x."""\n    return x  # as it is\n'


def test_comments_docstrings_and_blank_lines_do_not_change_a_digest(scripts, tmp_path):
    digest = scripts["provenance"].digest
    (tmp_path / "a.py").write_text(CODE)
    before = digest(["a.py"], tmp_path)
    (tmp_path / "a.py").write_text(CODE.replace("as it is", "unchanged").replace("What it does", "Other words"))
    assert digest(["a.py"], tmp_path) == before
    (tmp_path / "a.py").write_text(CODE.replace("return x", "return 2 * x"))
    assert digest(["a.py"], tmp_path) != before


def test_a_text_that_is_no_docstring_is_code(scripts):
    code_of = scripts["provenance"].code_of
    assert code_of('x = "# no comment"\n') == 'x = "# no comment"'
    assert code_of("def f():\n    return 'text'\n") != code_of("def f():\n    return 'other'\n")


def test_a_command_is_kept_without_the_places_of_its_results(scripts, monkeypatch):
    script = str(ROOT / "benchmarks" / "default_policy_live.py")
    monkeypatch.setattr(
        sys, "argv", [script, "--quick", "--json", "/home/me/a.json", "--png=b.png", "--network", "lstm"]
    )
    command = scripts["provenance"].made_by(["README.md"])["command"]
    assert command == "python benchmarks/default_policy_live.py --quick --network lstm"


def test_results_of_the_command_itself_are_told_what_they_measure(scripts, tmp_path):
    provenance = scripts["provenance"]
    one, several = tmp_path / "one.json", tmp_path / "several.json"
    one.write_text('{"commit": "a"}')
    several.write_text('[{"commit": "a"}, {"commit": "b"}]')
    assert provenance.is_current(json.loads(several.read_text())) is None
    for path in (one, several):
        provenance.declare(path, ["README.md"])
        assert provenance.is_current(json.loads(path.read_text())) is True
    assert json.loads(several.read_text())[1]["commit"] == "b"


def test_a_folder_is_all_of_its_code_and_no_other_file_counts(scripts, tmp_path):
    digest = scripts["provenance"].digest
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("x = 1\n")
    before = digest(["room"], tmp_path)
    (tmp_path / "other.py").write_text("y = 1\n")
    assert digest(["room"], tmp_path) == before
    (tmp_path / "room" / "b.py").write_text("z = 1\n")
    assert digest(["room"], tmp_path) != before


def test_a_declared_path_that_is_gone_is_an_error_and_its_result_is_not_current(scripts, tmp_path):
    with pytest.raises(FileNotFoundError, match="correct the benchmark's MEASURES"):
        scripts["provenance"].digest(["gone.py"], tmp_path)
    assert scripts["provenance"].is_current({"measures": {"paths": ["gone.py"], "digest": "0"}}) is False
    assert scripts["provenance"].is_current({"commit": "abc"}) is None


@pytest.fixture
def one_result(scripts, tmp_path, monkeypatch):
    """A folder of results with one run; a function writes its result."""
    evidence, runs = scripts["evidence"], scripts["runs"]
    for module in (evidence, scripts["provenance"]):
        monkeypatch.setattr(module, "RESULTS", (tmp_path,))
    monkeypatch.setattr(evidence, "RUNS", {"one": runs.Run("one", "python one.py", ("one.json",), 1)})
    monkeypatch.setattr(evidence, "OLDER", frozenset())
    return lambda content: (tmp_path / "one.json").write_text(json.dumps(content))


def test_a_result_of_other_code_is_refused_unless_it_is_listed_as_older(scripts, one_result, monkeypatch):
    evidence = scripts["evidence"]
    one_result({"measures": {"paths": ["benchmarks/evidence.py"], "digest": "of other code"}})
    (said,) = evidence.problems()
    assert "run it again (`python one.py`)" in said
    monkeypatch.setattr(evidence, "OLDER", frozenset({"one.json"}))
    assert evidence.problems() == []
    assert evidence.state_of(evidence.RUNS["one"]) == "**from an older commit**"


def test_a_result_of_this_code_is_not_listed_as_older(scripts, one_result, monkeypatch):
    evidence = scripts["evidence"]
    one_result(scripts["provenance"].made_by(["benchmarks/evidence.py"]))
    assert evidence.problems() == []
    assert evidence.state_of(evidence.RUNS["one"]) == "this code"
    monkeypatch.setattr(evidence, "OLDER", frozenset({"one.json"}))
    assert "take it out of OLDER" in evidence.problems()[0]


def test_a_simulation_that_comes_out_the_same_is_of_this_code(scripts, one_result, monkeypatch):
    evidence, runs = scripts["evidence"], scripts["runs"]
    run = runs.Run("one-run", "python one_run.py", ("one.json",), 1, probe="probe")
    monkeypatch.setattr(evidence, "RUNS", {"one": run})
    monkeypatch.setattr(
        evidence, "_probe_now", lambda script, function: {("one_run", "probe"): "played"}[script, function]
    )
    for seen, state in (("played", "this code"), ("otherwise", "**from an older commit**")):
        one_result({"measures": {"paths": ["benchmarks/evidence.py"], "digest": "of other code", "probe": seen}})
        assert evidence.state_of(evidence.RUNS["one"]) == state


def test_a_simulation_is_played_again_once_for_each_state_of_the_code(scripts, one_result, monkeypatch):
    evidence, runs, played = scripts["evidence"], scripts["runs"], []
    monkeypatch.setattr(
        evidence, "RUNS", {"one": runs.Run("one-run", "python one_run.py", ("one.json",), 1, probe="probe")}
    )
    monkeypatch.setattr(evidence, "_probe_now", lambda *_: played.append(1) or "played")
    about = {"paths": ["benchmarks/evidence.py"], "digest": "of other code", "probe": "played"}
    one_result({"measures": {**about, "played_again": "older"}})
    evidence.note_probes()
    assert played
    played.clear()
    assert evidence.problems() == []
    assert evidence.read("one.json")["measures"]["played_again"] == scripts["provenance"].digest(about["paths"])
    assert not played


def test_a_result_names_the_command_that_makes_it_now(scripts):
    command_now = scripts["provenance"].command_now
    moved = command_now({"command": "python benchmarks/curves.py --jobs 2"})
    assert moved == "python papers/benchmarks/curves.py --jobs 2"
    for same in ("python benchmarks/fleet.py", "python papers/benchmarks/npu.py", "python benchmarks/gone.py"):
        assert command_now({"command": same}) == same


def test_every_result_has_one_place_beside_the_script_that_makes_it(scripts):
    for run in scripts["runs"].RUNS.values():
        script = re.search(r"(?:papers/)?benchmarks/", run.command)[0]
        for name in run.results:
            assert scripts["provenance"].result_path(name).parent == ROOT / script / "results"


def test_a_result_that_nobody_makes_is_named(scripts, one_result, tmp_path):
    (tmp_path / "stray.json").write_text("{}")
    one_result(scripts["provenance"].made_by(["benchmarks/evidence.py"]))
    (said,) = scripts["evidence"].problems()
    assert said.startswith("stray.json: no run")


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "numbers"),
    [
        ("Figures 1, 2, 12", {("Figure", 1), ("Figure", 2), ("Figure", 12)}),
        ("Figures 3 to 5, 7", {("Figure", 3), ("Figure", 4), ("Figure", 5), ("Figure", 7)}),
        ("Figure 7 (a)", {("Figure", 7)}),
        ("Table II", {("Table", 2)}),
        ("Table 1, Figures 11, 12", {("Table", 1), ("Figure", 11), ("Figure", 12)}),
        ("6.3, in the text", set()),
    ],
)
def test_an_item_stands_for_these_figures(scripts, item, numbers):
    assert scripts["evidence"].numbers_of(item) == numbers


def test_every_figure_and_table_of_every_paper_is_listed(scripts):
    evidence = scripts["evidence"]
    names = [paper.__name__.rpartition(".")[2] for paper in evidence.PAPERS]
    assert sorted(names) == sorted(evidence.WANTED)
    for name, paper in zip(names, evidence.PAPERS, strict=True):
        assert evidence.missing(name, paper.FIGURES) == set()


def test_a_figure_has_a_run_that_exists_or_a_place_where_it_is_explained(scripts):
    evidence = scripts["evidence"]
    for paper in evidence.PAPERS:
        for figure in paper.FIGURES:
            assert figure.run in evidence.RUNS or (not figure.run and figure.where), figure.item
            made = evidence.state_now(figure) != "not reproduced"
            assert not (figure.picture and made) or (ROOT / "papers" / "docs" / "images" / figure.picture).exists(), (
                figure.picture
            )
            if figure.state in ("in part", "other outcome", "not reproduced"):
                assert figure.why, f"{paper.__name__}, {figure.item}: nothing is said of why"


def test_no_page_shows_a_result_of_other_code_as_current(scripts):
    assert scripts["evidence"].problems() == []


def test_the_page_is_what_the_results_say(scripts):
    assert scripts["evidence"].is_fresh(scripts["evidence"].PAGE), "run python benchmarks/evidence.py"


def test_every_command_behind_a_figure_of_the_papers_that_needs_no_gpu_has_a_quick_run(scripts):
    evidence = scripts["evidence"]
    used = {figure.run for paper in evidence.PAPERS for figure in paper.FIGURES if figure.run} - {"gpu"}
    files = {name: re.search(r"(?:papers/)?benchmarks/\w+\.(?:py|sh)", evidence.RUNS[name].command) for name in used}
    taken = re.compile(r'add_argument\("--quick"|= --quick \]')  # in Python; in a shell script
    assert not [name for name, file in files.items() if file is None or not taken.search((ROOT / file[0]).read_text())]
