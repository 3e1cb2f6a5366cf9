"""Caches on disk: compiled kernels, and the best measured configurations."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import final

_LOG = logging.getLogger("batchmaker.kernels")


def default_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the default directory of caches: `batchmaker` in $XDG_CACHE_HOME, which must be absolute, or in ~/.cache.

    None without a home directory.
    """
    setting = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(setting):
        return Path(setting) / "batchmaker"
    home = environment.get("HOME", "")
    return Path(home) / ".cache" / "batchmaker" if os.path.isabs(home) else None


@final
class CacheDirectory:
    """Named entries in one directory, which is made at the first write.

    Losing an entry costs only time. An unreadable entry counts as absent. A failed write is a warning in the log, once.
    Entries are replaced as a whole, so processes may share the directory. root: None keeps nothing.
    """

    __slots__ = ("_warned", "root")

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._warned = False

    def read(self, name: str) -> bytes | None:
        """Return an entry, None if it is missing or cannot be read."""
        if self.root is None:
            return None
        try:
            return (self.root / name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Store an entry if possible."""
        if self.root is None:
            return
        try:
            self._replace(self.root, name, content)
        except OSError as error:
            if not self._warned:
                _LOG.warning(
                    "%s: the cache cannot be written (%s). Work goes on without it; give another directory with "
                    "--cache or XDG_CACHE_HOME.",
                    self.root,
                    error.strerror or error,
                )
            self._warned = True

    @staticmethod
    def _replace(root: Path, name: str, content: bytes) -> None:
        root.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=root, prefix=".writing-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, root / name)
        except BaseException:
            os.unlink(temporary)
            raise
