"""A server without keys takes no calls that pages of other sites make a browser send."""

from __future__ import annotations

import pytest

from batchmaker.server.access.origins import Origins
from batchmaker.server.faults import FaultKind, ServiceError

HERE = Origins((), only_this_machine=True)
ANYWHERE = Origins((), only_this_machine=False)


def headers(**named: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]


def is_taken(origins: Origins, **named: str) -> bool:
    try:
        origins.check(headers(**named))
    except ServiceError as fault:
        return fault.kind is not FaultKind.FORBIDDEN
    return True


@pytest.mark.parametrize(
    "sent",
    [
        {"host": "127.0.0.1:8000"},
        {"host": "localhost:8000"},
        {"host": "[::1]:8000"},
        {"host": "192.168.1.7"},
        {"host": "models.localhost"},
        {},
        {"host": "localhost:8000", "origin": "http://localhost:8000", "sec_fetch_site": "same-origin"},
        {"host": "localhost:8000", "sec_fetch_site": "none"},
    ],
)
def test_programs_and_the_servers_own_page_are_taken(sent):
    assert is_taken(HERE, **sent)
    assert is_taken(ANYWHERE, **sent)


@pytest.mark.parametrize(
    "sent",
    [
        {"host": "localhost:8000", "origin": "https://elsewhere.example"},
        {"host": "localhost:8000", "origin": "http://localhost:9000"},
        {"host": "localhost:8000", "origin": "null"},
        {"host": "localhost:8000", "sec_fetch_site": "cross-site"},
        {"host": "localhost:8000", "sec_fetch_site": "same-site"},
    ],
)
def test_pages_of_other_sites_are_refused(sent):
    assert not is_taken(HERE, **sent)
    assert not is_taken(ANYWHERE, **sent)


def test_a_name_that_has_been_made_to_lead_here_is_refused_where_only_this_machine_reaches_the_server():
    sent = {"host": "elsewhere.example:8000", "origin": "http://elsewhere.example:8000"}
    assert not is_taken(HERE, **sent)
    assert is_taken(ANYWHERE, **sent)


def test_names_that_were_given_are_taken_and_no_others():
    named = Origins(["Models.Example"], only_this_machine=False)
    assert is_taken(named, host="models.example:8000")
    assert is_taken(named, host="10.0.0.7:8000")
    assert not is_taken(named, host="other.example")


@pytest.mark.parametrize(
    ("origin", "allowed", "good"),
    [
        ("http://here:80", [], True), ("https://HERE:80", [], True), ("http://there:80", [], False),
        ("null", [], False), ("null", ["null"], True), ("http://there:80", ["*"], True), ("http://[", [], False),
        ("https://there", ["https://there"], True), ("https://there.evil", ["https://there"], False),
    ],
)  # fmt: skip
def test_pages_of_other_sites_are_let_in_only_if_they_are_named(origin, allowed, good):
    origins = Origins((), allowed, only_this_machine=False)
    assert is_taken(origins, host="here:80", origin=origin) == good
    assert is_taken(origins, host="here:80", origin=origin, sec_fetch_site="cross-site") == bool(allowed and good)
