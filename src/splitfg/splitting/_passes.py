"""Forward passes of a network on copies of its state, with the random numbers of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from splitfg.calling import (
    ForwardState,
    Observed,
    Places,
    Traits,
    call,
    computed_anew,
    forward_state,
    modules_of,
    random_state,
    same_generators,
    updates_statistics,
)
from splitfg.splitting._black_box import ForwardOnlyTrunk
from splitfg.splitting._masks import TangentMasks
from splitfg.types import Inputs, Params

# Largest entry, relative to an initialisation, of a parameter that hides what it multiplies.
_SMALL = 1e-2


def skip_checks() -> bool:
    """Whether a step is being compiled or captured, so that no code may depend on the values of tensors."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class Passes:
    """Runs the passes of a network.

    Attributes:
        observed: Observations of earlier passes.
        seed: Of the random numbers of every pass in one step; ``None`` outside a step.
        strict: Whether writes in place to buffers that earlier passes left alone raise an error, as in a step.
    """

    observed: Observed = field(default_factory=Observed)
    seed: int | None = None
    strict: bool = False

    def seeded(self, seed: int) -> Passes:
        """Return passes that all draw the same random numbers."""
        return replace(self, seed=seed)

    def call(
        self,
        trunk: nn.Module,
        params: Params,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        places: Places,
        written: Sequence[str],
    ) -> Any:
        """Call a trunk functionally; see ``call``."""
        with self.drawing(trunk.parameters()):
            return call(
                trunk,
                params,
                args,
                kwargs,
                places=places,
                observed=self.observed,
                written=written,
                strict=self.strict,
            )

    @contextmanager
    def drawing(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Draw random numbers from the seed of the step, if there is one, and restore the generators afterwards.

        Compiled code does not set generators: its callers do, with :meth:`Split.drawing`.
        """
        if torch.compiler.is_compiling() or self.seed is None:
            yield
            return
        device = next((t.device for t in tensors if t.device.type == "cuda"), None)
        with _seeded(self.seed, device), nullcontext() if forward_ad._current_level < 0 else TangentMasks():
            yield

    def state(self, parts: Sequence[nn.Module], runs: Iterable[Callable[[], object]]) -> ForwardState | None:
        """Run passes in a row, and return what they change; ``None`` if they change nothing. Restores the modules.

        Args:
            parts: The modules.
            runs: Run one pass each.
        """

        def run() -> None:
            for one in runs:
                one()

        # a captured step may not set generators, and is not random
        with torch.no_grad(), nullcontext() if skip_checks() else same_generators():
            return forward_state(parts, self.observed, run) or None


def observe(parts: Sequence[nn.Module], observed: Observed, run: Callable[[], object]) -> tuple[Traits, list[str]]:
    """Run a pass, restore the modules, and return its traits and the problems of its state.

    Args:
        parts: The modules.
        observed: Remembers the buffers that the pass writes to in place.
        run: Runs the pass.
    """
    with torch.no_grad(), same_generators(), same_parameters(parts):
        before = random_state()
        state = forward_state(parts, None, run)
        after = random_state()
    strangers = observed.add(parts, [tensor for tensor, _ in state.values])
    problems = [
        f"the forward pass writes in place to {what}, a tensor that is not registered: use register_buffer, so that"
        " estimates can run several passes on copies of it"
        for what in dict.fromkeys(strangers)
    ]
    stateful = bool(state) or any(map(updates_statistics, modules_of(parts)))  # this pass may skip what later ones call
    return Traits(not before.same_in_torch(after), stateful, before.changed_elsewhere(after)), problems


def copied_inputs(x: Inputs) -> tuple[Inputs, Callable[[], list[str]]]:
    """Return copies of a batch, and a function that lists the problem of a pass that has written to them in place."""
    copies: Inputs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), x)
    versions = [(t, t._version) for t in pytree.tree_leaves(copies) if isinstance(t, Tensor)]

    def problems() -> list[str]:
        words = "so that every pass of an estimate would get another batch: compute new tensors instead"
        written = any(t._version != version for t, version in versions)
        return [f"the model writes to its inputs in place, {words}"] if written else []

    return copies, problems


@contextmanager
def same_parameters(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Restore parameters that are written to in place, which the validation of the first batch reports."""
    held = (p for part in parts for p in part.parameters() if not p.is_inference())
    kept = {id(p): (p, p._version, p.detach().clone()) for p in held}
    try:
        yield
    finally:
        for p, version, value in kept.values():
            if p._version != version:
                p.data.copy_(value)


@contextmanager
def away_from_zero(model: nn.Module) -> Iterator[None]:
    """Move trained parameters of almost zero by noise of the size of an initialisation, and restore them afterwards.

    For validations: a layer of zeros, as at the end of a residual branch, hides what comes before it, and a bias of
    zeros hides that it is scaled. Those of a device stay: it may remember them, or be damaged by others.
    """
    devices = (module for module in model.modules() if isinstance(module, ForwardOnlyTrunk))
    still = {id(p) for device in devices for p in device.parameters()}
    trained = (p for p in model.parameters() if p.requires_grad and id(p) not in still)
    kept = [(p, p.detach().clone()) for p in trained if _is_almost_zero(p)]
    draws = torch.Generator().manual_seed(0)
    try:
        for p, _ in kept:
            p.data.add_(torch.randn(p.shape, generator=draws).to(p), alpha=_initial_size(p))
        with computed_anew():
            yield
    finally:
        for p, value in kept:
            p.data.copy_(value)


def _is_almost_zero(p: Tensor) -> bool:
    if not p.numel():
        return False
    low, high = p.detach().aminmax()  # without a copy, and with one wait for a GPU
    return float(torch.maximum(-low, high)) < _SMALL * _initial_size(p)


def _initial_size(p: Tensor) -> float:
    """Return 1/sqrt(n) for the n entries that make one output, the typical size of an initialisation."""
    return 1 / math.sqrt((p if p.ndim < 2 else p[0]).numel())


@contextmanager
def _seeded(seed: int, device: torch.device | None) -> Iterator[None]:
    with torch._C._DisableFuncTorch():
        cpu = torch.get_rng_state()
        cuda = None if device is None else torch.cuda.get_rng_state(device)
        torch.default_generator.manual_seed(seed)
        if device is not None:
            torch.cuda.default_generators[_index(device)].manual_seed(seed)
    try:
        yield
    finally:
        with torch._C._DisableFuncTorch():
            torch.set_rng_state(cpu)
            if device is not None and cuda is not None:
                torch.cuda.set_rng_state(cuda, device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
