"""Measure every estimator on a model against plain autograd on the untouched model."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import splitfg
from splitfg import Estimate, Split, SplitError
from splitfg.numerics import norm
from splitfg.sites import Activities, ResidualTrunk, each_row
from splitfg.splitting import arguments
from splitfg.tangents import Gaussian, Layout
from splitfg.types import Params
from splitfg_lab.compatibility._case import Batch, Case

TANGENTS, SEED, UPDATES = 2, 1, 20
EXACT = 1e-5
"""Largest relative error in float32 of an estimator that counts as exact."""
ROUNDING, EXACT_IN_DOUBLE = 1e-3, 1e-9
"""Errors in float32 below the first are called rounding if float64 leaves less than the second."""


@dataclass(frozen=True)
class Cell:
    """The result of one estimator on one model.

    Attributes:
        status: ``exact``, ``rounding`` (exact in float64 alone), ``approximate``, ``refused`` (a
            :class:`~splitfg.SplitError`) or ``failed`` (other errors).
        error: Largest relative error against autograd; ``None`` without a result.
        reason: Message of the error.
        reached: Trained parameters of the trunk with a gradient, and all of them, if they differ.
        seconds: Time of the estimate, with its first-batch validation.
        double: Error in float64, measured where the one in float32 may be rounding.
    """

    status: str
    error: float | None = None
    reason: str = ""
    reached: tuple[int, int] | None = None
    seconds: float = 0.0
    double: float | None = None


@dataclass(frozen=True)
class _Truth:
    """The gradient of the untouched model by autograd, in all and of the trunk alone, and of chosen outputs."""

    split: Split
    x: Any
    y: Tensor
    grads: Params
    trunk: Params
    outputs: Callable[[tuple[str, ...]], Params]


Method = Callable[[_Truth], tuple[float, Params]]


def measure(case: Case, methods: Iterable[str] | None = None) -> dict[str, Cell]:
    """Return a cell for every estimator; the same reason for all if the model cannot be built or split.

    Args:
        case: The model class.
        methods: Names of estimators; all by default.
    """
    names = list(METHODS) if methods is None else list(methods)
    try:
        truth = _truth(case, torch.float32)
    except SplitError as error:
        return {name: Cell("refused", reason=_first_line(error)) for name in names}
    except Exception as error:
        return {name: Cell("failed", reason=_described(error)) for name in names}
    cells = {name: _cell(METHODS[name], truth) for name in names}
    unsure = [n for n, cell in cells.items() if cell.error is not None and EXACT < cell.error < ROUNDING]
    return {**cells, **_in_double(case, {n: cells[n] for n in unsure})} if unsure else cells


def _in_double(case: Case, cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """Measure again in float64; an error that all but vanishes there was rounding."""
    found: dict[str, Cell] = {}
    try:
        truth = _truth(case, torch.float64)
    except Exception:  # some models run in float32 alone
        return found
    for name, cell in cells.items():
        again = _cell(METHODS[name], truth)
        if again.error is not None and again.error <= EXACT_IN_DOUBLE:
            found[name] = replace(cell, status="rounding", double=again.error)
    return found


def _cell(method: Method, truth: _Truth) -> Cell:
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error, grads = method(truth)
    except SplitError as refusal:
        return Cell("refused", reason=_first_line(refusal))
    except Exception as failure:
        return Cell("failed", reason=_described(failure))
    wanted = list(truth.trunk)
    reached = sum(name in grads for name in wanted)
    return Cell(
        "exact" if error <= EXACT else "approximate",
        error,
        reached=None if reached == len(wanted) else (reached, len(wanted)),
        seconds=time.perf_counter() - began,
    )


def _truth(case: Case, dtype: torch.dtype) -> _Truth:
    def fresh() -> tuple[nn.Module, Batch]:
        """Build the model once more: passes may have changed the state of another."""
        model, batch = case.made()
        return model.to(dtype), pytree.tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch
        )

    model, batch = fresh()
    grads = _autograd(*fresh())
    split = case.cut(model)
    x, y = split.unpack(batch) if isinstance(batch, Mapping) else batch
    head = splitfg.FrozenTrunk()(split, x, y, generator=_generator()).grads
    trunk = {n: grads[n] - head[n] if n in head else grads[n] for n in split.trunk_params()}
    return _Truth(split, x, y, grads, trunk, lambda names: _output_gradients(*fresh(), names))


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    if isinstance(batch, Mapping):
        loss: Tensor = model(**batch).loss
        return loss
    inputs, named = arguments(batch[0])
    outputs = model(*inputs, **named)
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def _autograd(model: nn.Module, batch: Batch) -> Params:
    with _same_masks():
        _loss(model, batch).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    found = {n: g.to_dense() if g.is_sparse else g for n, g in found.items()}
    return {n: g for (n, g), p in zip(found.items(), model.parameters(), strict=True) if p.requires_grad}


def _output_gradients(model: nn.Module, batch: Batch, names: tuple[str, ...]) -> Params:
    """Return dL/dz at the outputs of the named modules."""
    outputs: Params = {}
    labels = batch["labels"] if isinstance(batch, Mapping) else batch[1]
    with _kept(model, names, outputs, labels.shape[0]), _same_masks():
        _loss(model, batch).backward()
    return {n: torch.zeros_like(z) if z.grad is None else z.grad for n, z in outputs.items()}


@contextmanager
def _kept(model: nn.Module, names: tuple[str, ...], outputs: Params, rows: int) -> Iterator[None]:
    def hook(name: str) -> Any:
        def keep(_module: nn.Module, _args: Any, z: Tensor) -> Tensor:
            z = each_row(z, rows)
            z.retain_grad()
            outputs.setdefault(name, z)  # a checkpointed block runs again in the backward pass
            return z.clone()  # what follows may write to it in place

        return keep

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _after_masks(truth: _Truth) -> torch.Generator:
    """Return the generator as an estimate draws tangents from it: after the seed of its dropout masks, if any."""
    generator = _generator()
    if truth.split.traits(truth.x).random:
        _mask_seed(generator)
    return generator


@contextmanager
def _same_masks() -> Iterator[None]:
    """Draw dropout masks as an estimate does, and restore torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_mask_seed(_generator()))
        yield


def _mask_seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))


def _distance(found: Params, expected: Params) -> float:
    """Return ‖found - expected‖ / ‖expected‖ over the names of both."""
    names = [name for name in found if name in expected]
    size = norm({name: expected[name] for name in names})
    return float(norm({name: found[name] - expected[name] for name in names}) / size) if names else 0.0


def _whole(estimator: splitfg.Estimator) -> Method:
    def method(truth: _Truth) -> tuple[float, Params]:
        found: Estimate = estimator(truth.split, truth.x, truth.y, generator=_generator())
        if not found.grads:
            raise SplitError(["it reaches no trained parameter"])
        return _distance(found.grads, truth.grads), found.grads

    return method


def _scored(estimator: Any, of_all: bool) -> Method:
    """Compare the scores with <g, v>, for tangents drawn again from the seed."""

    def method(truth: _Truth) -> tuple[float, Params]:
        found = estimator(truth.split, truth.x, truth.y, generator=_generator())
        params = truth.split.trained_params() if of_all else truth.split.trunk_params()
        layout = Layout.of(params)
        g = layout.flatten(truth.grads if of_all else truth.trunk)
        v = Gaussian().draw(layout, TANGENTS, _after_masks(truth))
        expected = v.double() @ g.double()  # float32 sums of millions of terms round to more than 1e-5
        return float((found.stats.scores - expected).abs().max() / g.norm()), found.grads

    return method


def _activity(truth: _Truth) -> tuple[float, Params]:
    """Compare the scores with Σ_l <dL/dz_l, e_l>, for noise drawn again from the seed."""
    estimator, trunk = splitfg.ActivityFG(K=TANGENTS), truth.split.trunk
    found = estimator(truth.split, truth.x, truth.y, generator=_generator())
    declared = getattr(trunk, "activities", None)
    names = (declared() if callable(declared) else Activities()).names(trunk)
    outer = {id(module): name for name, module in truth.split.model.named_modules()}
    inner = {outer[id(trunk.get_submodule(name))]: name for name in names}
    expected = {inner[name]: delta for name, delta in truth.outputs(tuple(inner)).items()}
    draws, scores = _after_masks(truth), []
    called = [name for name in names if name in expected]
    for _ in range(TANGENTS):
        noise = {n: torch.randn(expected[n].shape, dtype=expected[n].dtype, generator=draws) for n in called}
        scores.append(sum((noise[n].double() * expected[n]).sum() for n in called))
    size = norm({n: expected[n] for n in called})
    return float((found.stats.scores - torch.stack(scores)).abs().max() / size), found.grads  # type: ignore[arg-type]


def _learned(truth: _Truth) -> tuple[float, Params]:
    """Let the maps learn from a fixed number of estimates of the same batch first."""
    estimator, generator = splitfg.LearnedFeedback(), _generator()
    for _ in range(UPDATES):
        estimator.update_state(truth.split, estimator(truth.split, truth.x, truth.y, generator=generator))
    found = estimator(truth.split, truth.x, truth.y, generator=_generator())
    return _trunk_distance(found, truth), found.grads


def _direct(truth: _Truth) -> tuple[float, Params]:
    declared = isinstance(truth.split.trunk, ResidualTrunk)
    path = None if declared else splitfg.ResidualPath.find(truth.split, truth.x)
    found = splitfg.DirectPath(path)(truth.split, truth.x, truth.y, generator=_generator())
    return _trunk_distance(found, truth), found.grads


def _trunk_distance(found: Estimate, truth: _Truth) -> float:
    grads = {n: g for n, g in found.grads.items() if n in truth.trunk}
    if not grads:
        raise SplitError(["it reaches no trained parameter of the trunk"])
    return _distance(grads, truth.grads)


def _first_line(error: SplitError) -> str:
    more = len(error.problems) - 1
    return error.problems[0] + (f" (and {more} more)" if more else "")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


METHODS: dict[str, Method] = {
    "SplitFG": _scored(splitfg.SplitFG(K=TANGENTS), of_all=False),
    "LearnedFeedback": _learned,
    "ActivityFG": _activity,
    "DirectPath": _direct,
    "ParallelPull": _whole(splitfg.ParallelPull()),
    "ForwardGradient": _scored(splitfg.ForwardGradient(K=TANGENTS), of_all=True),
    "EvolutionStrategy": _scored(splitfg.EvolutionStrategy(K=TANGENTS), of_all=True),
    "FrozenTrunk": _whole(splitfg.FrozenTrunk()),
    "PredictiveCoding": _whole(splitfg.PredictiveCoding(settle_steps=8)),
    "Backprop": _whole(splitfg.Backprop()),
    "CheckpointedBackprop": _whole(splitfg.CheckpointedBackprop()),
}
"""Every estimator, by name."""
