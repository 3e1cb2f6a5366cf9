"""The text of tokens that come piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from batchmaker.errors import said_by
from batchmaker.server.faults import FaultKind, ServiceError

_LOG = logging.getLogger("batchmaker.server")
_UNFINISHED: Final = "\ufffd"
"""What a character becomes of which some bytes are in tokens to come."""

Decode = Callable[[Sequence[int]], str]
"""Tokens -> their text."""


def decoded(tokens: Sequence[int], decode: Decode) -> str:
    """Return the text of tokens. INTERNAL if the model's own function raises, or returns no text."""
    try:
        text: Any = decode(tokens)
        if isinstance(text, str):
            return str(text)
        said = f"returned {type(text).__name__}"
    except Exception as error:
        said = f"raised {said_by(error)}"
    _LOG.warning("decode gave no text", extra={"error": said})
    raise ServiceError(FaultKind.INTERNAL, "the model could not make a text of its tokens")


@final
class GrowingText:
    """The pieces of a text. Nothing is taken back: a character is returned when all its bytes are there."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._known, self._shown = 0, 0

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain with these tokens too."""
        self._tokens.extend(tokens)
        text = self._new_text()
        if text.endswith(_UNFINISHED):
            return ""
        # A tokenizer may write a token in another way where a text begins: the tokens before are written once more.
        self._known, self._shown = self._shown, len(self._tokens)
        return text

    def rest(self) -> str:
        """No token comes any more: return the text that is not returned yet."""
        text = self._new_text()
        self._known = self._shown = len(self._tokens)
        return text

    def _new_text(self) -> str:
        before = decoded(self._tokens[self._known : self._shown], self._decode) if self._shown else ""
        return decoded(self._tokens[self._known :], self._decode)[len(before) :]
