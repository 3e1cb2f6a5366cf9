"""What a picture says: the network of ddddocr 1.6, which reads a line of text of any width.

Convolutions make a vector of every 8 pixels of the width, a column; an LSTM in each direction runs over the columns;
one more layer names a letter for each column, or none. The same letter in neighbouring columns is one letter (CTC).

Pictures are padded to one of a few widths, each a type of the same cell. What is behind a picture's end is kept at zero
in every layer, so padding changes no answer.
"""

from __future__ import annotations

import base64
import io
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import silu

import batchmaker as bm
from batchmaker.errors import InvalidRequestError
from batchmaker.server import Signature, TensorSpec

HEIGHT = 64
"""Pictures are scaled to it, in pixels."""

WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024)
"""In pixels. A picture is padded to the next one; as many as a cell has types."""

MOST_PIXELS = 1 << 21
"""Of a picture as it comes: it is decoded in the server's own thread."""

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")

COLUMN = 8
"""Pixels of the width that become one column."""


class Look(nn.Module):
    """(pixels uint8 [64, width], where the picture ends int64 []) -> columns float32 [width / 8, 512]."""

    def __init__(self, convolutions: list[nn.Conv2d]) -> None:
        super().__init__()
        first, *rest = convolutions
        self.first = first
        self.blocks = nn.ModuleList(map(Block, rest[::2], rest[1::2]))

    def forward(self, pixels: Tensor, end: Tensor) -> Tensor:
        x, end = silu(self.first(pixels[:, None] / 255)), half(end)
        for block in self.blocks:
            x, end = block(until(end, x), end)
        return x.permute(0, 3, 1, 2).flatten(2)


class Block(nn.Module):
    """Two convolutions, (x, end) -> (x, end); beside them x itself where it has the same shape."""

    def __init__(self, widen: nn.Conv2d, narrow: nn.Conv2d) -> None:
        super().__init__()
        self.widen, self.narrow = widen, narrow
        self.halves = widen.stride == (2, 2)
        self.adds = not self.halves and widen.in_channels == narrow.out_channels

    def forward(self, x: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        y = self.narrow(silu(self.widen(x)))
        return y + x if self.adds else y, half(end) if self.halves else end


def half(end: Tensor) -> Tensor:
    """Return where a picture ends after a convolution of stride 2."""
    return (end + 1) // 2


def until(end: Tensor, x: Tensor) -> Tensor:
    """Return x [batch, channels, height, width] with zeros from each picture's end on, as behind the last pixel."""
    return x * (torch.arange(x.shape[3], device=x.device) < end[:, None])[:, None, None]


class Column(nn.Module):
    """(columns [n, 512], the number of one) -> this one, [512]."""

    def forward(self, columns: Tensor, place: Tensor) -> Tensor:
        return columns.gather(1, place[:, None, None].expand(-1, 1, columns.shape[2]))[:, 0]


class Letter(nn.Module):
    """The states of both directions at a column -> the letter that is most likely, int64 []; 0 for none."""

    def __init__(self, out: nn.Linear) -> None:
        super().__init__()
        self.out = out

    def forward(self, forwards: Tensor, backwards: Tensor) -> Tensor:
        return self.out(torch.cat((forwards, backwards), 1)).argmax(1)


class Reading(bm.Model):
    """A request is a picture as `encode` gives it; the result is a letter for each column, int64 [n]."""

    def __init__(self, convolutions: list[nn.Conv2d], lstm: nn.LSTM, out: nn.Linear, letters: list[str]) -> None:
        look = Look(convolutions).to(memory_format=torch.channels_last)  # the CPU's convolutions are faster so
        self.look = bm.Cell(look, batch_sizes=(1, 2, 3, 4, 6, 8))
        self.column = bm.Cell(Column(), max_batch=64, priority=1)
        self.lstm = bm.recurrent(lstm, join=False, max_batch=64, priority=1)
        self.letter = bm.Cell(Letter(out), max_batch=256, priority=2)
        self.letters = letters
        self.example_requests = [request_of(Image.new("L", (width, HEIGHT))) for width in WIDTHS]

    def unfold(self, pixels: Any, end: Any, places: Any) -> Any:
        columns = self.look(pixels, end)  # of the padded picture; one for each of `places` is inside
        (forwards, backwards), _ = self.lstm(self.column.map([columns] * len(places), places))
        return self.letter.map(forwards, backwards)

    def encode(self, picture: str) -> dict[str, Any]:
        """Return the request for a picture: a file of one of FORMATS in base64. InvalidRequestError for others."""
        try:
            image = Image.open(io.BytesIO(base64.b64decode(picture, validate=True)), formats=FORMATS)
            checked(image).load()
        except (ValueError, OSError, SyntaxError, Image.DecompressionBombError):
            raise InvalidRequestError(
                f"no picture found; send a file in base64, whole, in one of these formats: {', '.join(FORMATS)}"
            ) from None
        return request_of(image.resize((scaled(image), HEIGHT), Image.Resampling.LANCZOS).convert("L"))

    def decode(self, found: Tensor, picture: str = "") -> str:
        """Return the text: a letter for each run of equal ones, nothing for 0."""
        return "".join(self.letters[one] for one in torch.unique_consecutive(found).tolist())  # letter 0 is ""

    def serving_signature(self) -> Signature:
        """A client sends a picture and gets its text."""
        picture, text = TensorSpec("picture", "BYTES", (1,)), TensorSpec("text", "BYTES", (1,))
        return Signature((picture,), (text,), request="value", encode=self.encode, decode=self.decode)


def scaled(image: Image.Image) -> int:
    """Return the width of a picture that is scaled to 64 pixels of height."""
    return int(image.width * (HEIGHT / image.height))


def checked(image: Image.Image) -> Image.Image:
    """Return a picture whose pixels are not decoded yet. InvalidRequestError if it is too large, wide or high."""
    if image.width * image.height > MOST_PIXELS or not 1 <= scaled(image) <= WIDTHS[-1]:
        raise InvalidRequestError(
            f"the picture is {image.width} x {image.height} pixels; cut or scale it to at most {MOST_PIXELS} pixels "
            f"in all, at most {WIDTHS[-1] // HEIGHT} times as wide as high and {HEIGHT} times as high as wide"
        )
    return image


def request_of(image: Image.Image) -> dict[str, Any]:
    """Return the request for a grey picture of 64 pixels' height."""
    width = next(width for width in WIDTHS if width >= image.width)
    pixels = np.zeros((HEIGHT, width), np.uint8)
    pixels[:, : image.width] = np.asarray(image)
    return {"pixels": pixels, "end": image.width, "places": np.arange(-(-image.width // COLUMN))}


def build() -> Reading:
    """Return the model with the weights of the ddddocr that is installed."""
    package = find_spec("ddddocr")  # not imported: that would need OpenCV
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("ddddocr is not installed: pip install --no-deps 'ddddocr>=1.6,<1.7'")
    folder = Path(package.submodule_search_locations[0])
    graph = onnx.load(folder / "common.onnx").graph
    weights = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    of_type: dict[str, list[Any]] = {}
    for node in graph.node:
        of_type.setdefault(node.op_type, []).append(node)
    convolutions = [convolution(node, *(weights[name] for name in node.input[1:])) for node in of_type["Conv"]]
    (lstm,), (out,) = of_type["LSTM"], of_type["Gemm"]
    letters = runpy.run_path(str(folder / "charsets.py"))["CHARSET_BETA"]
    return Reading(
        convolutions,
        lstm_of(*(weights[name] for name in lstm.input[1:4])),
        linear(*(weights[name] for name in out.input[1:])),
        letters,
    )


def convolution(node: Any, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """Return one convolution; those of 3 x 3 keep the size, or halve it."""
    (stride, _) = next(each.ints for each in node.attribute if each.name == "strides")
    channels_out, channels_in, size, _ = weight.shape
    layer = nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer.eval()


def lstm_of(inputs: Tensor, state: Tensor, biases: Tensor) -> nn.LSTM:
    """Return ONNX's LSTM in both directions as torch has it: gates i, f, g, o in place of i, o, f, g."""
    lstm = nn.LSTM(inputs.shape[2], state.shape[2], bidirectional=True)
    weights = {}
    for direction, suffix in enumerate(("", "_reverse")):
        bias_ih, bias_hh = biases[direction].chunk(2)
        parts = {"weight_ih": inputs[direction], "weight_hh": state[direction], "bias_ih": bias_ih, "bias_hh": bias_hh}
        for name, part in parts.items():
            i, o, f, g = part.chunk(4)
            weights[f"{name}_l0{suffix}"] = torch.cat((i, f, g, o))
    lstm.load_state_dict(weights)
    return lstm.eval()


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer.eval()
