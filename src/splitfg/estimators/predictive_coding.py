"""Predictive coding: latents settle between the prediction of the layer below and the gradient of the head.

Whittington and Bogacz (2017), Millidge et al. (2022). In the limits of stiff latents, or of small settling
steps, its weight update is backpropagation's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.models import MLP
from splitfg.splitting import Split, original
from splitfg.splitting.checks import check_batch, check_h, check_loss
from splitfg.types import Estimate, Inputs, Params, Stats, Target


@dataclass(frozen=True)
class PredictiveCoding:
    """The gradient of a ReLU MLP by local error settling: an estimator without JVPs and reverse mode.

    Every layer l = 1..m of the trunk has latents z_l beside its prediction μ_l = W_l f(z_{l-1}) + b_l, with
    f = ReLU, f(z_0) = x and errors e_l = z_l - μ_l. For N rows the energy is

        E = L(head(f(z_m)), y) + κ/(2N) Σ_l ‖e_l‖².

    Latents start at their predictions and descend E with rate γ, each reading only its neighbours:

        z_m ← z_m - γ (e_m + (N/κ) f'(z_m) ∘ u),    z_l ← z_l - γ (e_l - f'(z_l) ∘ (e_{l+1} W_{l+1})),

    with u = dL/dh from the head in closed form. Then weights follow the local, Hebbian
    dE/dW_l = -(κ/N) e_lᵀ f(z_{l-1}), and the head its exact gradient at the settled f(z_m).

    Biased, except in the limits: as κ → ∞ with settled latents, κ e_l / N tends to minus backpropagation's
    δ_l; as γ → 0 with at least m steps, every layer's gradient tends to a positive multiple of it.

    The settling is stable for γ below 2/λ, where λ ≤ (1 + max_l ‖W_l‖)² is the largest curvature of the errors' part
    of E and l runs over the layers above the first. Training makes ‖W_l‖ grow, most in wide layers; a fixed γ then
    diverges within a few steps, and the weights follow the diverging errors. With ``power_iterations`` the rate is
    min(γ, 1 / (1 + max_l ‖W_l‖)²), with ‖W_l‖ measured on the weights.

    Args:
        settle_steps: Settling steps per batch; at least the number of layers, or the first ones get nothing.
        settle_rate: γ.
        stiffness: κ, the latents' precision relative to the output's.
        power_iterations: Iterations that measure ‖W_l‖ to keep the settling stable; 0 leaves γ as it is. Five
            suffice for norms that have grown.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from splitfg import PredictiveCoding
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = PredictiveCoding(settle_steps=8)(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> sorted(estimate.grads) == sorted(split.trained_params())
        True
    """

    settle_steps: int = 4
    settle_rate: float = 0.1
    stiffness: float = 10.0
    power_iterations: int = 0

    def __post_init__(self) -> None:
        found = [] if self.settle_steps >= 1 else [f"settle_steps must be at least 1, got {self.settle_steps}"]
        if self.power_iterations < 0:
            found.append(f"power_iterations must be at least 0, got {self.power_iterations}")
        for name in ("settle_rate", "stiffness"):
            if not getattr(self, name) > 0:
                found.append(f"{name} must be positive, got {getattr(self, name)}")
        raise_if(found)

    @torch.no_grad()
    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None) -> Estimate:
        """Compute the energy's gradient at settled latents; the loss is that of the forward pass. Draws nothing."""
        check_batch(split, x, y, generator)
        layers = self._layers(split)
        assert isinstance(x, Tensor)
        start = _forward(layers, x)
        check_h(split, torch.relu(start[-1]), y)
        exact = split.head(torch.relu(start[-1]), y)
        check_loss(exact.loss)
        loss, rate = exact.loss, self._rate(layers)
        moved = [torch.zeros_like(z) for z in start]
        for _ in range(self.settle_steps):
            moved = self._settled(layers, start, moved, exact.u, rate)
            exact = split.head(torch.relu(start[-1] + moved[-1]), y)
        grads = self._trunk_gradients(split, layers, x, start, moved) | split.named_head_grads(exact.grads)
        return Estimate(loss, grads, Stats(biased=True, norms={"u": exact.u.norm()}))

    def _rate(self, layers: list[nn.Linear]) -> Tensor | float:
        """Return γ, or 1 / (1 + max ‖W_l‖)² if that is smaller and ``power_iterations`` is positive."""
        if not self.power_iterations or len(layers) == 1:
            return self.settle_rate
        norms = [_spectral_norm(layer.weight, self.power_iterations) for layer in layers[1:]]
        return (1 + torch.stack(norms).max()).pow(-2).clamp_max(self.settle_rate)

    def _settled(
        self, layers: list[nn.Linear], start: list[Tensor], moved: list[Tensor], u: Tensor, rate: Tensor | float
    ) -> list[Tensor]:
        """Return all displacements after one step down the energy, taken at once."""
        errors = _errors(layers, start, moved)
        wanted = [e @ layer.weight for e, layer in zip(errors[1:], layers[1:], strict=True)]
        wanted.append(-u * (u.shape[0] / self.stiffness))
        slopes = [e - (z + d > 0) * w for z, d, e, w in zip(start, moved, errors, wanted, strict=True)]
        return [d - rate * slope for d, slope in zip(moved, slopes, strict=True)]

    def _trunk_gradients(
        self, split: Split, layers: list[nn.Linear], x: Tensor, start: list[Tensor], moved: list[Tensor]
    ) -> Params:
        """Return dE/dW_l and dE/db_l under the model's names, without frozen parameters."""
        names: dict[Tensor, str] = {p: name for name, p in split.model.named_parameters()}
        trained, grads = split.trunk_params(), {}
        inputs = [x, *(torch.relu(z + d) for z, d in zip(start[:-1], moved[:-1], strict=True))]
        for layer, e, v in zip(layers, _errors(layers, start, moved), inputs, strict=True):
            dz = e * (-self.stiffness / x.shape[0])
            grads[names[layer.weight]], grads[names[layer.bias]] = dz.T @ v, dz.sum(dim=0)
        return {name: g for name, g in grads.items() if name in trained}

    def _layers(self, split: Split) -> list[nn.Linear]:
        """Return the trunk's linear layers.

        Raises:
            SplitError: If the trunk is no :class:`~splitfg.models.MLP`, or too few steps reach its first layer.
        """
        if not isinstance(split.trunk, MLP):
            kind = type(original(split.trunk)).__name__
            raise SplitError([f"predictive coding settles an MLP, got {kind}: use splitfg.models.MLP"])
        layers = [layer for layer in split.trunk.layers if isinstance(layer, nn.Linear)]
        if self.settle_steps < len(layers):
            raise SplitError(
                [
                    f"{self.settle_steps} settling steps cannot carry an error through {len(layers)} layers:"
                    f" set settle_steps to at least {len(layers)}"
                ]
            )
        return layers


def _forward(layers: list[nn.Linear], x: Tensor) -> list[Tensor]:
    """Return the latents of a plain forward pass, where all errors are zero."""
    z = []
    for layer in layers:
        z.append(layer(x))
        x = torch.relu(z[-1])
    return z


def _errors(layers: list[nn.Linear], start: list[Tensor], moved: list[Tensor]) -> list[Tensor]:
    """Compute e_l = d_l - W_l (f(z_{l-1} + d_{l-1}) - f(z_{l-1})) for latents moved by d from the forward pass.

    Equal to (z_l + d_l) - μ_l without the difference of two nearly equal products, whose rounding in TF32 can be as
    large as the error.
    """
    errors = moved[:1]
    for layer, z, below, d in zip(layers[1:], start, moved, moved[1:], strict=False):
        errors.append(d - (torch.relu(z + below) - torch.relu(z)) @ layer.weight.T)
    return errors


def _spectral_norm(weight: Tensor, iterations: int) -> Tensor:
    """Estimate ‖W‖ from below by power iteration, from the row with the largest norm."""
    # index_select, because indexing by a tensor would copy it to the CPU, which a captured step must not
    v = weight.index_select(0, weight.norm(dim=1).argmax().reshape(1)).squeeze(0)
    tiny = torch.finfo(weight.dtype).tiny
    for _ in range(iterations):
        w = weight @ (v / v.norm().clamp_min(tiny))
        v = weight.T @ (w / w.norm().clamp_min(tiny))
    found: Tensor = v.norm()
    return found
