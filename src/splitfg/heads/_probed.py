"""Black-box heads, measured by finite differences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from splitfg.calling import Observed, call, places_of
from splitfg.errors import raise_if
from splitfg.heads._base import OpaqueHead
from splitfg.heads._output_loss import OutputLoss
from splitfg.types import HeadGradient, Params


class ProbedHead(OpaqueHead):
    """A head that can only be run forward: u = dL/dh and the head's gradient come from central differences.

    A call probes one coordinate j of h for all samples b of the batch, since each sample has its own loss l_b (summed
    over its positions, which the head may mix):

        u_bj = (l_b(h_b + ε e_j) - l_b(h_b - ε e_j)) / (2 ε N),

    which takes 2 D evaluations for D coordinates per sample. Trained parameters of the head take 2 P_head evaluations
    more, one coordinate at a time. The result is biased by the truncation error O(ε²), plus rounding O(eps / ε). The
    default ε = eps^(1/3) (1 + rms) balances the two; rms is that of h, or of each parameter.

    Args:
        black_box: Function ``(params, h) -> outputs``, or a :class:`torch.nn.Module` that maps h to outputs.
        loss: Loss on the outputs; cross-entropy by default.
        params: Trained parameters of a function, by name; a module brings its own.
        step: A fixed ε.
        together: Number of probes of h in one call, stacked along the first dimension.

    Raises:
        SplitError: If ``step`` or ``together`` is not positive.

    Example:
        >>> import torch
        >>> import splitfg
        >>> head = splitfg.ProbedHead(lambda params, h: h @ params["w"], params={"w": torch.randn(8, 3)})
        >>> gradient = head(torch.randn(16, 8), torch.randint(0, 3, (16,)))
        >>> gradient.u.shape, gradient.grads["w"].shape
        (torch.Size([16, 8]), torch.Size([8, 3]))
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
            self.module, self._places, self.observed = black_box, places_of(black_box), Observed()
            self._run = self._run_module
        else:
            self._run = black_box
            for name, value in (params or {}).items():
                self.register_parameter(name, nn.Parameter(value.detach().clone()))

    @property
    def reverse_mode(self) -> bool:
        """``False``: the head is measured, never differentiated."""
        return False

    @property
    def biased(self) -> bool:
        """``True``: finite differences have a truncation error."""
        return True

    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """Run the black box."""
        return self._run(params, h.clone())  # the black box may write to its input

    def _run_module(self, params: Params, h: Tensor) -> Tensor:
        own = {name.removeprefix("module."): p for name, p in params.items()}
        outputs: Tensor = call(self.module, own, (h,), places=self._places, observed=self.observed)
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
        """Return ε for the tensor to perturb, as a scalar tensor."""
        if self.step is not None:
            return moved.new_full((), self.step)
        relative = float(torch.finfo(moved.dtype).eps ** (1 / 3))
        return relative * (1 + moved.square().mean().sqrt())

    def _probe_h(self, params: Params, h: Tensor, target: Tensor) -> Tensor:
        coordinates, step = torch.arange(h[0].numel(), device=h.device), self._step_for(h)
        probed = [self._probe_coordinates(params, h, target, c, step) for c in coordinates.split(self.together)]
        return torch.cat(probed).T.reshape(h.shape)

    def _probe_coordinates(self, params: Params, h: Tensor, target: Tensor, which: Tensor, step: Tensor) -> Tensor:
        """Estimate dl_b/dh_bj for the given coordinates j, shape ``(len(which), B)``."""
        nudge = step * torch.nn.functional.one_hot(which, h[0].numel()).to(h.dtype)
        nudge = nudge.view(len(which), 1, *h.shape[1:])
        up, down = (self._sample_losses(params, h + sign * nudge, target) for sign in (1, -1))
        return (up - down) / (2 * step)

    def _sample_losses(self, params: Params, variants: Tensor, target: Tensor) -> Tensor:
        """Compute l_b for several variants ``(c, B, ...)`` of h in one call, shape ``(c, B)``."""
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
        return torch.stack(slopes).to(params[name].dtype).view(params[name].shape)
