"""ddddocr: pictures of text to the text."""

from __future__ import annotations

import base64
import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from engine_cost.measuring import NotRunError
from real_models.case import Case, Data, example, text
from real_models.hand_layers import CompiledLayers, TorchLayers
from real_models.segment_japanese import both

LOOKED_AT: Final = 8
"""Most pictures in one call of the convolutions: larger batches of them are slower on a CPU."""
FONTS: Final = (24, 32, 40)
"""Heights of letters, in pixels."""


def case(data: Data) -> Case:
    """Pictures of one to three English words, convolutions and a BiLSTM of 512 + 512 over their columns."""
    model: Any = example("reading", "ddddocr")
    try:
        from ddddocr import DdddOcr
    except ImportError as error:
        raise NotRunError(f"needs all of ddddocr, not its weights alone: {error}") from error
    package = DdddOcr(beta=True, show_ad=False)
    lstm = both(model.lstm.l0.module.cell, model.lstm.l0_reverse.module.cell)
    layers: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
        "packed": TorchLayers(lstm, packed=True),
        "compiled": CompiledLayers(lstm),
    }
    return Case(
        package="ddddocr",
        about="pictures of words, convolutions, BiLSTM 512 + 512 over columns, CTC",
        asked=list(pictures(data))[: data.of(160, 16)],
        model=model,
        by_hand={name: Texts(model.look.module, run, model.letter.module.out) for name, run in layers.items()},
        own=package.classification,
        same=lambda ours, theirs: ours == theirs,
        target=1.0,
        sizes=(4, 16, 64),
        encode=model.encode,
        decode=model.decode,
        length=lambda request: request["end"],
        own_count=80,
    )


def pictures(data: Data) -> Iterator[str]:
    """Yield pictures of a text's words in order, one to three in each, as PNG files in base64."""
    words = re.findall(r"[a-z]+", text(data, "europarl_deen", "raw5k.en").lower())
    generator, at = random.Random(0), 0
    while at < min(len(words), 1000):
        count = generator.randint(1, 3)
        yield picture(" ".join(words[at : at + count]), generator.choice(FONTS))
        at += count


def picture(line: str, size: int) -> str:
    """Return a picture of a line, black on white, as a PNG file in base64."""
    font = ImageFont.load_default(size)
    image = Image.new("L", (int(font.getlength(line)) + size // 2, round(1.5 * size)), 255)
    ImageDraw.Draw(image).text((size // 4, size // 8), line, fill=0, font=font)
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@final
class Texts:
    """A batch of pictures: convolutions over a few at a time, padded to the widest; then all columns together."""

    def __init__(self, look: nn.Module, layers: Callable[[Sequence[Tensor]], Tensor], out: nn.Module) -> None:
        self._look, self._layers, self._out = look, layers, out

    @torch.no_grad()
    def __call__(self, requests: Sequence[dict[str, Any]]) -> list[Tensor]:
        """Return the letter of each column of each picture."""
        columns: list[Tensor] = []
        for at in range(0, len(requests), LOOKED_AT):
            columns += self._columns(requests[at : at + LOOKED_AT])
        letters = self._out(self._layers(columns)).argmax(1)
        return list(letters.split([len(one) for one in columns]))

    def _columns(self, requests: Sequence[dict[str, Any]]) -> list[Tensor]:
        ends = [request["end"] for request in requests]
        pixels = np.zeros((len(requests), len(requests[0]["pixels"]), max(ends)), np.uint8)
        for row, request, end in zip(pixels, requests, ends, strict=True):
            row[:, :end] = request["pixels"][:, :end]
        found = self._look(torch.from_numpy(pixels), torch.tensor(ends))
        return [one[: len(request["places"])] for one, request in zip(found, requests, strict=True)]
