"""Measurements of a diagnosis."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import splitfg.theory as theory
from splitfg.diagnosis._methods import Deviation, MethodReport, compare, other_methods
from splitfg.diagnosis._report import Diagnosis
from splitfg.engines import CentralDifference, ForwardMode
from splitfg.errors import SplitError, raise_if
from splitfg.estimators import Backprop, FrozenTrunk, SplitFG
from splitfg.splitting import ForwardOnlyTrunk, Split, Tied, require_split
from splitfg.splitting.checks import begin_step
from splitfg.tangents import Layout
from splitfg.types import Engine, Estimate, Inputs, Params, Target

_EPS = 1e-8  # torch's default for Adam


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
    """Measure how noisy the backprop-free methods are on this model and batch, and recommend one.

    Compares the estimates of every method with the exact gradient, from one reverse pass. A
    :class:`~splitfg.BlackBoxTrunk` cannot run backward: its energies come from scores, by E[d²] = ‖g_trunk‖².

    Args:
        split: The network.
        x: Inputs of one batch.
        y: Target of the batch.
        generator: Draws the tangents.
        K: Tangents per estimate.
        draws: Number of Split-FG estimates to measure the variance from.
        steps: Training steps of the budget, for probes per parameter.
        engine: Computes J v; by default forward mode, or central differences for a black box.
        size: A transformer and batch whose activation memory to estimate.

    Returns:
        The measurements; ``print`` them for advice.

    Raises:
        SplitError: If the trunk has no trained parameter, or a count is too small.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> found = splitfg.diagnose(network, x, y, generator=torch.Generator(), draws=2, steps=1000)
        >>> print(found)
        parameters        trunk 40, head 27 (ratio 0.5970)
        ...
        Recommended: ...
    """
    require_split(split)
    _require_counts(draws, steps)
    _require_trained(split)
    split = begin_step(split, x, y, generator, tangents=False)  # one dropout mask for all, and the exact gradient
    black_box = isinstance(split.trunk, ForwardOnlyTrunk)
    engine = engine or (CentralDifference() if black_box else ForwardMode())
    layout, head = Layout.of(split.trunk_params()), FrozenTrunk()(split, x, y).grads
    trunk_gradient = partial(_trunk_gradient, layout, split.trunk_params(), head)
    g = None if black_box else trunk_gradient(_exact(split, x, y))
    deviation, scores = None if g is None else Deviation(g), []
    for _ in range(draws):
        estimate = SplitFG(K, engine=engine)(split, x, y, generator=generator)
        scores.append(estimate.stats.scores)
        if deviation is not None:
            deviation.add(trunk_gradient(estimate))
    # E[d²] = ‖g_trunk‖² for tangents with E[v vᵀ] = I
    energy = torch.cat(scores).square().mean().item() if g is None else g.double().square().sum().item()
    total, variance = energy + _energy(head), (layout.total + 1) / K * energy
    joint_norm = (total + variance) ** 0.5
    methods = [_split_fg(K, layout.total, deviation)]
    if g is not None:
        methods += compare(split, x, y, g, layout, other_methods(K, engine), trunk_gradient, generator)
    return Diagnosis(
        K=K,
        draws=draws,
        trunk_parameters=layout.total,
        head_parameters=sum(p.numel() for n, p in split.head_params().items() if n not in layout.names),
        energy_ratio=energy / total if total > 0 else 0.0,
        predicted_variance=variance,
        measured_variance=None if deviation is None else deviation.error,
        snr={} if g is None else _signal_to_noise(layout.unflatten(g), energy, K),
        probes_per_parameter=None if steps is None else theory.probes_per_parameter(steps, K, layout.total),
        saved_bytes=None if black_box else saved_bytes(split, x),
        joint_norm=joint_norm,
        head_lost=_lost(head, max(joint_norm, 1.0)),
        exact=not black_box,
        methods=tuple(methods),
        size=size,
    )


def _require_trained(split: Split) -> None:
    if not split.trunk_params():
        raise SplitError(["the trunk has no trained parameter to diagnose: set requires_grad=True on some"])


def saved_bytes(split: Split, x: Inputs) -> int | None:
    """Measure the bytes that reverse mode would store of the trunk's activations, without the parameters.

    Returns:
        The bytes; ``None`` for a trunk that uses ``torch.func.grad``, where torch cannot tell.
    """
    own = {p.untyped_storage().data_ptr() for p in split.model.parameters()}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    params = {n: p.detach().requires_grad_() for n, p in split.trunk_params().items()}
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            h = split.trunk_function(x)(params)
            del h
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        return None
    return sum(kept.values())


def _require_counts(draws: int, steps: int | None) -> None:
    found = [f"draws must be at least 2, got {draws}"] if draws < 2 else []
    if steps is not None and steps < 1:
        found.append(f"steps must be at least 1 (or None for an unknown budget), got {steps}")
    raise_if(found)


def _split_fg(K: int, parameters: int, measured: Deviation | None) -> MethodReport:
    """Report on Split-FG, measured or, for a black box, by the theory: E‖ĝ‖² = (1 + (P + 1)/K) ‖g‖²."""
    if measured is not None:
        return MethodReport(f"SplitFG(K={K})", False, measured.cosine, measured.noise)
    noise = (parameters + 1) / K
    return MethodReport(f"SplitFG(K={K}, engine=CentralDifference())", True, (1 + noise) ** -0.5, noise)


def _exact(split: Split, x: Inputs, y: Target) -> Estimate:
    return Backprop(closed_head=True, readout_only=split.tied is Tied.EXCLUDE)(split, x, y)


def _trunk_gradient(layout: Layout, like: Params, head: Params, estimate: Estimate) -> Tensor:
    """Flatten the trunk's part of an estimate: tied parameters without the head's exact share, missing ones zero."""
    own = {n: estimate.grads.get(n, torch.zeros_like(p)) for n, p in like.items()}
    return layout.flatten({n: g - head[n] if n in head else g for n, g in own.items()})


def _signal_to_noise(g: Params, energy: float, K: int) -> dict[str, float]:
    """Compute K ‖g_p‖² / (n_p ‖g‖² + ‖g_p‖²) for every parameter p of n_p numbers."""
    own = {n: v.square().sum().item() for n, v in g.items()}
    return {n: K * own[n] / (v.numel() * energy + own[n]) if energy > 0 and v.numel() else 0.0 for n, v in g.items()}


def _lost(head: Params, divisor: float) -> float:
    """Return the share of entries above eps that a division by ``divisor`` moves below it."""
    if not head:
        return 0.0
    sizes = torch.cat([g.abs().flatten().double() for g in head.values()])
    return ((sizes > _EPS) & (sizes < _EPS * divisor)).double().mean().item()


def _energy(g: Params) -> float:
    return sum(v.double().square().sum().item() for v in g.values())
