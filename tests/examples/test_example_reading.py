"""examples/reading reads what ddddocr reads."""

from __future__ import annotations

import base64
import io
import random

import numpy as np
import pytest
from example_models import answers, example

from batchmaker.errors import InvalidRequestError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORDS = [
    "batchmaker", "a", "of", "column", "PyTorch", "recurrent", "4x7bQ", "1996", "Parliament", "queue", "sum", "HTTP",
    "network", "picture", "k9", "letter", "width", "session", "yes", "no", "Strasbourg", "December", "2000", "thank",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("onnx")
    pytest.importorskip("PIL")
    return example("reading", "ddddocr")


@pytest.fixture(scope="module")
def package(model):
    for needed in ("cv2", "onnxruntime"):
        pytest.importorskip(needed)
    from ddddocr import DdddOcr

    return DdddOcr(beta=True, show_ad=False)


def drawn(text, size, *, form="PNG", mode="RGB", noise=None):
    """A picture of a line of text as a file in base64, black on white."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size)
    image = Image.new(mode, (int(font.getlength(text)) + size // 2, round(1.5 * size)), "white")
    ImageDraw.Draw(image).text((size // 4, size // 8), text, fill="black", font=font)
    if noise is not None:
        grains = noise.integers(-60, 60, (image.height, image.width, len(image.getbands()))).squeeze()
        image = Image.fromarray(np.clip(np.asarray(image) + grains, 0, 255).astype(np.uint8))
    file = io.BytesIO()
    image.save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def test_every_picture_is_read_as_by_the_package(model, package):
    generator, noise = random.Random(0), np.random.default_rng(0)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(1, 3))) for _ in range(64)]
    pictures = [
        drawn(
            text,
            generator.choice((18, 24, 40, 64)),
            form=generator.choice(("PNG", "JPEG", "BMP")),
            mode=generator.choice(("RGB", "L")),
            noise=generator.choice((None, noise)),
        )
        for text in texts
    ]
    requests = [model.encode(picture) for picture in pictures]
    assert len({request["pixels"].shape for request in requests}) >= 6
    assert len({len(request["places"]) for request in requests}) >= 25
    wanted = [package.classification(picture) for picture in pictures]
    assert answers(model, pictures) == wanted
    read = [text.replace(" ", "").lower() == found.lower() for text, found in zip(texts, wanted, strict=True)]
    assert sum(read) > 32, "hardly anything is read, so little was compared"


def test_letters_are_the_packages(model, package):
    assert package.ocr_engine.get_charset() == model.letters


def test_padding_changes_no_column(model):
    import torch

    request = model.encode(drawn("batch", 40, noise=np.random.default_rng(1)))
    end, count = request["end"], len(request["places"])
    assert end % 8, "the last column is half inside"
    assert end < request["pixels"].shape[1]
    look = model.look.module
    with torch.no_grad():
        exact = look(torch.from_numpy(request["pixels"][None, :, :end]), torch.tensor([end]))
        padded = look(torch.from_numpy(request["pixels"])[None], torch.tensor([end]))
        forgotten = look(torch.from_numpy(request["pixels"])[None], torch.tensor([request["pixels"].shape[1]]))
    assert exact.shape[1] == count
    assert (padded[:, :count] - exact).abs().max() < 1e-4
    assert (forgotten[:, :count] - exact).abs().max() > 0.01


@pytest.mark.parametrize("size", [(2000, 60), (2, 200), (5000, 4000)])
def test_a_picture_of_a_size_that_is_not_read_says_what_to_do(model, size):
    from PIL import Image

    file = io.BytesIO()
    Image.new("L", size).save(file, "PNG")
    with pytest.raises(
        InvalidRequestError, match=f"^the picture is {size[0]} x {size[1]} pixels; cut or scale it to at most 2097152"
    ):
        model.encode(base64.b64encode(file.getvalue()).decode())


@pytest.mark.parametrize("cut", [slice(0), slice(5), slice(8), slice(100), slice(200)])
def test_what_is_no_picture_is_said_to_be_none(model, cut):
    with pytest.raises(InvalidRequestError, match="no picture found; send"):
        model.encode(drawn("batch", 40)[cut])
