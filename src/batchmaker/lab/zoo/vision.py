"""Image networks, cut into their layers: ResNet, VGG and MobileNet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, final

import numpy as np
from torch import Tensor, nn

from batchmaker.lab.zoo.parts import check_positive, frozen, seeded
from batchmaker.model.layers import CutAt, Layered

IMAGE: Final = 224
"""Height and width of an image in the papers."""
CLASSES: Final = 1000
MAX_BATCH: Final = 16
"""Convolutions of such images use the machine fully long before 64 of them."""


@final
class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: x -> relu(c(b(a(x))) + shortcut(x)) (He et al. 2016, fig. 5).

    The stride is that of the 3x3 convolution, as in most implementations since.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.a = _convolution(inputs, width, 1)
        self.b = _convolution(width, width, 3, stride)
        self.c = nn.Sequential(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.c(self.b(self.a(x))) + self.shortcut(x)
        return total.relu()


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the image's size (except for the stride), batch norm and ReLU."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def resnet(width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = CLASSES) -> nn.Sequential:
    """Return a ResNet of bottlenecks, images [n, 3, height, width] -> scores [n, classes] (He et al. 2016, table 1)."""
    parts: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            parts.append(Bottleneck(inputs, width << stage, 2 if stage and block == 0 else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


_VGG16: Final = (2, 2, 3, 3, 3)


def vgg(width: int = 64, image: int = IMAGE, dense: int = 4096, classes: int = CLASSES) -> nn.Sequential:
    """Return VGG-16, images [n, 3, image, image] -> scores [n, classes] (Simonyan and Zisserman 2015, table 1, D)."""
    parts: dict[str, nn.Module] = {}
    inputs = 3
    for stage, count in enumerate(_VGG16, start=1):
        outputs = width << min(stage - 1, 3)
        for number in range(1, count + 1):
            parts[f"conv{stage}_{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
            parts[f"relu{stage}_{number}"] = nn.ReLU()
            inputs = outputs
        parts[f"pool{stage}"] = nn.MaxPool2d(2)
    side = image >> len(_VGG16)
    parts |= {"flat": nn.Flatten(), "dense1": nn.Linear(inputs * side * side, dense), "dense1_relu": nn.ReLU()}
    parts |= {"dense2": nn.Linear(dense, dense), "dense2_relu": nn.ReLU(), "dense3": nn.Linear(dense, classes)}
    return nn.Sequential(OrderedDict(parts))


_MOBILENET: Final = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1), (512, 1), (512, 1), (512, 1), (512, 1),
    (1024, 2), (1024, 1),
)  # fmt: skip
"""Outputs of each pointwise convolution and stride of the depthwise one before it."""


def mobilenet(multiplier: float = 1.0, classes: int = CLASSES) -> nn.Sequential:
    """Return MobileNet v1, images [n, 3, height, width] -> scores [n, classes] (Howard et al. 2017, table 1).

    multiplier: of the channels of every layer, the paper's alpha.
    """
    inputs = max(1, round(32 * multiplier))
    parts: dict[str, nn.Module] = {"first": _convolution(3, inputs, 3, 2)}
    for number, (wanted, stride) in enumerate(_MOBILENET, start=1):
        outputs = max(1, round(wanted * multiplier))
        parts[f"depthwise{number}"] = _convolution(inputs, inputs, 3, stride, groups=inputs)
        parts[f"pointwise{number}"] = _convolution(inputs, outputs, 1)
        inputs = outputs
    parts |= {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "dense": nn.Linear(inputs, classes)}
    return nn.Sequential(OrderedDict(parts))


class VisionModel(Layered):
    """Images to scores. A request is an image [3, image, image] of floats; the result is scores [classes].

    image: height and width of an image. cut: see batchmaker.layers. dtype: float32, bfloat16 or float16. max_batch:
    most rows of one cell call. seed: of the random weights.
    """

    def __init__(self, network: nn.Module, image: int, cut: CutAt, dtype: str, max_batch: int) -> None:
        example = np.zeros((3, image, image), np.float32)
        super().__init__(frozen(network, dtype), example, cut=cut, max_batch=max_batch)
        self.image = image


@final
class ResNet50Model(VisionModel):
    """ResNet-50: 53 convolutions and a dense layer, 54 cells.

    width: channels of the first convolution; blocks: bottlenecks in each of the stages. Others as for VisionModel.
    """

    def __init__(
        self,
        width: int = 64,
        blocks: Sequence[int] = (3, 4, 6, 3),
        image: int = IMAGE,
        classes: int = CLASSES,
        dtype: str = "float32",
        cut: CutAt = "layers",
        max_batch: int = MAX_BATCH,
        seed: int = 0,
    ) -> None:
        check_positive(width=width, image=image, classes=classes, blocks=min(blocks, default=0))
        with seeded(seed):
            network = resnet(width, blocks, classes)
        super().__init__(network, image, cut, dtype, max_batch)


@final
class Vgg16Model(VisionModel):
    """VGG-16: 13 convolutions and 3 dense layers, 16 cells.

    width: channels of the first convolution; dense: of the hidden dense layers; image: a multiple of 32. Others as for
    VisionModel.
    """

    def __init__(
        self,
        width: int = 64,
        dense: int = 4096,
        image: int = IMAGE,
        classes: int = CLASSES,
        dtype: str = "float32",
        cut: CutAt = "layers",
        max_batch: int = MAX_BATCH,
        seed: int = 0,
    ) -> None:
        check_positive(width=width, dense=dense, image=image // 32, classes=classes)
        with seeded(seed):
            network = vgg(width, image, dense, classes)
        super().__init__(network, image, cut, dtype, max_batch)


@final
class MobileNetModel(VisionModel):
    """MobileNet v1: a convolution, 13 pairs of depthwise and pointwise ones and a dense layer, 28 cells.

    multiplier: of all channels. Others as for VisionModel.
    """

    def __init__(
        self,
        multiplier: float = 1.0,
        image: int = IMAGE,
        classes: int = CLASSES,
        dtype: str = "float32",
        cut: CutAt = "layers",
        max_batch: int = MAX_BATCH,
        seed: int = 0,
    ) -> None:
        check_positive(image=image, classes=classes)
        with seeded(seed):
            network = mobilenet(multiplier, classes)
        super().__init__(network, image, cut, dtype, max_batch)
