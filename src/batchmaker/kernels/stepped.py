"""Recurrent layers step by step with PyTorch's operations, on any device: for what no persistent kernel holds."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from batchmaker.kernels.layer import LayerWeights, RecurrentLayer
from batchmaker.kernels.rows import CallRows


@final
class SteppedLayers:
    """Makes layers that compute one product per step (two for "gru-before"), in the kernels' arithmetic."""

    def layer(self, weights: LayerWeights) -> SteppedLayer:
        return SteppedLayer(weights)


@final
class SteppedLayer(RecurrentLayer):
    """See RecurrentLayer. h is rounded to its type in every step, gates and c are float32."""

    def __init__(self, weights: LayerWeights) -> None:
        super().__init__(weights)
        self._transposed = weights.w_hh.detach().t().contiguous()

    @torch.no_grad()
    def run_rows(self, rows: CallRows, px: Tensor, h_state: Tensor, c_state: Tensor | None, y: Tensor | None) -> None:
        px_offset, slots, y_rows = (
            torch.from_numpy(each).long().to(px.device) for each in (rows.px_offset, rows.slot, rows.y_offset)
        )
        h = h_state.index_select(0, slots)
        c = None if c_state is None else c_state.index_select(0, slots)
        for t in range(rows.longest):
            active = int((rows.length > t).sum())
            at = int(rows.step_offset[t])
            x = px.index_select(0, px_offset[:active] + at).float()
            h[:active] = self._step(x, h[:active], None if c is None else c[:active])
            if y is not None:
                y.index_copy_(0, y_rows[:active] + at, h[:active])
        h_state.index_copy_(0, slots, h)
        if c_state is not None and c is not None:
            c_state.index_copy_(0, slots, c)

    def _step(self, x: Tensor, h: Tensor, c: Tensor | None) -> Tensor:
        """Return the new h; c is changed in place. x: [batch, gates * hidden], float32."""
        hidden = h.shape[1]
        if c is not None:
            i, f, g, o = (x + (h @ self._transposed).float()).chunk(4, 1)
            c.mul_(f.sigmoid()).addcmul_(i.sigmoid(), g.tanh())
            return (o.sigmoid() * c.tanh()).to(h.dtype)
        products = h @ (self._transposed if self._weights.cell == "gru" else self._transposed[:, : 2 * hidden])
        r, z = (x[:, : 2 * hidden] + products[:, : 2 * hidden].float()).sigmoid().chunk(2, 1)
        if self._weights.cell == "gru":
            last = products[:, 2 * hidden :].float()
            last = r * (last if self._weights.bias_n is None else last + self._weights.bias_n)
        else:
            last = ((r * h.float()).to(h.dtype) @ self._transposed[:, 2 * hidden :]).float()
        n = (x[:, 2 * hidden :] + last).tanh()
        return (n + z * (h.float() - n)).to(h.dtype)
