"""WAV files: sound of one channel, in PCM of 16 bits, floats of 32 bits or G.711 mu-law."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from batchmaker.server.faults import invalid
from batchmaker.server.formats.audio import FLOAT32, PCM16, PCMU, Encoding

_FORMATS: Final[dict[tuple[int, int], Encoding]] = {(1, 16): PCM16, (3, 32): FLOAT32, (7, 8): PCMU}
"""By the format tag and the bits of a sample (Microsoft, "Multimedia Programming Interface", 1991; mmreg.h)."""

_EXTENSIBLE: Final = 0xFFFE
"""The format tag is then the beginning of the subformat."""

_UNKNOWN_SIZE: Final = 0x7FFFF000
"""From here on a size says that the writer did not know it: the sound goes to the end of the file. So does 0 where that
of the whole file is 0 too."""

_MAX_CHUNKS: Final = 256
"""Before the sound: a file of nothing but chunks must not take the server's time."""

_OTHERS: Final[tuple[tuple[int, bytes, str], ...]] = (
    (0, b"fLaC", "FLAC"), (0, b"OggS", "Ogg"), (0, b"ID3", "MP3"), (0, b"\xff\xfb", "MP3"), (4, b"ftyp", "MP4"),
    (0, b"\x1aE\xdf\xa3", "WebM or Matroska"), (0, b"RF64", "RF64"), (0, b"RIFX", "big-endian RIFF"),
)  # fmt: skip


class Wav(NamedTuple):
    """The sound of a file. rate: samples a second. data: its samples."""

    encoding: Encoding
    rate: int
    data: memoryview

    @property
    def num_samples(self) -> int:
        return len(self.data) // self.encoding.width


def read_wav(file: bytes) -> Wav:
    """Return the sound of a file. INVALID for other containers and formats, several channels, or one that is cut."""
    if file[:4] != b"RIFF" or file[8:12] != b"WAVE":
        other = next((name for at, sign, name in _OTHERS if file[at : at + len(sign)] == sign), None)
        raise invalid(
            f"the file is {'no WAV file' if other is None else other}: send a WAV file of one channel, in PCM of 16 "
            "bits (such as from ffmpeg -i FILE -ac 1 -c:a pcm_s16le OUT.wav)"
        )
    view, at, form = memoryview(file), 12, None
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(file):
            break
        name, (size,) = file[at : at + 4], struct.unpack_from("<I", file, at + 4)
        at += 8
        if name == b"fmt ":
            form = _format(view[at : at + size])
        elif name == b"data":
            if form is None:
                break
            if not size and file[4:8] == bytes(4):
                size = _UNKNOWN_SIZE
            if size > len(file) - at and size < _UNKNOWN_SIZE:
                raise invalid(f"the file is cut: its sound has {size} bytes by its header, and {len(file) - at} follow")
            data = view[at : at + size]
            if len(data) % form[0].width:
                raise invalid(f"the file's sound of {len(data)} bytes is no whole number of samples")
            return Wav(*form, data)
        at += size + size % 2
    raise invalid("the WAV file has no sound in it: its chunks `fmt ` and `data` are not there")


def _format(chunk: memoryview) -> tuple[Encoding, int]:
    """Return the encoding and the rate in a chunk `fmt `."""
    if len(chunk) < 16:
        raise invalid("the WAV file is cut in its chunk `fmt `")
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and len(chunk) >= 26:
        (tag,) = struct.unpack_from("<H", chunk, 24)
    if channels != 1:
        raise invalid(f"the file has {channels} channels; send one: a mix of them, or each in a file of its own")
    encoding = _FORMATS.get((tag, bits))
    if encoding is None:
        raise invalid(
            f"the WAV file has samples of {bits} bits in format {tag:#06x}; send PCM of 16 bits, floats of 32 bits or "
            "mu-law"
        )
    return encoding, rate
