"""The lagged inverse-RMS optimizer, which the paper's theorem covers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from splitfg.numerics import wide
from splitfg.training._closure import evaluated


class LaggedRMSOptimizer(torch.optim.Optimizer):
    """θ ← θ - η A_t ĝ_t with A_t fixed before ĝ_t is drawn.

        a_{t,i} = clamp(1 / (sqrt(m_{t-1,i} / (1 - βᵗ⁻¹)) + eps), a_min, a_max),
        m_t = β m_{t-1} + (1 - β) ĝ_t².

    The preconditioner is predictable and bounded, as Assumption 2 requires; at the first step a = a_min. A group's rho
    scales its entries of A_t by a constant, which the theorem allows.

    Args:
        params: Parameters or groups.
        lr: Learning rate η.
        beta: Decay rate β of the second moment.
        eps: Added to the root.
        a_min: Lower bound of the preconditioner.
        a_max: Upper bound of the preconditioner.

    Raises:
        ValueError: Unless 0 < a_min <= a_max.

    Example:
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.training import LaggedRMSOptimizer
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> optimizer = LaggedRMSOptimizer(splitfg.parameter_groups(network, lr=1e-3, rho=0.1))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        beta: float = 0.999,
        eps: float = 1e-8,
        a_min: float = 1e-2,
        a_max: float = 1e4,
    ) -> None:
        if not 0 < a_min <= a_max:
            raise ValueError(f"need 0 < a_min <= a_max, got a_min={a_min}, a_max={a_max}")
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps, "a_min": a_min, "a_max": a_max})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step from ``.grad``."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a ``state_dict()``."""
        super().load_state_dict(state_dict)
        # torch casts the state to the parameters' dtype, which would round the running means
        params = [p for group in self.param_groups for p in group["params"]]
        for i, saved in state_dict["state"].items():
            mean = saved["mean_square"]
            self.state[params[i]]["mean_square"] = mean.to(params[i].device, copy=True)

    def preconditioner(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Return a_t for one parameter, from the gradients before this step."""
        state = self.state[p]
        if not state:
            return torch.full_like(p, group["a_min"])
        corrected = state["mean_square"] / (1 - group["beta"] ** state["step"])
        inverse: Tensor = (corrected.sqrt() + group["eps"]).reciprocal()
        return inverse.clamp(group["a_min"], group["a_max"])

    def _update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if state:
            state["step"] = state["step"].to(p.device)  # checkpoints are loaded to the CPU
        p.sub_(group["lr"] * self.preconditioner(p, group) * g)
        if not state:
            # in a wide dtype, since (1 - beta) times a square would be rounded away in a narrow one
            state["mean_square"] = torch.zeros_like(p, dtype=wide(p.dtype))
            # on the device, so that a captured step advances it too
            state["step"] = torch.zeros((), dtype=wide(p.dtype), device=p.device)
        state["mean_square"].lerp_(g.to(state["mean_square"].dtype).square(), 1 - group["beta"])
        state["step"] += 1
