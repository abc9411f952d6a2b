"""What the theory says about a user's own model, measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

import splitfg.theory as theory  # `from splitfg` would import the whole API, this module included
from splitfg.engines import CentralDifference, ForwardMode
from splitfg.errors import raise_if
from splitfg.estimators import Backprop, FrozenTrunk, SplitFG
from splitfg.splitting import BlackBoxTrunk, Split, Tied, require_split
from splitfg.tangents import Layout
from splitfg.types import Engine, Estimate, Inputs, Params, Target

_MIB = 2**20
_EPS = 1e-8  # torch's default for Adam
_WORTH_A_WORD = 0.05


@dataclass(frozen=True)
class Diagnosis:
    """How noisy Split-FG is on one model and batch, and what that means.

    Attributes:
        trunk_parameters: P_trunk, what tangents are drawn for.
        head_parameters: P_head, trained exactly.
        energy_ratio: ‖g_trunk‖² / ‖g‖².
        predicted_variance: E‖ĝ - g‖² at this K by the theory.
        measured_variance: The same, measured over ``draws`` estimates.
        snr: Signal to noise at this K, by parameter: ‖g_p‖² / E‖ĝ_p - g_p‖².
        probes_per_parameter: steps · K / P_trunk for the budget, if one was given.
        saved_bytes: What backprop would keep of the trunk for this batch; ``None`` where it cannot run.
        joint_norm: Norm of an estimate at this K, trunk and head together: what joint clipping divides by.
        head_lost: Share of the head's entries that joint clipping at 1 takes from above Adam's eps of 1e-8 to below.
        exact: Whether g itself was computed by reverse mode; if not, energies are estimated from scores.
        size: A transformer to weigh the activations of, if one was given.
    """

    K: int
    draws: int
    trunk_parameters: int
    head_parameters: int
    energy_ratio: float
    predicted_variance: float
    measured_variance: float | None
    snr: dict[str, float]
    probes_per_parameter: float | None
    saved_bytes: int | None
    joint_norm: float
    head_lost: float
    exact: bool
    size: theory.TransformerSize | None = None

    @property
    def parameter_ratio(self) -> float:
        """P_trunk / P_total."""
        return self.trunk_parameters / (self.trunk_parameters + self.head_parameters)

    def __str__(self) -> str:
        return "\n".join([*self._numbers(), "", *self.advice()])

    def advice(self) -> list[str]:
        """In plain words, what the numbers mean for K and rho."""
        gain = 1 / self.energy_ratio if self.energy_ratio > 0 else float("inf")
        words = [
            f"The exact head lowers each trunk coordinate's variance {gain:.2f} times against pure forward gradient"
            f" ({'little to gain here: the gradient lives in the trunk' if gain < 1.2 else 'worth having'})."
        ]
        noise = self.trunk_parameters / self.K
        words.append(
            f"One estimate at K={self.K} is about {noise:,.0f} times more noise than signal in the trunk: doubling K"
            " halves that, at the price of the time of K more tangents."
        )
        probes = self.probes_per_parameter
        if probes is None:
            words.append("Give the number of training steps to see how far the budget determines the trunk.")
        elif probes < 1:
            words.append(
                f"The budget gives {probes:.2g} probes per trunk parameter: the trunk is under-determined, and an"
                " adaptive optimizer at full step may random-walk it. Compare rho = 1, 0.3, 0.1 and 0.03 with"
                " each other and with FrozenTrunk()."
            )
        else:
            words.append(
                f"The budget gives {probes:.2g} probes per trunk parameter: rho = 1 may work; compare it with"
                " rho = 0.3 and with FrozenTrunk()."
            )
        if self.head_lost > _WORTH_A_WORD:
            words.append(
                f"Clipping trunk and head jointly at 1 divides the head's exact gradient by {self.joint_norm:,.0f},"
                f" most of it the trunk's noise: {self.head_lost:.0%} of its entries fall below Adam's eps of 1e-8, so"
                " that the noise sets their steps. Compare with clip_apart=True, and with another eps."
            )
        return words

    def _numbers(self) -> list[str]:
        measured = "not measured" if self.measured_variance is None else f"{self.measured_variance:.4g} measured"
        how = "exact gradient" if self.exact else "from scores alone"
        lines = [
            f"parameters        trunk {self.trunk_parameters:,}, head {self.head_parameters:,}"
            f" (ratio {self.parameter_ratio:.4f})",
            f"gradient energy   {self.energy_ratio:.4f} of it in the trunk ({how})",
            f"total variance    {self.predicted_variance:.4g} predicted, {measured} (K={self.K}, {self.draws} draws)",
        ]
        if self.saved_bytes is not None:
            lines.append(
                f"backprop keeps    {self.saved_bytes / _MIB:,.1f} MiB of the trunk's activations; Split-FG none"
            )
        if self.size is not None:
            kept, held = self.size.backprop_bytes / 1e9, self.size.split_fg_bytes() / 1e9
            lines.append(
                f"at {self.size.depth} layers      backprop keeps {kept:,.1f} GB, Split-FG holds {held:,.1f} GB"
            )
        width = max((len(name) for name in self.snr), default=0)
        heading = ["signal to noise"] if self.snr else []
        return lines + heading + [f"  {name:<{width}}  {value:.3g}" for name, value in self.snr.items()]


def diagnose(
    split: Split,
    x: Inputs,
    y: Target,
    *,
    generator: torch.Generator,
    K: int = 8,
    draws: int = 100,
    steps: int | None = None,
    engine: Engine | None = None,
    size: theory.TransformerSize | None = None,
) -> Diagnosis:
    """Measure how noisy Split-FG is on this model and batch.

    The exact gradient comes from one reverse pass, the only place here that makes one; a
    :class:`~splitfg.BlackBoxTrunk` is measured from scores alone, by E[d²] = ‖g_trunk‖².

    Args:
        split: The network.
        x: Inputs of one batch.
        y: Its target.
        generator: Draws the tangents.
        K: Tangents per estimate to reason about.
        draws: Estimates to measure the variance from.
        steps: Training steps of the budget, for probes per parameter.
        engine: How J v is found; by default forward mode, or central differences for a black box.
        size: A transformer and batch whose activations to weigh, with backprop and with Split-FG.
    """
    require_split(split)
    _require_counts(draws, steps)
    raise_if([] if split.trunk_params() else ["the trunk has no trained parameter, so there is no noise to measure"])
    black_box = isinstance(split.trunk, BlackBoxTrunk)
    estimator = SplitFG(K, engine=engine or (CentralDifference() if black_box else ForwardMode()))
    layout = Layout.of(split.trunk_params())
    head = FrozenTrunk()(split, x, y).grads
    estimates = [_trunk_share(split, estimator(split, x, y, generator=generator), head) for _ in range(draws)]
    g = None if black_box else _trunk_share(split, _exact(split, x, y), head)
    if g is not None:
        energy, flat = _energy(g.grads), layout.flatten(g.grads)
        measured = torch.stack([(layout.flatten(e.grads) - flat).square().sum() for e in estimates]).mean().item()
    else:
        energy, measured = torch.cat([e.stats.scores for e in estimates]).square().mean().item(), None
    whole, variance = energy + _energy(head), (layout.total + 1) / K * energy
    joint_norm = (whole + variance) ** 0.5
    return Diagnosis(
        K=K,
        draws=draws,
        trunk_parameters=layout.total,
        head_parameters=sum(p.numel() for n, p in split.head_params().items() if n not in layout.names),
        energy_ratio=energy / whole if whole > 0 else 0.0,
        predicted_variance=variance,
        measured_variance=measured,
        snr={} if g is None else _signal_to_noise(g.grads, energy, K),
        probes_per_parameter=None if steps is None else theory.probes_per_parameter(steps, K, layout.total),
        saved_bytes=None if black_box else saved_bytes(split, x),
        joint_norm=joint_norm,
        head_lost=_lost(head, max(joint_norm, 1.0)),
        exact=not black_box,
        size=size,
    )


def saved_bytes(split: Split, x: Inputs) -> int:
    """What reverse mode would keep of the trunk's activations for these inputs, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in split.model.parameters()}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    params = {n: p.detach().requires_grad_() for n, p in split.trunk_params().items()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        h = split.trunk_function(x)(params)
        del h
    return sum(kept.values())


def _require_counts(draws: int, steps: int | None) -> None:
    found = [f"draws must be at least 2, got {draws}"] if draws < 2 else []
    if steps is not None and steps < 1:
        found.append(f"steps must be at least 1 (or None where the budget is not known), got {steps}")
    raise_if(found)


def _exact(split: Split, x: Inputs, y: Target) -> Estimate:
    return Backprop(closed_head=True, readout_only=split.tied is Tied.EXCLUDE)(split, x, y)


def _trunk_share(split: Split, estimate: Estimate, head: Params) -> Estimate:
    """The trunk's part of an estimate: a tied parameter's without the head's exact share."""
    own = {n: estimate.grads[n] - head[n] if n in head else estimate.grads[n] for n in split.trunk_params()}
    return dataclasses.replace(estimate, grads=own)


def _signal_to_noise(g: Params, energy: float, K: int) -> dict[str, float]:
    """K ‖g_p‖² / (n_p ‖g‖² + ‖g_p‖²) for every parameter p of n_p numbers."""
    own = {n: v.square().sum().item() for n, v in g.items()}
    return {n: K * own[n] / (v.numel() * energy + own[n]) if energy > 0 else 0.0 for n, v in g.items()}


def _lost(head: Params, divisor: float) -> float:
    """The share of entries above eps that are below it once they are divided."""
    sizes = torch.cat([g.abs().flatten().double() for g in head.values()])
    return ((sizes > _EPS) & (sizes < _EPS * divisor)).double().mean().item()


def _energy(g: Params) -> float:
    return sum(v.double().square().sum().item() for v in g.values())
