"""Layers of real networks and the cycles that SCALE-Sim 3.0.0 counts for them on 128 x 128, without memory stalls."""

from __future__ import annotations

from dataclasses import dataclass

from batchmaker_papers.npu.systolic import Gemm


@dataclass(frozen=True, slots=True)
class Product:
    """[m, k] x [k, n]."""

    m: int
    k: int
    n: int

    @property
    def gemm(self) -> Gemm:
        return Gemm(self.m, self.k, self.n)

    @property
    def topology(self) -> tuple[int, ...]:
        """As SCALE-Sim's files of products have it: M, N, K."""
        return (self.m, self.n, self.k)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A square convolution. size: of the input, with its padding, as far as the filter reaches."""

    size: int
    window: int
    channels: int
    filters: int
    stride: int

    @property
    def gemm(self) -> Gemm:
        pixels = ((self.size - self.window) // self.stride + 1) ** 2
        return Gemm(pixels, self.window**2 * self.channels, self.filters)

    @property
    def topology(self) -> tuple[int, ...]:
        """As SCALE-Sim's files of convolutions have it: input, filter, channels, filters, stride."""
        return (self.size, self.size, self.window, self.window, self.channels, self.filters, self.stride)


@dataclass(frozen=True, slots=True)
class Layer:
    """ws, os: what SCALE-Sim reports as total cycles with stationary weights and with stationary outputs."""

    name: str
    shape: Product | Convolution
    ws: int
    os: int


LAYERS = (
    Layer("resnet50.fc", Product(1, 2048, 1000), 49023, 18415),
    Layer("gnmt.lstm_ih", Product(1, 1024, 4096), 98047, 40895),
    Layer("gnmt.lstm_ih_batch16", Product(16, 1024, 4096), 101887, 40895),
    Layer("gnmt.attention_query", Product(64, 1024, 1024), 28543, 10223),
    Layer("transformer.query", Product(1, 512, 512), 6127, 3063),
    Layer("transformer.ffn_in", Product(24, 512, 2048), 25983, 12255),
    Layer("transformer.ffn_out", Product(24, 2048, 512), 25983, 9207),
    Layer("bert.query", Product(128, 768, 768), 18359, 6131),
    Layer("bert.ffn_in", Product(128, 768, 3072), 73439, 24527),
    Layer("bert.ffn_out", Product(128, 3072, 768), 73439, 19955),
    Layer("bert.qk_head", Product(128, 64, 128), 509, 317),
    Layer("bert.av_head", Product(128, 128, 64), 509, 381),
    Layer("las.listener_ih", Product(200, 512, 1024), 18623, 12255),
    Layer("vgg16.fc3", Product(1, 4096, 1000), 98047, 34799),
    Layer("resnet50.layer4.1.conv1", Convolution(7, 1, 2048, 512, 1), 27583, 9207),
    Layer("resnet50.layer4.0.conv3", Convolution(7, 1, 512, 2048, 1), 27583, 12255),
    Layer("resnet50.layer4.1.conv2", Convolution(9, 3, 512, 512, 1), 62063, 19447),
    Layer("resnet50.layer4.0.conv2", Convolution(15, 3, 512, 512, 2), 62063, 19447),
    Layer("resnet50.layer4.0.conv1", Convolution(14, 1, 1024, 512, 1), 18495, 10223),
    Layer("resnet50.layer3.1.conv1", Convolution(14, 1, 1024, 256, 1), 9247, 5111),
    Layer("resnet50.layer3.0.conv3", Convolution(14, 1, 256, 1024, 1), 9247, 8159),
    Layer("resnet50.layer3.0.conv2", Convolution(29, 3, 256, 256, 2), 20807, 10231),
    Layer("resnet50.layer3.0.conv1", Convolution(28, 1, 512, 256, 1), 9327, 10723),
    Layer("resnet50.layer2.1.conv1", Convolution(28, 1, 512, 128, 1), 4663, 5361),
    Layer("resnet50.layer2.0.downsample", Convolution(55, 1, 256, 512, 2), 9327, 14279),
    Layer("resnet50.layer2.0.conv3", Convolution(28, 1, 128, 512, 1), 4663, 10695),
    Layer("resnet50.layer2.0.conv2", Convolution(57, 3, 128, 128, 2), 10493, 9841),
    Layer("resnet50.layer2.0.conv1", Convolution(56, 1, 256, 128, 1), 7035, 12749),
    Layer("resnet50.layer1.1.conv1", Convolution(56, 1, 256, 64, 1), 7035, 12749),
    Layer("resnet50.layer1.0.conv3", Convolution(56, 1, 64, 256, 1), 7035, 15899),
    Layer("resnet50.layer1.0.conv2", Convolution(58, 3, 64, 64, 1), 17589, 20749),
    Layer("resnet50.layer1.0.conv1", Convolution(56, 1, 64, 64, 1), 3517, 7949),
    Layer("resnet50.conv1", Convolution(229, 7, 3, 64, 2), 25851, 39297),
)
