"""The text of tokens that come piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from batchmaker.errors import said_by
from batchmaker.server.faults import FaultKind, ServiceError, invalid

_LOG = logging.getLogger("batchmaker.server")
_UNFINISHED: Final = "\ufffd"
"""What a character becomes of which some bytes are in tokens to come."""

Decode = Callable[[Sequence[int]], str]
"""Tokens -> their text."""


def decoded(tokens: Sequence[int], decode: Decode) -> str:
    """Return the text of tokens that the model has computed. INTERNAL if its own `decode` gives none."""
    text, refused = _text_of(tokens, decode)
    if refused:
        raise ServiceError(FaultKind.INTERNAL, f"the model computed {refused}, of which its own decode makes no text")
    return text


def echoed(tokens: Sequence[int], decode: Decode) -> str:
    """Return the text of tokens that the client has sent. INVALID if the model's `decode` gives none."""
    text, refused = _text_of(tokens, decode)
    if refused:
        raise invalid(f"echo needs the prompt as text, and the model's decode makes none of {refused}")
    return text


def _text_of(tokens: Sequence[int], decode: Decode) -> tuple[str, str]:
    """Return the text of tokens, and which of them has none; "" if all have."""
    text, said = _tried(tokens, decode)
    if not said:
        return text, ""
    _LOG.warning("decode gave no text", extra={"error": said})
    while len(tokens) > 1:
        half = tokens[: len(tokens) // 2]
        tokens = half if _tried(half, decode)[1] else tokens[len(half) :]
    alone = tokens and _tried(tokens, decode)[1]  # some give no text only beside others
    return "", f"the token {tokens[0]}" if alone else "tokens"


def _tried(tokens: Sequence[int], decode: Decode) -> tuple[str, str]:
    """Return the text of tokens, and what happened if there is none."""
    try:
        text: Any = decode(tokens)
    except Exception as error:
        return "", f"raised {said_by(error)}"
    return (str(text), "") if isinstance(text, str) else ("", f"returned {type(text).__name__}")


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
