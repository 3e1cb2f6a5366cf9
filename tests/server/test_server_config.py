"""Settings: what is misspelt is refused with the nearest name, and nothing is ignored."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from batchmaker.errors import OptionError
from batchmaker.saved.sources import BuiltIn
from batchmaker.server.config import Config, read_config
from batchmaker.server.limits import Limits

WHOLE = """
host = "0.0.0.0"
port = 9000
versions = "all"

[limits]
max_in_flight = 64

[auth]
keys = "keys.txt"
rate = 100.0

[log]
level = "warning"
access = true

[[models]]
source = "seq2seq"
name = "translator"
options = { hidden = 32 }
threads = 1

[[models]]
source = "lstm:hidden=16"
"""


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "server.toml"
        path.write_text(text)
        return path

    return write


def test_a_model_s_priorities_are_aged_unless_the_file_says_strict(config_file):
    text = '[[models]]\nsource = "lstm"\n[[models]]\nsource = "gru"\npriorities = "strict"\n'
    lstm, gru = read_config(config_file(text)).entries()
    assert (lstm.options.priorities, gru.options.priorities) == ("aged", "strict")
    with pytest.raises(OptionError, match="fair"):
        read_config(config_file(text.replace("strict", "fair")))


def test_a_model_s_engine_is_deterministic_if_the_file_says_so(config_file):
    text = '[[models]]\nsource = "lstm"\n[[models]]\nsource = "gru"\ndeterministic = true\n'
    lstm, gru = read_config(config_file(text)).entries()
    assert (lstm.options.deterministic, gru.options.deterministic) == (False, True)


def test_a_whole_file_is_read(config_file, tmp_path):
    config = read_config(config_file(WHOLE))
    assert (config.host, config.port, config.limits.max_in_flight, config.log.access) == ("0.0.0.0", 9000, 64, True)
    assert config.auth.keys == str(tmp_path / "keys.txt")
    translator, lstm = config.entries()
    assert translator.source == BuiltIn("translator", "seq2seq", {"hidden": 32})
    assert (translator.options.threads, lstm.options.threads) == (1, None)


def test_an_empty_file_is_the_defaults(config_file):
    assert read_config(config_file("")) == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hots = 'x'", "unknown option 'hots'.*Did you mean 'hosts'"),
        ("[limits]\nmax_inflight = 3", "unknown option 'limits.max_inflight'.*Did you mean 'limits.max_in_flight'"),
        ("[[models]]\nsorce = 'lstm'", "unknown option 'models.sorce'.*Did you mean 'models.source'"),
        ("port = 'x'", r"Expected `int`, got `str` - at `\$.port`"),
        ("port = 70000", "port must be"),
        ("[log]\nlevel = 'loud'", "Invalid enum value 'loud'"),
        ("[limits]\nmax_in_flight = 0", "limits.max_in_flight must be above 0"),
        ("[auth]\nrate = -1.0", "auth.rate must be above 0"),
        ("[tls]\ncert = 'x'", "both a certificate and its key"),
        ("trace_steps = -1", "trace_steps"),
        ("host = ", "cannot be read as TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(config_file, text, said):
    with pytest.raises(OptionError, match=said):
        read_config(config_file(text))


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


def test_the_docs_tell_every_limit_and_its_default():
    text = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"^\[limits\]\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    defaults = msgspec.structs.asdict(Limits())
    assert tomllib.loads(told) == defaults


@pytest.mark.parametrize(
    "line", ["keepalive_time_ms = 0", "http2_max_ping_strikes = -1", "keepalive_timeout_ms = 2147483648"]
)
def test_pings_that_cannot_be_are_refused(config_file, line):
    with pytest.raises(OptionError, match=line.partition(" ")[0]):
        read_config(config_file(f"[grpc]\n{line}"))
