"""NumPy arrays by their dtype, for annotations. Shapes are said where they are used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Float32s = NDArray[np.float32]
Floats = NDArray[np.float64]
