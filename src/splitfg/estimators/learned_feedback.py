"""Learned feedback: u reaches every layer through maps that learn from measured responses."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.compiled import Compile, with_compiled_head
from splitfg.errors import SplitError, raise_if
from splitfg.estimators._feedback_runs import CompiledFeedback, EagerRun, Runner
from splitfg.estimators._head_pass import HeadPass
from splitfg.estimators._settings import kind_problems
from splitfg.estimators._state import with_state
from splitfg.estimators._tape_checks import pass_problems
from splitfg.estimators._tape_gradient import tape_gradient_problems
from splitfg.estimators.partial import ALONE, Partial, PartNeeds, Share
from splitfg.estimators.protocol import Estimator
from splitfg.feedback import Difference, LayerDifference, MismatchedPassError, Noise, Probe, Relay, Route, Swept, sweep
from splitfg.numerics import add_into, each_its_own, norm
from splitfg.sites import Alter, Tape, TapedTrunk, first_samples, layer_operations, record_lean_tape, record_tape
from splitfg.splitting import BlackBoxTrunk, Split
from splitfg.splitting.checks import begin_step, check_gradients, has_rows, skip_checks
from splitfg.types import Estimate, Inputs, Params, Stats, Target


@dataclass(frozen=True)
class FoundLayer:
    """A call of a layer that learned feedback found in a trunk.

    Attributes:
        name: Of the layer, in the trunk.
        kind: Its class.
        reads: Shape of its input.
        writes: Shape of its output.
        mapped: Whether feedback goes on below it, through a map; a layer that reads only inputs needs none.
    """

    name: str
    kind: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    mapped: bool

    def __str__(self) -> str:
        feedback = "map" if self.mapped else "no map: nothing below it learns"
        return f"{self.name} ({self.kind}): {self.reads} -> {self.writes}, {feedback}"


@dataclass(frozen=True)
class LearnedFeedback:
    """Exact head; carries u to every layer of the trunk through maps that it learns from forward passes.

    Every layer z = layer_θ(a) forms its own gradient from its input a and δ = dL/dz. δ comes from u: activations,
    norms, sums and reshapes are pulled back in closed form. Where backpropagation multiplies by a transposed weight,
    learned feedback multiplies by a transposed map, which it fits to the layer's response to noise at its input:

        δ_a = Mᵀ δ_z,    ∂L/∂W = Σ δ_z aᵀ,    dz ≈ M da.

    Every step runs the layers once more, with noise, to fit the maps; with ``Relay(every=n)`` every n-th step does. No
    autograd runs in the trunk; the gradients of layers above the last map are exact.

    Biased as long as the maps are: with :class:`~splitfg.feedback.Relay`, the default, the bias vanishes as they
    converge, which takes a few steps; with :class:`~splitfg.feedback.Direct` the covariance of Jacobian and gradient
    over rows remains.

    A step keeps activations, as backpropagation does. A warning lists the trained parameters that feedback does not
    reach; they get no entry, unless ``rest`` estimates them.

    Args:
        route: Carries u to the layers; holds the maps, which :meth:`update_state` changes.
        probe: Measures responses to noise; ``None`` for :class:`~splitfg.feedback.LayerDifference` where layers
            can run alone, which costs the least, and :class:`~splitfg.feedback.Difference` elsewhere.
        rest: Estimates the parameters that feedback does not reach, in the same step.
        only: Names or glob patterns of the parameters that learn by feedback; ``None`` for all that it reaches. The
            others are left to ``rest``, or get no entry.
        runner: Runs the steps; :meth:`compiled` sets another one.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> network = splitfg.split(model)
        >>> learner = splitfg.GradientLearner(
        ...     network, splitfg.LearnedFeedback(), torch.optim.Adam(model.parameters(), lr=1e-2)
        ... )
        >>> x, y, generator = torch.randn(32, 4), torch.randint(0, 3, (32,)), torch.Generator().manual_seed(0)
        >>> stats = learner.step(x, y, generator=generator)
    """

    route: Route = field(default_factory=Relay)
    probe: Probe | None = None
    rest: Estimator | None = None
    only: Sequence[str] | None = None
    runner: Runner = field(default=EagerRun, repr=False)

    def __post_init__(self) -> None:
        found = kind_problems("route", self.route, Route)
        found += [] if self.probe is None else kind_problems("probe", self.probe, Probe)
        if isinstance(self.only, str):
            found.append(f"only must hold names or patterns: write only=({self.only!r},)")
        raise_if(found)

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`."""
        split = begin_step(split, x, y, generator, tangents=False)
        estimate = self._part_of(split, x, y, generator, ALONE).completed(split)
        return with_state(split, [(x, y)], estimate)

    @property
    def needs(self) -> PartNeeds:
        """Requirements of a part of the estimate; see :class:`~splitfg.estimators.PartialEstimator`."""
        return PartNeeds(all_inputs=self.route.due)

    def part(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator, share: Share) -> Partial:
        """Compute the gradients of these rows; see :class:`~splitfg.estimators.PartialEstimator`.

        Every process changes its maps alike: each measures the same response, on the first of all rows, as many as the
        route needs.
        """
        split = begin_step(split, x, y, generator, tangents=False)
        return self._part_of(split, x, y, generator, share)

    def _part_of(self, split: Split, x: Inputs, y: Target, generator: torch.Generator, share: Share) -> Partial:
        self._check(split, generator)
        with torch.no_grad():
            run, head = self.runner(self, split, x, share), HeadPass(split, y)
            grads, change = run.finish(head.u(0, run.h, y), generator)
            if change:
                self.route.count_measurement()
            trunk = each_its_own(self._wanted(split, split.named_trunk_grads(grads)))
            exact = head.result()
        trunk, jvps = self._with_rest(split, x, y, trunk, generator)
        norms = {"u": exact.u.norm(), "trunk": norm(trunk, like=exact.u), "head": norm(exact.grads, like=exact.u)}
        check_gradients(norms)
        stats = Stats(jvps=jvps + self.passes(split), biased=True, norms=norms)
        return Partial(exact.loss, add_into(exact.grads, trunk), stats, state_update=change)

    def measured_rows(self, split: Split, x: Inputs) -> int | None:
        """Return how many of the first rows a measurement takes; ``None`` for all. Runs the trunk once."""
        with torch.no_grad():
            tape = self.record(split, x)
        samples, batch = self.route.samples(tape), tape.h.shape[0]
        if not samples or first_samples(tape, min(samples, batch), batch) is None:
            return None
        return samples

    def passes(self, split: Split) -> int:
        """Return the forward passes that this step's measurement takes; none between measurements."""
        return self.chosen_probe(split).passes if self.route.due else 0

    def chosen_probe(self, split: Split) -> Probe:
        """Return the probe, or the one that suits route and trunk."""
        if self.probe is not None:
            return self.probe
        return LayerDifference() if self.route.by_layer and not isinstance(split.trunk, TapedTrunk) else Difference()

    def layers(self, split: Split, x: Inputs) -> tuple[FoundLayer, ...]:
        """Return the layers that the trunk calls on a batch, in order; print them to see which have maps."""
        with torch.no_grad():
            tape = self.record(split, x)
        found = [(o, tape.is_active(o.input)) for _, o in layer_operations(tape)]
        return tuple(
            FoundLayer(o.name, type(o.module).__name__, tuple(o.input.shape), tuple(o.output.shape), mapped)
            for o, mapped in found
        )

    def learned_state(self) -> dict[str, Route]:
        """Return the maps."""
        return {"maps": self.route}

    def update_state(self, split: Split, estimate: Estimate) -> None:  # noqa: ARG002
        """Change the maps by the estimate's ``state_update``, and count the step."""
        self.route.apply(estimate.state_update)
        self.route.taken += 1

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, LearnedFeedback]:
        """Compile the head, and the trunk's pass together with the sweep and the measurement."""
        return with_compiled_head(split, compile_), replace(self, runner=CompiledFeedback(compile_))

    def record(self, split: Split, x: Inputs, *, lean: bool = False) -> Tape:
        """Run the trunk once and record it; ``lean`` keeps only the values that this estimator reads."""
        if not skip_checks() and not isinstance(split.trunk, TapedTrunk):
            split.validate_once("learned feedback's tape", lambda: _tape_problems(split, x))
        return _recorded_lean(split, x) if lean and self.is_lean(split) else _recorded(split, x)

    def is_lean(self, split: Split) -> bool:
        """Whether a step needs only some values of a pass, and each of them once."""
        measured_alone = not self.route.due or type(self.chosen_probe(split)) is LayerDifference
        return self.route.lean and measured_alone and not isinstance(split.trunk, TapedTrunk)

    def sweep(self, split: Split, tape: Tape, u: Tensor, keep: Collection[int] = (), *, consume: bool = False) -> Swept:
        """Carry u through a recorded pass; keep gradients at the outputs of these places.

        With ``consume``, free the values of the pass on the way; see :func:`~splitfg.feedback.sweep`.
        """
        return sweep(tape, u, self.route, split.trained_in_trunk(), keep, consume=consume)

    def learn_from_all(self, split: Split, x: Inputs, tape: Tape, generator: torch.Generator, share: Share) -> Params:
        """Return the change of the maps from the first rows of all processes together; see :meth:`learn`."""
        if share.inputs is None or not self.route.due:
            return self.learn(split, x, tape, generator)
        return self.learn(split, share.inputs, self.record(split, share.inputs, lean=True), generator)

    def learn(self, split: Split, x: Inputs, tape: Tape, generator: torch.Generator) -> Params:
        """Measure the response to noise, and return the change of the maps; empty if none is learned at this step."""
        return self.measure(split, x, tape, generator)[1] if self.route.due else {}

    def measure(self, split: Split, x: Inputs, tape: Tape, generator: torch.Generator) -> tuple[Tape, Params]:
        """Return the tape of the samples that were measured, and the change of the maps."""
        part, state = self._part(x, tape), generator.get_state()
        if part is not None:
            try:
                return part[1], self.change(split, x, tape, self.draw(split, part[1], generator))
            except MismatchedPassError:  # a value whose leading dimension is not the samples
                generator.set_state(state)
        return tape, self.change(split, x, tape, self.draw(split, tape, generator), whole=True)

    def draw(self, split: Split, tape: Tape, generator: torch.Generator) -> Noise:
        """Draw the noise of one measurement of these samples."""
        return self.route.noise(tape, generator, alone=self.chosen_probe(split).alone)

    def change(self, split: Split, x: Inputs, tape: Tape, noise: Noise, *, whole: bool = False) -> Params:
        """Return the change of the maps that the response to noise asks for.

        Args:
            split: The network.
            x: Inputs.
            tape: Of all samples.
            noise: Unit noise, for as many samples as the route needs.
            whole: Measure all samples.
        """
        if not noise:
            return {}
        x, tape = (None if whole else self._part(x, tape)) or (x, tape)
        return self.route.change(tape, noise, self.chosen_probe(split)(tape, partial(_recorded, split, x), noise))

    def _part(self, x: Inputs, tape: Tape) -> tuple[Inputs, Tape] | None:
        """Return as many samples as the route needs, with their part of the tape; ``None`` for the whole batch.

        A layer's response to what it reads does not depend on the other samples of the batch.
        """
        samples, batch = self.route.samples(tape), tape.h.shape[0]
        part = None if samples is None or not 0 < samples < batch else first_samples(tape, samples, batch)
        if part is None:
            return None
        return pytree.tree_map(lambda t: t[:samples] if has_rows(t) else t, x), part

    def _with_rest(
        self, split: Split, x: Inputs, y: Target, trunk: Params, generator: torch.Generator
    ) -> tuple[Params, int]:
        """Add what feedback does not reach, and count the Jacobian-vector products that took."""
        missing = [name for name in split.trunk_params() if name not in trunk]
        if not missing:
            return trunk, 0
        if self.rest is None:
            _warn_once(split, missing)
            return trunk, 0
        estimate = self.rest(split, x, y, generator=generator)
        return trunk | {name: estimate.grads[name] for name in missing if name in estimate.grads}, estimate.stats.jvps

    def _wanted(self, split: Split, trunk: Params) -> Params:
        if self.only is None:
            return trunk
        patterns = tuple(self.only)
        split.validate_once(("learned feedback only", patterns), lambda: _pattern_problems(split, patterns))
        return {name: g for name, g in trunk.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}

    def _check(self, split: Split, generator: object) -> None:
        found = []
        if not isinstance(generator, torch.Generator):
            found.append("the maps learn from noise: pass generator=torch.Generator().manual_seed(0)")
        if isinstance(split.trunk, BlackBoxTrunk):
            found.append("a BlackBoxTrunk has no layers to learn: use SplitFG(engine=CentralDifference())")
        if found:
            raise SplitError(found)


_ROWS = 8
"""Samples of the first batch that the validation of the tape takes."""


def _pattern_problems(split: Split, patterns: tuple[str, ...]) -> list[str]:
    names = list(split.trunk_params())
    unused = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    return [f"only: {p!r} matches no trained parameter of the trunk, which has {', '.join(names)}" for p in unused]


def _tape_problems(split: Split, x: Inputs) -> list[str]:
    """List what a tape hides of a trunk; compares gradients on a few rows, or on all if it runs on no fewer."""
    found = pass_problems(split, x)
    if found:
        return found

    def compared(x: Inputs) -> list[str]:
        return tape_gradient_problems(split, x, _recorded_lean(split, x), split.trained_in_trunk())

    try:
        return compared(pytree.tree_map(lambda t: t[:_ROWS] if has_rows(t) else t, x))
    except SplitError:
        raise
    except (RuntimeError, ValueError, IndexError):
        return compared(x)


def _recorded(split: Split, x: Inputs, alter: Alter | None = None) -> Tape:
    if isinstance(split.trunk, TapedTrunk):
        return split.trunk.tape(x if isinstance(x, tuple) else (x,), split.trained_in_trunk(), alter)
    return record_tape(split.trunk, partial(split.trunk_function(x), {}), split.trained_in_trunk(), alter=alter)


def _recorded_lean(split: Split, x: Inputs) -> Tape:
    return record_lean_tape(split.trunk, partial(split.trunk_function(x), {}), split.trained_in_trunk())


def _warn_once(split: Split, missing: list[str]) -> None:
    def warn() -> list[str]:
        warnings.warn(
            f"learned feedback does not reach {', '.join(missing)}, which stay as they are: give"
            " LearnedFeedback(rest=SplitFG(K=8)) to estimate them, or freeze them",
            stacklevel=5,
        )
        return []

    if not skip_checks():
        split.validate_once(("learned feedback", tuple(missing)), warn)
