"""The result of a diagnosis, and its advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import splitfg.theory as theory
from splitfg.diagnosis._methods import MAP_UPDATES, MethodReport, ratio

_MIB = 2**20
# Share of the head's entries lost to clipping from which on the advice mentions it.
_NOTABLE_LOSS = 0.05
# Below this cosine similarity, one estimate says next to nothing about the gradient.
_WEAK = 0.05
# Parameters to list: the ones with the lowest and the highest signal to noise.
_LISTED = 4


@dataclass(frozen=True)
class Diagnosis:
    """How noisy the backprop-free methods are on one model and batch; ``print`` it for advice.

    Attributes:
        K: Tangents per estimate.
        draws: Number of Split-FG estimates.
        trunk_parameters: P_trunk, the number of perturbed parameters.
        head_parameters: P_head, the number of parameters with an exact gradient.
        energy_ratio: ‖g_trunk‖² / ‖g‖².
        predicted_variance: E‖ĝ - g‖² of Split-FG at this K by the theory.
        measured_variance: The same, measured over ``draws`` estimates; ``None`` for a black box.
        snr: Signal to noise of Split-FG at this K, by parameter: ‖g_p‖² / E‖ĝ_p - g_p‖².
        probes_per_parameter: steps · K / P_trunk for the budget, if one was given.
        saved_bytes: Memory that backprop would use for the trunk's activations; ``None`` for a black box.
        joint_norm: Norm of a Split-FG estimate at this K, trunk and head together: the divisor of joint clipping.
        head_lost: Share of the head's entries that joint clipping at 1 moves from above Adam's eps of 1e-8 to below.
        exact: Whether reverse mode computed g; if not, energies are estimated from scores.
        methods: Every method, measured against g, Split-FG first.
        size: A transformer whose activation memory to estimate, if one was given.
    """

    K: int
    draws: int
    trunk_parameters: int
    head_parameters: int
    energy_ratio: float
    predicted_variance: float
    measured_variance: float | None
    snr: dict[str, float] = field(repr=False)
    probes_per_parameter: float | None
    saved_bytes: int | None
    joint_norm: float
    head_lost: float
    exact: bool
    methods: tuple[MethodReport, ...] = field(repr=False)
    size: theory.TransformerSize | None = None

    @property
    def parameter_ratio(self) -> float:
        """P_trunk / P_total."""
        return self.trunk_parameters / (self.trunk_parameters + self.head_parameters)

    @property
    def recommended(self) -> MethodReport:
        """The applicable method whose estimates have the largest cosine similarity with the exact gradient."""
        return max((m for m in self.methods if m.obstacle is None), key=lambda m: m.cosine)

    def __str__(self) -> str:
        width = max(len(m.method) for m in self.methods)
        methods = [m.line(width) for m in self.methods]
        return "\n".join([*self._numbers(), "", *methods, *self._explained_lines(), "", *self.advice()])

    def advice(self) -> list[str]:
        """Return sentences that recommend a method, K, rho and clipping."""
        return [
            *self._method_advice(),
            *self._energy_advice(),
            *self._rho_advice(),
            *self._budget_advice(),
            *self._clipping_advice(),
        ]

    def _method_advice(self) -> list[str]:
        best = self.recommended
        how = "has" if self.exact else "has, by the theory,"
        words = [
            f"Recommended: {best.method}. One estimate {how} a cosine similarity of {best.cosine:.2f} with the exact"
            " gradient of the trunk."
        ]
        unbiased = [m for m in self.methods if m.obstacle is None and not m.biased]
        if best.biased and unbiased:
            other = max(unbiased, key=lambda m: m.cosine)
            words.append(f"It is biased and stores activations: compare it with {other.method}, which is unbiased.")
        if best.learned:
            words.append(
                f"Its maps had {MAP_UPDATES} updates at fixed parameters before this measurement; during training the"
                " parameters move, and the maps lag behind."
            )
        if best.cosine < _WEAK:
            words.append(
                "Every method's estimate is nearly all noise here: make the trunk smaller (cut at another module),"
                " raise K, or use backpropagation if the trunk can run backward."
            )
        return words

    def _energy_advice(self) -> list[str]:
        if self.energy_ratio < _WEAK:
            return [
                f"The trunk has {self.energy_ratio:.1%} of the gradient's energy: FrozenTrunk() may be nearly as good."
            ]
        gain = 1 / self.energy_ratio
        worth = "a small gain: most of the gradient's energy is in the trunk" if gain < 1.2 else "worth having"
        return [
            f"The exact head lowers the variance of each trunk coordinate {gain:.2f} times against the pure forward"
            f" gradient ({worth})."
        ]

    def _rho_advice(self) -> list[str]:
        noise = self.recommended.noise
        values = "1 and 0.3" if noise < 1 else "1, 0.3 and 0.1" if noise < 100 else "0.3, 0.1 and 0.03"
        return [
            f"At a noise/signal of {ratio(noise)}, compare the trunk step scales rho = {values} with each other and"
            " with FrozenTrunk()."
        ]

    def _budget_advice(self) -> list[str]:
        probes = self.probes_per_parameter
        if probes is None:
            return ["Pass the number of training steps to see whether the budget determines the trunk."]
        verdict = (
            "tangents on weights leave the trunk under-determined, and an adaptive optimizer may random-walk it"
            if probes < 1
            else "at least one measurement for every parameter"
        )
        return [f"With Split-FG the budget gives {probes:.2g} probes per trunk parameter: {verdict}."]

    def _clipping_advice(self) -> list[str]:
        if self.head_lost <= _NOTABLE_LOSS:
            return []
        return [
            f"Joint clipping at 1 divides the head's exact gradient by {self.joint_norm:,.0f} with Split-FG, mostly"
            f" because of the trunk's noise: {self.head_lost:.0%} of its entries fall below Adam's eps of 1e-8. Compare"
            " with clip_apart=True, and with another eps."
        ]

    def _numbers(self) -> list[str]:
        measured = "not measured" if self.measured_variance is None else f"{self.measured_variance:.4g} measured"
        how = "exact gradient" if self.exact else "from scores alone"
        lines = [
            f"parameters        trunk {self.trunk_parameters:,}, head {self.head_parameters:,}"
            f" (ratio {self.parameter_ratio:.4f})",
            f"gradient energy   {self.energy_ratio:.4f} of it in the trunk ({how})",
            f"total variance    {self.predicted_variance:.4g} predicted, {measured} (Split-FG, K={self.K},"
            f" {self.draws} draws)",
        ]
        if self.saved_bytes is not None:
            lines.append(
                f"backprop stores   {self.saved_bytes / _MIB:,.1f} MiB of the trunk's activations; Split-FG none"
            )
        if self.size is not None:
            stored, peak = self.size.backprop_bytes / 1e9, self.size.split_fg_bytes() / 1e9
            lines.append(
                f"at {self.size.depth} layers      backprop stores {stored:,.1f} GB, Split-FG needs {peak:,.1f} GB"
            )
        return lines + self._snr_lines()

    def _explained_lines(self) -> list[str]:
        """List how much of every parameter's gradient the maps explain, for the first method that learns maps."""
        found = next((m for m in self.methods if m.explained), None)
        if found is None:
            return []
        return ["", *_ranked_lines(f"share of the gradient that {found.method} explains", found.explained)]

    def _snr_lines(self) -> list[str]:
        """List the signal to noise of parameters."""
        return _ranked_lines("signal to noise", self.snr)


def _ranked_lines(heading: str, values: Mapping[str, float]) -> list[str]:
    """List values by parameter: all of them, or the lowest and the highest."""
    if not values:
        return []
    ranked = sorted(values, key=values.__getitem__)
    shown = set(ranked if len(ranked) <= 2 * _LISTED else ranked[:_LISTED] + ranked[-_LISTED:])
    left_out = len(ranked) - len(shown)
    more = f" (the lowest and highest; {left_out} more)" if left_out else ""
    width = max(len(name) for name in shown)
    return [heading + more, *(f"  {name:<{width}}  {value:.3g}" for name, value in values.items() if name in shown)]
