"""What is taken over at SIGHUP, what waits for the next start, and that a mistake changes nothing."""

from __future__ import annotations

import asyncio
import logging

from batchmaker.server.access.auth import KeyRing
from batchmaker.server.config import AuthConfig, Config, LogConfig, TlsConfig
from batchmaker.server.limits import Limits
from batchmaker.server.reload import Reload, waiting_settings
from batchmaker.server.service.repository import Repository
from waiting import until


def test_what_is_not_taken_over_is_named():
    now = Config(
        port=9,
        limits=Limits(max_nodes=7),
        auth=AuthConfig(rate=3.0, origins=["null"]),
        log=LogConfig(level="debug", access=True),
        tls=TlsConfig(cert="c", key="k"),
        versions="all",
    )
    assert waiting_settings(Config(), now) == ["port", "limits.max_nodes", "auth.origins", "log.access", "tls"]
    assert waiting_settings(now, now) == []


def test_a_key_file_that_cannot_be_read_changes_nothing(tmp_path, caplog):
    keys = KeyRing({"ann": "a" * 20})
    wrong = Config(auth=AuthConfig(keys=str(tmp_path / "gone")), log=LogConfig(level="error"))

    async def body():
        reload = Reload(Config(), lambda: wrong, keys, Repository([], Limits()))
        reload.begin()
        await until(lambda: "not reloaded" in caplog.text)

    level = logging.getLogger("batchmaker").level
    asyncio.run(body())
    assert keys.caller("a" * 20) == "ann"
    assert logging.getLogger("batchmaker").level == level
    assert "not reloaded" in caplog.text
