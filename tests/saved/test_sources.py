"""Where models come from, and that names from clients never reach the file system."""

from __future__ import annotations

import pytest
from served_models import Counter, Sums

import batchmaker as bm
from batchmaker.errors import OptionError
from batchmaker.saved.sources import BuiltIn, RepositoryRoot, SavedDirectory, parse_source


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with `counter` (no versions) and `sums` (versions 2 and 10), and things that are no models."""
    folder = tmp_path_factory.mktemp("models")
    bm.save(Counter(), folder / "counter")
    for version, width in ((2, 2), (10, 3)):
        (folder / "sums").mkdir(exist_ok=True)
        bm.save(Sums(width), folder / "sums" / str(version))
    (folder / "sums" / "draft").mkdir()
    (folder / "empty").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "notes.txt").write_text("no model")
    return folder


def test_built_in_models_take_options_behind_a_colon():
    source = parse_source("lstm:hidden=16,layers=2,dtype=bfloat16")
    assert source == BuiltIn("lstm", "lstm", {"hidden": 16, "layers": 2, "dtype": "bfloat16"})
    model = source.scan()["lstm"]["1"].make()
    assert (model.hidden, model.layers) == (16, 2)


def test_any_model_can_have_another_name(root):
    assert parse_source("translator=seq2seq:hidden=8").scan().keys() == {"translator"}
    assert parse_source(f"mine={root / 'counter'}").scan().keys() == {"mine"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lstn", "unknown model .* 'lstn'.*Did you mean 'lstm'"),
        ("lstm:hiden=3", "unknown option of model 'lstm' 'hiden'.*Did you mean 'hidden'"),
        ("lstm:hidden", "expected OPTION=VALUE"),
        ("a b=lstm", "model name 'a b'"),
        ("stats=lstm", "model name 'stats'"),
    ],
)
def test_what_is_not_there_is_refused_with_the_nearest(text, said):
    with pytest.raises(OptionError, match=said):
        parse_source(text)


def test_a_saved_directory_is_one_model(root):
    source = parse_source(str(root / "counter"))
    assert isinstance(source, SavedDirectory)
    assert isinstance(source.scan()["counter"]["1"].make(), Counter)


def test_a_folder_of_versions_is_one_model(root):
    assert {name: sorted(versions) for name, versions in parse_source(str(root / "sums")).scan().items()} == {
        "sums": ["10", "2"]
    }


def test_a_folder_of_models_has_them_all(root):
    source = parse_source(str(root))
    assert isinstance(source, RepositoryRoot)
    found = source.scan()
    assert found.keys() == {"counter", "sums"}
    assert found["sums"]["10"].make().width == 3


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(OptionError, match="holds no saved model"):
        parse_source(str(tmp_path))


def test_a_saved_model_takes_no_options(root):
    with pytest.raises(OptionError, match="a saved model has its options in it"):
        parse_source(str(root / "counter"), {"hidden": 3})
