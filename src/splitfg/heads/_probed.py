"""A black-box head: measured, never differentiated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from splitfg.errors import raise_if
from splitfg.heads._base import OpaqueHead
from splitfg.heads._losses import OutputLoss
from splitfg.splitting import call, places_of
from splitfg.types import HeadGradient, Params


class ProbedHead(OpaqueHead):
    """A head that can only be run. u = dL/dh and the head's gradient come from central differences.

    Every coordinate j of a sample's h is probed for all samples b of the batch at once, since each has its own loss
    l_b (summed over its positions, which the head may mix):

        u_bj = (l_b(h_b + ε e_j) - l_b(h_b - ε e_j)) / (2 ε N),

    2 D evaluations for D coordinates a sample. The head's trained parameters, if it has any, are probed one coordinate
    at a time, 2 P_head evaluations. The error is O(ε²), plus rounding O(eps / ε). The default balances the two,
    relative to the size of what is moved: ε = eps^(1/3) (1 + rms), of h and of each parameter.

    Args:
        black_box: ``(params, h) -> outputs``; anything that runs, or an :class:`torch.nn.Module` over h.
        loss: The loss on the outputs; cross-entropy by default.
        params: What the black box can be trained by; a module brings its own.
        step: ε, where a fixed one is wanted.
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
        super().__init__(loss)
        found = [f"step must be positive (or None), got {step}"] if step is not None and not step > 0 else []
        raise_if(found + ([f"together must be at least 1, got {together}"] if together < 1 else []))
        self.step, self.together = step, together
        self._run: Callable[[Params, Tensor], Tensor]
        if isinstance(black_box, nn.Module):
            self.module, self._places = black_box, places_of(black_box)
            self._run = self._run_module
        else:
            self._run = black_box
            for name, value in (params or {}).items():
                self.register_parameter(name, nn.Parameter(value.detach().clone()))

    @property
    def reverse_mode(self) -> bool:
        """Never: it is only measured."""
        return False

    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """What the black box gives."""
        return self._run(params, h.clone())  # it may work in place

    def _run_module(self, params: Params, h: Tensor) -> Tensor:
        own = {name.removeprefix("module."): p for name, p in params.items()}
        outputs: Tensor = call(self.module, own, (h,), places=self._places)
        return outputs

    def _exact(self, h: Tensor, target: Tensor, normaliser: Tensor) -> HeadGradient:
        params, (loss, u) = self.params(), self._loss_and_u(h, target, normaliser)
        trained = [name for name, p in self.named_parameters() if p.requires_grad]
        return HeadGradient(loss, u, {name: self._probe_param(params, name, h, target, normaliser) for name in trained})

    def _loss_and_u(self, h: Tensor, target: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        params = self.params()
        u = self._probe_h(params, h, target) / normaliser.to(h.dtype)
        return self.loss(params, h, target, normaliser), u

    def _step_for(self, moved: Tensor) -> Tensor:
        """ε for what is moved, a scalar tensor."""
        if self.step is not None:
            return moved.new_full((), self.step)
        relative = float(torch.finfo(moved.dtype).eps ** (1 / 3))
        return relative * (1 + moved.square().mean().sqrt())

    def _probe_h(self, params: Params, h: Tensor, target: Tensor) -> Tensor:
        coordinates, step = torch.arange(h[0].numel(), device=h.device), self._step_for(h)
        probed = [self._probe_coordinates(params, h, target, c, step) for c in coordinates.split(self.together)]
        return torch.cat(probed).T.reshape(h.shape)

    def _probe_coordinates(self, params: Params, h: Tensor, target: Tensor, which: Tensor, step: Tensor) -> Tensor:
        """dl_b/dh_bj for the given coordinates j of a sample, shape ``(len(which), B)``."""
        nudge = step * torch.nn.functional.one_hot(which, h[0].numel()).to(h.dtype)
        nudge = nudge.view(len(which), 1, *h.shape[1:])
        up, down = (self._sample_losses(params, h + sign * nudge, target) for sign in (1, -1))
        return (up - down) / (2 * step)

    def _sample_losses(self, params: Params, variants: Tensor, target: Tensor) -> Tensor:
        """l_b for several variants ``(c, B, ...)`` of h, put to the head as one batch; shape ``(c, B)``."""
        count, batch = variants.shape[:2]
        outputs = self.outputs(params, variants.flatten(0, 1))
        width = outputs.shape[-1]
        rows = self.output_loss.fold(target, width)
        repeated = rows.repeat(count, *([1] * (rows.ndim - 1)))
        losses = self.output_loss.rowwise(outputs.reshape(-1, width), repeated)
        return losses.view(count, batch, -1).sum(dim=2)

    def _probe_param(self, params: Params, name: str, h: Tensor, target: Tensor, normaliser: Tensor) -> Tensor:
        step = self._step_for(params[name])

        def loss_at(index: int, nudge: Tensor) -> Tensor:
            moved = params[name].clone(memory_format=torch.contiguous_format)
            moved.view(-1)[index] += nudge
            return self.loss({**params, name: moved}, h, target, normaliser)

        slopes = [(loss_at(i, step) - loss_at(i, -step)) / (2 * step) for i in range(params[name].numel())]
        return torch.stack(slopes).view(params[name].shape)
