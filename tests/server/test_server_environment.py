"""Settings from the environment: every one has a variable, and what is misspelt is refused with the nearest names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from batchmaker.errors import OptionError
from batchmaker.server.config import Config, FleetConfig, ModelEntry, TlsConfig, read_config
from batchmaker.server.environment import with_environment
from batchmaker.server.limits import Limits

REPOSITORY = Path(__file__).resolve().parents[2]


def read(config: Config = Config(), **environment: str) -> Config:  # noqa: B008
    return with_environment(config, {"PATH": "/bin", **environment})


def settings_of(struct: msgspec.Struct, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of all settings, and of the tables that they are in."""
    for name in struct.__struct_fields__:
        yield (*path, name)
        if isinstance(value := getattr(struct, name), msgspec.Struct):
            yield from settings_of(value, (*path, name))


SETTINGS = list(settings_of(Config()))


def variable_of(path: tuple[str, ...]) -> str:
    return "BATCHMAKER_" + "__".join(path).upper()


def test_without_variables_nothing_changes():
    config = Config(port=1, limits=Limits(max_nodes=2))
    assert read(config) == config


def test_a_name_is_that_of_the_setting_and_two_underscores_lead_into_a_table():
    config = read(
        BATCHMAKER_PORT="9000", BATCHMAKER_GRPC_PORT="9001", BATCHMAKER_REPLACE_HUNG="true",
        BATCHMAKER_VERSIONS="all", BATCHMAKER_LOG__LEVEL="warning", BATCHMAKER_LIMITS__MAX_BODY_BYTES="4096",
        BATCHMAKER_LIMITS__DRAIN_SECONDS="2.5", BATCHMAKER_AUTH__KEYS="keys.txt",
        BATCHMAKER_FLEET__REPLICAS="auto",
    )  # fmt: skip
    assert (config.port, config.grpc_port, config.replace_hung, config.versions) == (9000, 9001, True, "all")
    assert (config.limits.max_body_bytes, config.limits.drain_seconds) == (4096, 2.5)
    assert (config.log.level, config.auth.keys, config.fleet) == ("warning", "keys.txt", FleetConfig(replicas="auto"))
    assert config.limits == msgspec.structs.replace(Limits(), max_body_bytes=4096, drain_seconds=2.5)


def test_every_setting_has_a_variable():
    empty = {variable_of(path): "" for path in SETTINGS}
    assert len(empty) == len(SETTINGS) > 50
    assert read(**empty) == Config(), "one that is empty is as none, and one that is unknown is an error"


@pytest.mark.parametrize("path", SETTINGS, ids="__".join)
def test_a_setting_read_from_its_variable_is_what_was_written(path):
    value = Config()
    for step in path:
        value = getattr(value, step)
    if value is None or value == []:
        return
    is_json = isinstance(value, msgspec.Struct | list)
    text = msgspec.json.encode(value).decode() if is_json else str(value).lower()
    assert read(**{variable_of(path): text}) == Config()


def test_lists_and_tables_are_json():
    config = read(
        BATCHMAKER_HOSTS='["a", "b"]',
        BATCHMAKER_MODELS='[{"source": "lstm", "options": {"hidden": 8}}]',
        BATCHMAKER_TLS='{"cert": "c", "key": "k"}',
    )
    assert config.hosts == ["a", "b"]
    assert config.models == [ModelEntry(source="lstm", options={"hidden": 8})]
    assert config.tls == TlsConfig(cert="c", key="k")


def test_an_entry_goes_before_its_table_and_both_leave_the_rest_of_the_file():
    file = Config(limits=Limits(max_streams=1, max_nodes=2, max_tensors=3), port=7)
    config = read(file, BATCHMAKER_LIMITS__MAX_STREAMS="10", BATCHMAKER_LIMITS='{"max_streams": 20, "max_nodes": 30}')
    assert config == Config(limits=Limits(max_streams=10, max_nodes=30, max_tensors=3), port=7)


def test_the_environment_goes_before_the_file(tmp_path):
    (tmp_path / "server.toml").write_text(
        'port = 1\nhost = "::1"\n[limits]\nmax_streams = 3\n[[models]]\nsource = "gru"\n'
    )
    file = read_config(tmp_path / "server.toml")
    config = read(file, BATCHMAKER_PORT="2", BATCHMAKER_MODELS='[{"source": "lstm"}]')
    assert (config.port, config.host, config.limits.max_streams) == (2, "::1", 3)
    assert config.models == [ModelEntry(source="lstm")]


def test_an_empty_variable_is_as_none():
    assert read(BATCHMAKER_PORT="", BATCHMAKER_PAGE="") == Config()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("BATCHMAKER_LIMITS_MAX_STREAMS", "3", "no setting.*Did you mean BATCHMAKER_LIMITS__MAX_STREAMS"),
        ("BATCHMAKER_LIMITS__MAX_STREAM", "", "no setting.*Did you mean BATCHMAKER_LIMITS__MAX_STREAMS or "),
        ("BATCHMAKER_PROT", "3", "Did you mean BATCHMAKER_PORT"),
        ("BATCHMAKER_", "3", "the environment variable BATCHMAKER_ is no setting of the server"),
        ("BATCHMAKER_PORT", "x", "BATCHMAKER_PORT cannot be used: Expected `int"),
        ("BATCHMAKER_LOG__LEVEL", "loud", "BATCHMAKER_LOG__LEVEL cannot be used: Invalid enum value 'loud'"),
        ("BATCHMAKER_HOSTS", "a,b", "BATCHMAKER_HOSTS cannot be used: .*lists and tables are JSON"),
        ("BATCHMAKER_LIMITS", "[3]", "BATCHMAKER_LIMITS cannot be used: Expected `object`"),
        ("BATCHMAKER_LIMITS", '{"max_stream": 3}', "BATCHMAKER_LIMITS cannot be used: .*max_stream"),
        ("BATCHMAKER_MODELS", '[{"sorce": "lstm"}]', "BATCHMAKER_MODELS cannot be used: "),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_its_name(name, text, said):
    with pytest.raises(OptionError, match=said):
        read(**{name: text})


def test_variables_of_another_meaning_are_let_be():
    texts = [
        path.read_text("utf-8")
        for folder in ("src", "deploy", "docs")
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".md", ".toml")
    ]
    found = {name for text in texts for name in re.findall(r"\bBATCHMAKER_[A-Z_]+\b", text)}
    assert {"BATCHMAKER_API_KEYS", "BATCHMAKER_COMPILES", "BATCHMAKER_EXAMPLES", "BATCHMAKER_PORT"} <= found
    settings = set(map(variable_of, SETTINGS))
    assert read(**dict.fromkeys(found - settings, "1")) == Config()


def test_what_kubernetes_says_of_services_named_batchmaker_is_no_setting():
    said = {
        "BATCHMAKER_SERVICE_HOST": "10.0.0.7", "BATCHMAKER_SERVICE_PORT": "8000",
        "BATCHMAKER_SERVICE_PORT_HTTP": "8000", "BATCHMAKER_PORT": "tcp://10.0.0.7:8000",
        "BATCHMAKER_PORT_8000_TCP": "tcp://10.0.0.7:8000", "BATCHMAKER_PORT_8000_TCP_ADDR": "10.0.0.7",
        "BATCHMAKER_METRICS_SERVICE_HOST": "10.0.0.8", "BATCHMAKER_ADMIN_PORT": "tcp://10.0.0.8:8002",
        "BATCHMAKER_METRICS_PORT_8002_TCP_PROTO": "tcp",
    }  # fmt: skip
    assert read(**said) == Config()
