"""The ways to compute a convolution (batchmaker.compile.convolution): microseconds for so many rows, one thread.

    python benchmarks/convolutions.py [--rows 1 8 32 128]

The layers of a network like silero-vad's, and the first layers of two networks over images. The least of some calls.
"""

from __future__ import annotations

import argparse
import time
from typing import Final

import torch
from torch import nn

from batchmaker.compile.convolution import Convolution, Window

LAYERS: Final[dict[str, tuple[nn.Conv1d | nn.Conv2d, tuple[int, ...]]]] = {
    "transform of 256 samples": (nn.Conv1d(1, 258, 256, 128, bias=False), (1, 640)),
    "129 to 128 channels, 4 places": (nn.Conv1d(129, 128, 3, padding=1), (129, 4)),
    "128 to 64 channels, 4 to 2 places": (nn.Conv1d(128, 64, 3, 2, 1), (128, 4)),
    "64 to 128 channels, 1 place": (nn.Conv1d(64, 128, 3, padding=1), (64, 1)),
    "a gray image, 32 channels": (nn.Conv2d(1, 32, 3, padding=1), (1, 32, 100)),
    "32 to 64 channels over an image": (nn.Conv2d(32, 64, 3, padding=1), (32, 16, 50)),
}
CALLS: Final = 20


def least_us(way: Convolution, name: str, x: torch.Tensor) -> float:
    """Return the least time of some calls of one way."""
    times = []
    for _ in range(CALLS):
        begin_s = time.perf_counter()
        way.ways[name](x)
        times.append(time.perf_counter() - begin_s)
    return 1e6 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ("plain", "packed", "windows", "dense")
    print("| layer | rows | " + " | ".join(names) + " |\n| --- | ---: |" + " ---: |" * len(names))
    with torch.no_grad():
        for about, (layer, row) in LAYERS.items():
            window = Window(*(tuple(each) for each in (layer.stride, layer.padding, layer.dilation)))
            made = Convolution(layer.weight, layer.bias, window, row)
            for num_rows in options.rows:
                x = torch.randn(num_rows, *row)
                found = [f"{least_us(made, name, x):,.0f}" if name in made.ways else "" for name in names]
                print(f"| {about} | {num_rows} | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
