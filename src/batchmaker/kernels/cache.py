"""Files that save work the next time: compiled kernels, and configurations that were measured to be best."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import final

_LOG = logging.getLogger("batchmaker.kernels")


def default_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where caches lie by default: `batchmaker` in $XDG_CACHE_HOME, which must be absolute, or in ~/.cache.

    None where there is no home directory.
    """
    given = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "batchmaker"
    home = environment.get("HOME", "")
    return Path(home) / ".cache" / "batchmaker" if os.path.isabs(home) else None


@final
class CacheDirectory:
    """Entries by name in one directory, which is made when the first is written.

    Losing an entry costs time, never an answer: what cannot be read is absent, and what cannot be written is a warning
    on the log, once. Entries are replaced whole, so that processes may share the directory. root: None keeps nothing.
    """

    __slots__ = ("_warned", "root")

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._warned = False

    def read(self, name: str) -> bytes | None:
        """Return an entry, None if it is not there or cannot be read."""
        if self.root is None:
            return None
        try:
            return (self.root / name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Keep an entry if that is possible."""
        if self.root is None:
            return
        try:
            self._replace(self.root, name, content)
        except OSError as error:
            if not self._warned:
                _LOG.warning(
                    "%s: the cache cannot be written (%s). Work goes on without it; give another directory with "
                    "--cache or XDG_CACHE_HOME.",
                    self.root, error.strerror or error,
                )  # fmt: skip
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
