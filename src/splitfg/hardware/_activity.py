"""Activity perturbations on a device: every row has its own noise, and all rows run in one call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.errors import SplitError, raise_if
from splitfg.estimators import LearnedFeedback
from splitfg.feedback import Route
from splitfg.hardware._trunk import DeviceTrunk
from splitfg.numerics import added, norm
from splitfg.sites import Operation, Tape, has_pull_back, layer_gradients, pull_back, rule_for, under
from splitfg.splitting import Split
from splitfg.splitting.checks import check_batch, check_h, check_loss
from splitfg.types import Estimate, Inputs, Params, Stats, Target


@dataclass(frozen=True)
class ActivityPerturbation:
    """Exact head; noise e at the outputs z_l of all trained operations of a device, one score for every row b.

    With the measured response of h to noise σ e, by a central difference, K copies of the batch in one run,

        d_kb = <u_b, (h_b(z + σ e_k) - h_b(z - σ e_k)) / 2σ>,    δ̂_lb = (1/K) Σ_k d_kb e_klb ≈ dL/dz_lb,

    and every operation forms the gradient of its own parameters from δ̂ and what it read. Biased by the truncation
    error O(σ²) of the difference alone. Rows must not depend on each other inside the device.

    Args:
        K: Noises per estimate: 2K + 1 inferences for every row, or K + 1 if not ``central``.
        step: σ, relative to the root mean square of what is perturbed; a device that quantises needs 0.1 or more.
        central: Measure in both directions.
        chunk: Noises per run; ``None`` for all of them at once.
        prediction: Predicts δ at the layers; noise then estimates only the rest, and no further bias is added.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.hardware import ActivityPerturbation, AnalogDevice, DeviceTrunk, Wiring
        >>> wiring = Wiring.of(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
        >>> trunk = DeviceTrunk(AnalogDevice(wiring), wiring)
        >>> network = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(8, 3)))
        >>> x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> estimate = ActivityPerturbation(K=4)(network, x, y, generator=torch.Generator().manual_seed(0))
        >>> trunk.counts.runs, trunk.counts.inferences
        (2, 144)
    """

    K: int = 8
    step: float = 0.05
    central: bool = True
    chunk: int | None = None
    prediction: LearnedFeedback | None = None

    def __post_init__(self) -> None:
        found = [f"K must be at least 1, got {self.K}"] if self.K < 1 else []
        found += [] if math.isfinite(self.step) and self.step > 0 else [f"step must be positive, got {self.step}"]
        found += [f"chunk must be at least 1 (or None for all), got {self.chunk}"] if (self.chunk or 1) < 1 else []
        raise_if(found)

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`."""
        check_batch(split, x, y, generator, tangents=False)
        trunk = split.trunk
        if not isinstance(trunk, DeviceTrunk) or not isinstance(generator, torch.Generator):
            cure = "the trunk must be a DeviceTrunk or an OnnxTrunk (ActivityFG is for modules), and noise needs"
            raise SplitError([f"{cure} generator=torch.Generator().manual_seed(0)"])
        trained = {id(p): name for name, p in trunk.named_parameters() if p.requires_grad}
        inputs = x if isinstance(x, tuple) else (x,)
        with torch.no_grad():
            tape = trunk.tape(inputs, trained)
            check_h(split, tape.h, y)
            exact = split.head(tape.h, y)
            guess, change = self._guess(split, x, tape, exact.u, generator)
            deltas, scores = self._deltas(trunk, inputs, tape, trained, exact.u, guess, generator)
            grads: Params = {}
            for place, delta in deltas.items():
                grads = added(grads, own_gradients(tape.operations[place], delta, trained))
            trunk_grads, head = split.named_trunk_grads(grads), split.named_head_grads(exact.grads)
        check_loss(exact.loss, scores)
        norms = {"u": exact.u.norm(), "trunk": norm(trunk_grads, like=exact.u), "head": norm(head, like=exact.u)}
        return Estimate(exact.loss, added(head, trunk_grads), Stats(self.K, 0, True, scores, norms), change)

    def learned_state(self) -> dict[str, Route]:
        """Return the maps of the prediction, if there is one."""
        return {} if self.prediction is None else self.prediction.learned_state()

    def update_state(self, split: Split, estimate: Estimate) -> None:
        """Change the maps of the prediction."""
        if self.prediction is not None:
            self.prediction.update_state(split, estimate)

    def _guess(
        self, split: Split, x: Inputs, tape: Tape, u: Tensor, generator: torch.Generator
    ) -> tuple[Mapping[int, Tensor], Params]:
        if self.prediction is None:
            return {}, {}
        swept = self.prediction.sweep(split, tape, u)
        return swept.deltas, self.prediction.learn(split, x, tape, generator)

    def _deltas(
        self,
        trunk: DeviceTrunk,
        inputs: tuple[Any, ...],
        tape: Tape,
        trained: Mapping[int, str],
        u: Tensor,
        guess: Mapping[int, Tensor],
        generator: torch.Generator,
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return the estimated gradient at every trained operation's output, and the scores summed over rows."""
        nodes = trunk.places(trained)
        places = [i for i, node in enumerate(nodes) if any(id(p) in trained for p in node.parameters())]
        outputs = {i: tape.operations[i].output for i in places}
        _check_rows({nodes[i].writes: z for i, z in outputs.items()}, len(tape.h))
        sigma = self.step * _root_mean_square(list(outputs.values()))
        deltas, scores = {i: guess.get(i, torch.zeros_like(z)).clone() for i, z in outputs.items()}, []
        for count in self._counts():
            noise = {i: torch.randn(count, *z.shape, dtype=z.dtype, generator=generator) for i, z in outputs.items()}
            dh = self._response(trunk, inputs, {nodes[i].writes: e for i, e in noise.items()}, sigma, tape.h)
            d = (dh * u).flatten(2).sum(-1)  # (count, B)
            scores.append(d.sum(1))
            for i, p in guess.items():
                d = d - (noise[i] * p).flatten(2).sum(-1) if i in noise else d
            for i, e in noise.items():
                deltas[i] += (d.view(*d.shape, *[1] * (e.ndim - 2)) * e).sum(0) / self.K
        return deltas, torch.cat(scores)

    def _counts(self) -> Iterator[int]:
        chunk = self.chunk or self.K
        for start in range(0, self.K, chunk):
            yield min(chunk, self.K - start)

    def _response(self, trunk: DeviceTrunk, inputs: tuple[Any, ...], noise: Params, sigma: Tensor, h: Tensor) -> Tensor:
        """Return dh ``(count, *h.shape)``: one run with ``count`` copies of the batch, twice as many if central."""
        count = next(iter(noise.values())).shape[0]
        copies = 2 * count if self.central else count
        stacked = pytree.tree_map(lambda t: torch.as_tensor(t).repeat(copies, *[1] * (len(t.shape) - 1)), inputs)
        signs = (sigma, -sigma) if self.central else (sigma,)
        add = {name: torch.cat([sign * e.flatten(0, 1) for sign in signs]) for name, e in noise.items()}
        found = trunk.run(stacked, add, [trunk.wiring.h])[trunk.wiring.h].unflatten(0, (copies, len(h)))
        dh: Tensor = (found[:count] - found[count:]) / (2 * sigma) if self.central else (found - h) / sigma
        return dh


def own_gradients(operation: Operation, delta: Tensor, trained: Mapping[int, str]) -> Params:
    """Return the gradients of the parameters that one operation holds, from δ at its output, by the trunk's names."""
    module = operation.module
    if module is None:
        rule = rule_for(operation)
        if rule is None:
            raise SplitError([f"{operation} has no closed form for its parameters: freeze them"])
        found: Params = {}
        for tensor, share in rule(operation, delta):
            if id(tensor) in trained:
                found = added(found, {trained[id(tensor)]: share})
        return found
    if has_pull_back(module):
        return under(operation.name, pull_back(module, operation.input, delta)[1])
    return under(operation.name, layer_gradients(module, operation.input, delta))


def _root_mean_square(tensors: list[Tensor]) -> Tensor:
    total = torch.stack([t.square().mean() for t in tensors]).mean().sqrt()
    return torch.where(total > 0, total, torch.ones_like(total))


def _check_rows(outputs: Params, rows: int) -> None:
    raise_if(
        [
            f"{name} has shape {tuple(z.shape)} for {rows} rows, so rows cannot have their own noise: freeze its layer"
            for name, z in outputs.items()
            if z.ndim < 2 or z.shape[0] != rows
        ]
    )
