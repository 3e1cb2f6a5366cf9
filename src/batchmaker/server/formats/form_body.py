"""Bodies of forms with a file: multipart/form-data (RFC 7578)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batchmaker.server.faults import invalid
from batchmaker.server.formats.pieces import Pieces

_PIECE_BYTES: Final = 64 << 10
_MAX_PARTS: Final = 64
_MAX_FIELD_BYTES: Final = 64 << 10
"""Of the name and the value of a field that is no file."""


@dataclass(frozen=True, slots=True)
class FormBody:
    """fields: of text, by name; a name that is sent again, such as `include[]`, has several values. files: by name."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def read_form(body: bytes, content_type: str | None) -> Pieces[FormBody]:
    """Return the form in a body. content_type: the header. INVALID if it is no such form, or a part of it is wrong."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        said = repr(content_type[:64]) if content_type else "no Content-Type"
        raise invalid(f"the body must be a form with a file, multipart/form-data with its boundary; got {said}")
    parts = _Parts()
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        for start in range(0, len(body), _PIECE_BYTES):
            if start:
                yield
            parser.write(body[start : start + _PIECE_BYTES])
        parser.finalize()
    except FormParserError as error:
        raise invalid(f"the body is no whole form: {str(error)[:200]}") from None
    if not parts.has_ended:
        raise invalid("the body is no whole form: it ends before its last boundary")
    return parts.form


@final
class _Parts:
    """What the parser finds."""

    def __init__(self) -> None:
        self.form = FormBody()
        self.has_ended = False
        self._num_parts = 0
        self._header = [b"", b""]
        self._disposition = b""
        self._data: list[bytes] = []
        self._size = 0

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._add,
            "on_part_end": self._end,
            "on_end": self._end_form,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise invalid(f"the form has more than {_MAX_PARTS} parts")
        self._disposition, self._data, self._size = b"", [], 0

    def _add_header(self, which: int, data: bytes) -> None:
        self._header[which] += data

    def _end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]
        self._header = [b"", b""]

    def _add(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])
        self._size += end - start

    def _end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if not name:
            raise invalid("a part of the form has no name: send it as Content-Disposition: form-data; name=...")
        data = b"".join(self._data)
        if b"filename" in options:
            if name in self.form.files:
                raise invalid(f"the form has two files {name[:64]!r}; send one")
            self.form.files[name] = data
            return
        if self._size + len(name) > _MAX_FIELD_BYTES:
            raise invalid(f"field {name[:64]!r} has {self._size} bytes; at most {_MAX_FIELD_BYTES} are taken")
        try:
            self.form.fields.setdefault(name, []).append(data.decode())
        except UnicodeDecodeError:
            raise invalid(
                f"field {name[:64]!r} is not UTF-8; a file has a filename in its Content-Disposition"
            ) from None

    def _end_form(self) -> None:
        self.has_ended = True
