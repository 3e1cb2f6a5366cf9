"""tanh, sigmoid and erf for compiled loops keep their bound of the error, at every size of argument."""

from __future__ import annotations

import math

import numpy as np
import pytest

from batchmaker.kernels.pointwise import ERF_ERROR, TANH_ERROR, erf, sigmoid, tanh

ARGUMENTS = np.concatenate((np.linspace(-20, 20, 4001), np.geomspace(1e-30, 1e30, 601))).astype(np.float32)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_error_stays_below_its_bound(sign: int) -> None:
    for x in np.float32(sign) * ARGUMENTS:
        exact = np.tanh(np.float64(x))
        assert abs(tanh(x) - exact) <= TANH_ERROR
        assert abs(sigmoid(x) - (np.tanh(np.float64(x) / 2) + 1) / 2) <= TANH_ERROR / 2
        assert abs(erf(x) - math.erf(x)) <= ERF_ERROR * min(1.0, 2 * abs(math.erf(x)))


def test_infinities_have_limits_and_what_is_no_number_stays_so() -> None:
    assert tanh(np.float32("inf")) == pytest.approx(1, abs=TANH_ERROR)
    assert tanh(np.float32("-inf")) == pytest.approx(-1, abs=TANH_ERROR)
    assert np.isnan(tanh(np.float32("nan")))
    assert np.isnan(sigmoid(np.float32("nan")))
    assert [erf(np.float32(x)) for x in ("inf", "-inf", 4.1, -1e30)] == [1, -1, 1, -1]
    assert np.isnan(erf(np.float32("nan")))
