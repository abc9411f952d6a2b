"""A black-box head: measured, never differentiated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from splitfg.heads._base import Head
from splitfg.heads._losses import CrossEntropy, OutputLoss
from splitfg.types import HeadGradient, Params


class ProbedHead(Head):
    """A head that can only be run. u = dL/dh and the head's gradient come from central differences.

    Every coordinate j of h is probed for all rows at once, since each row has its own loss:

        u_nj = (l_n(h_n + ε e_j) - l_n(h_n - ε e_j)) / (2 ε N),

    2 d evaluations for h of width d. The head's parameters, if it has any, are probed one coordinate at a
    time, 2 P_head evaluations. The error is O(ε²), plus rounding O(eps / ε); the default ε balances the two.

    Args:
        black_box: ``(params, h) -> outputs``; anything that runs, or an :class:`torch.nn.Module` over h.
        loss: The loss on the outputs; cross-entropy by default.
        params: What the black box can be trained by; a module brings its own.
        step: ε; by default the cube root of the precision of h's dtype.
        together: How many probes of h are put into one call, stacked along the first dimension.
    """

    def __init__(
        self,
        black_box: Callable[[Params, Tensor], Tensor] | nn.Module,
        loss: OutputLoss | None = None,
        *,
        params: Params | None = None,
        step: float | None = None,
        together: int = 32,
    ) -> None:
        super().__init__(loss if loss is not None else CrossEntropy())
        self.step, self.together = step, together
        self._run: Callable[[Params, Tensor], Tensor]
        if isinstance(black_box, nn.Module):
            self.module = black_box
            self._run = self._run_module
        else:
            self._run = black_box
            for name, value in (params or {}).items():
                self.register_parameter(name, nn.Parameter(value.detach().clone()))

    @property
    def in_features(self) -> None:
        """Known only by running the black box."""
        return

    @property
    def out_features(self) -> None:
        """Known only by running the black box."""
        return

    @property
    def reverse_mode(self) -> bool:
        """Never: it is only measured."""
        return False

    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """What the black box gives."""
        return self._run(params, h)

    def _run_module(self, params: Params, h: Tensor) -> Tensor:
        own = {name.removeprefix("module."): p for name, p in params.items()}
        outputs: Tensor = torch.func.functional_call(self.module, own, (h,))
        return outputs

    def _exact(self, h: Tensor, target: Tensor, normaliser: Tensor) -> HeadGradient:
        step = self.step or torch.finfo(h.dtype).eps ** (1 / 3)
        params = self.params()
        loss = self.loss(params, h, target, normaliser)
        return HeadGradient(
            loss,
            self._probe_h(params, h, target, step) / normaliser.to(h.dtype),
            {name: self._probe_param(params, name, h, target, normaliser, step) for name in params},
        )

    def _probe_h(self, params: Params, h: Tensor, target: Tensor, step: float) -> Tensor:
        columns = torch.arange(h.shape[-1], device=h.device)
        probed = [self._probe_columns(params, h, target, c, step) for c in columns.split(self.together)]
        return torch.cat(probed).movedim(0, -1)

    def _probe_columns(self, params: Params, h: Tensor, target: Tensor, columns: Tensor, step: float) -> Tensor:
        """dl_n/dh_nj for the given columns j, shape ``(len(columns), *h.shape[:-1])``."""
        nudge = step * torch.nn.functional.one_hot(columns, h.shape[-1]).to(h.dtype)
        nudge = nudge.view(len(columns), *([1] * (h.ndim - 1)), h.shape[-1])
        up, down = (self._rowwise(params, h + sign * nudge, target) for sign in (1, -1))
        return (up - down).view(len(columns), *h.shape[:-1]) / (2 * step)

    def _rowwise(self, params: Params, stacked: Tensor, target: Tensor) -> Tensor:
        """Losses for several variants of h, the variants stacked along the batch."""
        outputs = self.outputs(params, stacked.flatten(0, 1))
        width = outputs.shape[-1]
        rows = self.output_loss.fold(target, width)
        repeated = rows.repeat(stacked.shape[0], *([1] * (rows.ndim - 1)))
        return self.output_loss.rowwise(outputs.reshape(-1, width), repeated)

    def _probe_param(
        self, params: Params, name: str, h: Tensor, target: Tensor, normaliser: Tensor, step: float
    ) -> Tensor:
        def loss_at(index: int, nudge: float) -> Tensor:
            moved = params[name].clone()
            moved.view(-1)[index] += nudge
            return self.loss({**params, name: moved}, h, target, normaliser)

        slopes = [(loss_at(i, step) - loss_at(i, -step)) / (2 * step) for i in range(params[name].numel())]
        return torch.stack(slopes).view_as(params[name])
