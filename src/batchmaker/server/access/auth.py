"""Authentication: API keys, and a rate for each."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

from batchmaker.clock import Clock, RealClock
from batchmaker.errors import OptionError
from batchmaker.server.faults import FaultKind, ServiceError

ENVIRONMENT: Final = "BATCHMAKER_API_KEYS"
"""Environment variable with keys as NAME:KEY, separated by commas."""

WRONG_A_SECOND: Final = 100.0
"""Most calls a second with wrong keys that get the answer "wrong key"."""

FRONT: Final = "the fleet itself"
"""The holder whose key the front of a fleet has for its own calls; only it may share a connection among calls."""

_MIN_KEY: Final = 16


@final
class TokenBucket:
    """Lets `burst` calls through at once and `rate` a second in the long run."""

    __slots__ = ("_burst", "_clock", "_filled_s", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, clock: Clock) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._filled_s = clock.now_s()

    def take(self) -> float:
        """Take one token and return 0, or return the seconds until there is one."""
        now_s = self._clock.now_s()
        self._tokens = min(self._burst, self._tokens + (now_s - self._filled_s) * self._rate)
        self._filled_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._rate


@final
class KeyRing:
    """The known keys, by the name of the holder. Without keys, everybody may call.

    rate: calls a second for each key, None for any number; burst: calls at once. control: names that may load and
    unload models; empty for all. Calls with wrong keys share a rate too, WRONG_A_SECOND of all clients together. Above
    it they are told to wait; right keys never are.
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        rate: float | None = None,
        burst: float | None = None,
        control: frozenset[str] = frozenset(),
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or RealClock()
        self._wrong = TokenBucket(WRONG_A_SECOND, WRONG_A_SECOND, self._clock)
        self.num_replaced = 0
        """How often the keys were replaced."""
        self.replace(keys, rate, burst, control)

    def replace(
        self,
        keys: Mapping[str, str],
        rate: float | None = None,
        burst: float | None = None,
        control: frozenset[str] = frozenset(),
    ) -> None:
        """Replace all keys. OptionError leaves everything unchanged."""
        unknown = sorted(control - set(keys))
        if unknown:
            raise OptionError(f"control_keys names {unknown[0]!r}, but there is no key of that name")
        self.num_replaced += 1
        self._digests = {name: _digest(key) for name, key in keys.items()}
        self._control = control
        self._buckets: dict[str, TokenBucket] = {}
        if rate is not None:
            self._buckets = {name: TokenBucket(rate, burst or max(1.0, rate), self._clock) for name in keys}

    @property
    def open(self) -> bool:
        """Whether anybody may call."""
        return not self._digests

    @property
    def is_of_fleet(self) -> bool:
        """Whether all who may call are the front of a fleet, on behalf of its clients."""
        return FRONT in self._digests

    def caller(self, key: str | None, *, counted: bool = True) -> str:
        """Return the name of a key's holder, "" if everybody may call.

        counted: whether the call counts towards the key's rate. Raises ServiceError: UNAUTHENTICATED for a missing or
        unknown key, TOO_MANY above its rate. All keys are compared in constant time, so the time tells nothing about
        them.
        """
        if self.open:
            return ""
        presented = _digest(key or "")
        holder = ""
        for name, digest in self._digests.items():
            if hmac.compare_digest(digest, presented):
                holder = name
        if not holder:
            wait_s = self._wrong.take() if key else 0.0
            if wait_s:
                raise ServiceError(FaultKind.TOO_MANY, "too many calls with wrong API keys; slow down", wait_s)
            what = "no API key was sent" if not key else "this API key is not known"
            raise ServiceError(
                FaultKind.UNAUTHENTICATED, f"{what}; send one as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
            )
        if counted:
            self.count(self.bucket_of(holder))
        return holder

    def bucket_of(self, holder: str) -> TokenBucket | None:
        """Return what limits the rate of a key; None if nothing does."""
        return self._buckets.get(holder)

    @staticmethod
    def count(bucket: TokenBucket | None) -> None:
        """Count a call with a key. Raises TOO_MANY above its rate."""
        wait_s = 0.0 if bucket is None else bucket.take()
        if wait_s:
            raise ServiceError(
                FaultKind.TOO_MANY, "too many requests with this API key; slow down", retry_after_s=wait_s
            )

    def check_control(self, holder: str) -> None:
        """Raise FORBIDDEN unless this holder of a key may load and unload models."""
        if self._control and holder not in self._control:
            raise ServiceError(FaultKind.FORBIDDEN, "this API key may not load or unload models")


@final
class KnownKey:
    """A key that was accepted, for further calls with it: all keys are compared again only if they were replaced."""

    __slots__ = ("_bucket", "_key", "_ring", "_seen")

    def __init__(self, ring: KeyRing, key: str | None) -> None:
        self._ring = ring
        self._key = key
        self._seen = 0
        self._bucket: TokenBucket | None = None

    def count(self) -> None:
        """Count a call. Raises as `KeyRing.caller` does: the key may be gone, or its rate used up."""
        ring = self._ring
        if self._seen != ring.num_replaced:
            self._bucket = ring.bucket_of(ring.caller(self._key, counted=False))
            self._seen = ring.num_replaced
        if self._bucket is not None:
            ring.count(self._bucket)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: Path | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return keys by name from a file with NAME:KEY on each line (# begins a comment), and from the environment.

    Raises OptionError for malformed keys, and for keys too short to be secret. Messages never contain a key.
    """
    entries: list[tuple[str, str]] = []
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"{path}: the API keys cannot be read ({error})") from None
        entries += [(f"{path}:{number}", line) for number, line in enumerate(lines, 1)]
    entries += [(f"${ENVIRONMENT}", part) for part in environment.get(ENVIRONMENT, "").split(",")]
    keys: dict[str, str] = {}
    for where, entry in entries:
        text = entry.strip()
        if not text or text.startswith("#"):
            continue
        name, colon, key = (part.strip() for part in text.partition(":"))
        if not (name and colon and key):
            raise OptionError(f"{where}: expected NAME:KEY")
        if len(key) < _MIN_KEY:
            raise OptionError(f"{where}: the key of {name!r} is shorter than {_MIN_KEY} characters; make a longer one")
        if name in keys:
            raise OptionError(f"{where}: there are two keys named {name!r}")
        keys[name] = key
    if path is not None and not keys:
        raise OptionError(f"{path}: holds no API key; expected NAME:KEY on each line")
    return keys
