"""Refuses calls that a page of another site makes a browser send, if the server has no keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from typing import Final, final

from batchmaker.server.faults import FaultKind, ServiceError

_OTHER_SITES: Final = frozenset({b"cross-site", b"same-site"})
_WATCHED: Final = frozenset({b"host", b"origin", b"sec-fetch-site"})


@final
class Origins:
    """Distinguishes calls of people and programs from those of other sites' pages.

    A page in a browser can send calls to any address that the browser reaches, this machine included. Browsers declare
    this in Origin and Sec-Fetch-Site (Fetch standard; Fetch Metadata). They do not if the page's own name resolves to
    this machine (DNS rebinding), but then Host is that name. So a server that only this machine reaches accepts calls
    for addresses, for localhost and for `hosts`, and for no other name.

    hosts: names of this server; if given, no other name is accepted, on any interface. allowed: origins whose pages may
    call, as browsers write them; "null" for files, "*" for all.
    """

    def __init__(self, hosts: Collection[str], allowed: Collection[str] = (), *, only_this_machine: bool) -> None:
        self._allowed = frozenset(origin.encode("latin-1", "replace") for origin in allowed)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._any_name = not hosts and not only_this_machine
        self._accepted_hosts: set[bytes] = set()

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raise FORBIDDEN for a call of another site's page. headers: names in lower case."""
        host = origin = site = b""
        for name, value in headers:
            if name in _WATCHED:
                if name == b"host":
                    host = value
                elif name == b"origin":
                    origin = value
                else:
                    site = value
        is_foreign = site in _OTHER_SITES or (origin and origin.partition(b"://")[2].lower() != host.lower())
        if is_foreign and not self._allowed & {origin, b"*"}:
            whose = origin.decode("latin-1")[:128] or "other sites"
            raise ServiceError(
                FaultKind.FORBIDDEN,
                f"pages of {whose!r} may not call this server; set API keys, or allow them (auth.origins)",
            )
        if not self._any_name and host and host not in self._accepted_hosts:
            self._check_host(host)

    def _check_host(self, host: bytes) -> None:
        name = _name_in(host)
        if not (name in self._hosts or name == "localhost" or name.endswith(".localhost") or _is_address(name)):
            raise ServiceError(
                FaultKind.FORBIDDEN,
                f"this server does not go by the name {name[:64]!r}; call it by its address, or add the name to hosts",
            )
        if len(self._accepted_hosts) < 64:  # a limit, because clients choose these names
            self._accepted_hosts.add(host)


def _name_in(host: bytes) -> str:
    """Return the name or address in a Host header, without the port."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if ":" in text else text


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
