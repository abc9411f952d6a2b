"""A network cut at h, and the role of each of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.calling import (
    Flags,
    ForwardState,
    Observed,
    Traits,
    places_of,
    preserved,
    registered_modules,
    restored,
)
from splitfg.errors import SplitError, raise_if
from splitfg.heads import Head
from splitfg.numerics import outside_inference_mode
from splitfg.splitting._agreement import disagreement
from splitfg.splitting._black_box import ForwardOnlyTrunk
from splitfg.splitting._interface import Interface, arguments, form_of
from splitfg.splitting._joined import Joined, part_problems
from splitfg.splitting._kernels import tangent_kernels
from splitfg.splitting._own_loss import own_loss_problems
from splitfg.splitting._padding import constant_padding, padded_tables
from splitfg.splitting._parameters import SplitParameters
from splitfg.splitting._passes import Passes, away_from_zero, copied_inputs, observe, skip_checks
from splitfg.splitting._roles import Role, Tied
from splitfg.splitting._wrappers import wrapper_problems
from splitfg.types import Inputs, Params, Target, TrunkFunction

FIRST_BATCH = "first batch"
"""Key of the validation of a split's first batch; see :meth:`Split.validate_once`."""

TANGENTS = "tangents"
"""Key of the comparison of J·v with a finite difference."""

HEAD_TANGENTS = "head tangents"
"""Key of the comparison of forward mode through a head with the head's own derivative."""

LOOKUPS = "lookups"
"""Key of the validation of lookups in tables."""

HOOKS = "hooks"
"""Key of the search for hooks on the backward pass."""

ROWS = "rows"
"""Key, with whether the batch is divided, of the validation that rows do not mix."""

OWN_LOSS = "own loss"
"""Key of the comparison of the loss with the one that the model computes from labels."""


class Split(SplitParameters):
    """A trunk, x ↦ h, and a head, h ↦ loss.

    A split shares the modules' parameters and copies nothing. ``split.model`` owns all of them, and its parameter
    names key every estimate: save it, evaluate it and pass its parameters to an optimizer as usual.

    Args:
        trunk: Maps the inputs to h, shape ``(B, ..., d)``.
        head: Maps h to the loss.
        tied: Policy for parameters that both use, or its value as a string; required if there are any.
        model: The module that owns both, if one exists; by default a new one, whose parameter names start with
            ``trunk.`` and ``head.``.
        check: Whether the first batch validates the network numerically; see :meth:`validate_once`.
        interface: How the model takes a batch and returns its outputs.

    Raises:
        SplitError: If a part has the wrong type, trunk and head share parameters without a policy, no parameter
            requires a gradient, or parameters differ in dtype or device.

    Example:
        >>> from torch import nn
        >>> import splitfg
        >>> trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        >>> network = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(8, 3)))
        >>> network
        Split(trunk=40, head=27)
        >>> list(network.trunk_params())
        ['trunk.0.weight', 'trunk.0.bias']
    """

    def __init__(
        self,
        trunk: nn.Module,
        head: Head,
        *,
        tied: Tied | str | None = None,
        model: nn.Module | None = None,
        interface: Interface | None = None,
        check: bool = True,
    ) -> None:
        raise_if(part_problems(trunk, head) or wrapper_problems([trunk, head, *([] if model is None else [model])]))
        super().__init__(trunk, head, tied, model)
        self.check, self.interface, self._trunk_places = check, interface or Interface(), places_of(trunk)
        self._validated: set[tuple[Hashable, Flags]] = set()
        self._passes = Passes(getattr(head, "observed", None) or Observed())
        self._source: Split | None = None
        self._flags: Flags | None = None
        self._form: Hashable = None

    def __repr__(self) -> str:
        counts = {role.value: self.count(role) for role in Role}
        return f"Split({', '.join(f'{k}={v:,}' for k, v in counts.items() if v)})"

    def training_flags(self) -> Flags:
        """Return identity, ``training`` and rates of dropout of every module of the trunk, the head and the model."""
        if self._flags is not None:
            return self._flags
        modules = registered_modules([self.trunk, self.head, self.model])
        return tuple((id(module), module.training, _rates(module)) for module in modules)

    def at_present(self, x: Inputs) -> Split:
        """Return the split of one step, which lists modules and parameters once: large networks have thousands.

        Args:
            x: Inputs; batches with other arguments, such as an optional mask, are validated anew.
        """
        if self._flags is not None:
            return self
        present = copy.copy(self)
        present._flags, present._form, present._listed = self.training_flags(), form_of(x), self._named()
        present._source = None if self._source is None else self._source.at_present(x)
        return present

    def validate_once(self, key: Hashable, problems: Callable[[], Sequence[str]]) -> None:
        """Run a validation that needs a batch, unless it has passed before in this training mode, with such a batch.

        Meanwhile trained parameters of almost zero are moved, since they hide errors. Does nothing for a split with
        ``check=False``.

        Args:
            key: Identifies the validation.
            problems: Lists all problems.

        Raises:
            SplitError: If there are problems.
        """
        if not self.check:
            return
        flags = self.training_flags()
        if self._validated.isdisjoint({(key, flags), ((key, self._form), flags)}):
            held = preserved(self.trunk, self.head, self.model)
            with outside_inference_mode(), held, away_from_zero(self.model):
                raise_if(problems())
            self._validated.add(((key, self._form), flags))

    def twin(self, trunk: nn.Module, head: Head) -> Split:
        """Return a split with the same model, policy and passed validations, and other modules for its parts.

        Args:
            trunk: Computes the same function as this split's trunk, with the same parameters.
            head: Computes the same function as this split's head, with the same parameters.
        """
        settings = {"tied": self.tied, "interface": self.interface, "check": self.check}
        twin = Split(trunk, head, model=self.model, **settings)  # type: ignore[arg-type]
        # validating the twin itself would run it, and so compile it for evaluation too
        passed = {key for key, flags in self._validated if flags == self.training_flags()}
        twin._validated = {
            (key, twin.training_flags())
            for key in {FIRST_BATCH, TANGENTS, HEAD_TANGENTS, LOOKUPS, HOOKS, (ROWS, True), (ROWS, False), *passed}
        }
        twin._passes, twin._source = self._passes, self
        return twin

    def traits(self, x: Inputs) -> Traits:
        """Return the side effects of a forward pass in the present training mode, from one pass.

        The pass is made once for every training mode and set of arguments, and its changes are undone.

        Raises:
            SplitError: If it writes in place to a tensor that is not a buffer.
        """
        if self._source is not None:
            return self._source.traits(x)
        known, mode = self._passes.observed.traits, (self.training_flags(), form_of(x))
        if mode not in known:
            if skip_checks() or isinstance(self.trunk, ForwardOnlyTrunk):
                return Traits()  # a device may be noisy and slow
            with outside_inference_mode():
                parts, (given, written) = [self.trunk, self.head, self.model], copied_inputs(x)
                found, problems = observe(parts, self._passes.observed, lambda: self._run(given))
                raise_if(problems + written())
                known[mode] = found
        return known[mode]

    @property
    def observed(self) -> Observed:
        """Observed side effects of forward passes, for ``call``."""
        return self._passes.observed

    def for_step(self, x: Inputs, generator: torch.Generator | None) -> Split:
        """Return a split whose passes all draw the same random numbers, such as one dropout mask for a whole step.

        Draws one seed from the generator, unless the network is deterministic in its present mode or this split is
        already that of a step. Its passes raise errors for writes to buffers that the observed pass left alone.

        Args:
            x: Inputs.
            generator: Source of the seed.

        Raises:
            SplitError: If the network is random and there is no generator.
        """
        if self._passes.seed is not None or isinstance(self.trunk, ForwardOnlyTrunk):  # devices are not observed
            return self
        random, step = self.traits(x).random, copy.copy(self)
        step._passes = replace(self._passes, strict=True)
        if not random:
            return step
        if generator is None:
            raise SplitError(
                [
                    "the trunk draws random numbers, as dropout does in training mode: pass"
                    " generator=torch.Generator().manual_seed(0), or call .eval() on the model"
                ]
            )
        return step._seeded(int(torch.randint(2**62, (), generator=generator, device=generator.device)))

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw the random numbers of the step from torch's global generators, and restore these; for compiled passes.

        Other passes of a split do so by themselves.
        """
        with self._passes.drawing(self.model.parameters()):
            yield

    def part(self, index: int) -> Split:
        """Return the split of a step for one part of its batch, which draws random numbers of its own."""
        seed = self._passes.seed
        return self if seed is None or index == 0 else self._seeded(seed + index)

    def _seeded(self, seed: int) -> Split:
        seeded = copy.copy(self)
        seeded._passes = self._passes.seeded(seed)
        return seeded

    def forward_state(self, batch: Iterable[Inputs]) -> ForwardState | None:
        """Return the change that a forward pass of ordinary training makes in the model's buffers and attributes.

        Args:
            batch: Inputs of every part of a batch; the parts pass one after the other.

        Returns:
            The change, which :meth:`ForwardState.apply` makes; ``None`` if passes change nothing in this mode.
        """
        parts = list(batch)
        if not self.traits(parts[0]).stateful:
            return None
        runs = [partial(self.part(i)._run, x) for i, x in enumerate(parts)]
        return self._passes.state([self.trunk, self.head, self.model], runs)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo the effects of passes on attributes and buffers, such as those that autograd runs once more."""
        with restored(self.trunk, self.head, self.model, observed=self._passes.observed):
            yield

    def _run(self, x: Inputs) -> None:
        """Run the model once as it is: with its own parameters, and with all effects on its state."""
        inputs, named = arguments(x)
        with self._passes.drawing(self.model.parameters()):
            if not isinstance(self.model, Joined):
                self.model(*inputs, **self.interface.named(named))
                return
            h, module = self.trunk(*inputs, **named), getattr(self.head, "module", None)
            if isinstance(module, nn.Module):
                module(h)

    def trunk_function(self, x: Inputs, *, for_reverse_mode: bool = False) -> TrunkFunction:
        """Return θ ↦ h for these inputs; parameters missing from θ keep their current value.

        Args:
            x: Inputs.
            for_reverse_mode: Whether reverse mode differentiates it, which knows padding rows as constants by itself.
        """
        local = {outer: inner for inner, outer in self._trunk_names.items()}
        inputs, named = arguments(x)
        padded = [] if for_reverse_mode else padded_tables(self.trunk)
        compiling = torch.compiler.is_compiling()
        written = () if compiling else self._passes.observed.names(self.trunk)

        def padded_by_functions(params: Params) -> dict[int, Tensor]:
            names = () if for_reverse_mode or compiling else self.observed.padded & set(params)
            return {id(params[name]): self.model.get_parameter(name).detach() for name in names}

        def f(params: Params) -> Tensor:
            own = {local[name]: p for name, p in params.items() if name in local}
            with tangent_kernels(self.trunk), constant_padding(padded if own else (), padded_by_functions(params)):
                h: Tensor = self._passes.call(
                    self.trunk, own, inputs, named, places=self._trunk_places, written=written
                )
            return h

        return f

    def loss_function(self, x: Inputs, y: Target, normaliser: Tensor) -> Callable[[Params], Tensor]:
        """Return θ ↦ L over trunk and head together, as a differentiable function."""
        trunk = self.trunk_function(x)
        excluded = set(self._params(Role.TIED)) if self.tied is Tied.EXCLUDE else set()

        def f(params: Params) -> Tensor:
            h = trunk({name: p for name, p in params.items() if name not in excluded})
            with tangent_kernels(self.head):
                return self.head.loss(self.head_view(params), h, y, normaliser)

        return f

    def h(self, x: Inputs) -> Tensor:
        """Return the representation h at the current parameters, without recording a graph."""
        with torch.no_grad():
            return self.trunk_function(x)({})

    def predict(self, x: Inputs) -> Tensor:
        """Return the head's outputs at the current parameters, without recording a graph; ignores labels in a dict."""
        with torch.no_grad():
            return self.head.predict(self.h(self.interface.inputs(x)))

    def unpack(self, batch: Inputs | Mapping[str, Any], target: Target | None = None) -> tuple[Inputs, Target]:
        """Return inputs and target of a batch that is a dict with the key ``labels``.

        For a model of Hugging Face, the target of a causal model is the next token, and inputs of a decoder are made
        from the labels, as the model itself does. Targets of -100 count as ignored. The first such batch compares the
        split's loss with the model's own, unless ``split`` was given a loss.

        Args:
            batch: The batch.
            target: The target, if the batch is inputs alone; both are then returned as they are.

        Raises:
            SplitError: If there is no target, or the model's own loss is another one.
        """
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        x, y = self.interface.unpacked(batch, target)
        if target is None and self.interface.own_loss:
            given = self.interface.named(arguments(batch)[1])
            self.validate_once(OWN_LOSS, lambda: self._own_loss_problems(given, x, y))
        return x, y

    def _own_loss_problems(self, given: Mapping[str, Any], x: Inputs, y: Target) -> list[str]:
        found = own_loss_problems(self.model, given, lambda: self.head.loss_and_u(self.h(x), y)[0])
        cause = self.disagreement(x) if found else None
        return found if cause is None else [cause]

    def disagreement(self, x: Inputs) -> str | None:
        """Explain why trunk and head do not compute the model's outputs, or return ``None`` if they do."""
        if isinstance(self.model, Joined):
            return None
        drawing = self._passes.drawing(self.model.parameters())
        with preserved(self.trunk, self.head, self.model), away_from_zero(self.model), drawing:
            return disagreement(self.model, self.head, self.predict, x, self.interface)


def require_split(split: object) -> None:
    """Raise :class:`SplitError` if the argument is not a :class:`Split`."""
    if not isinstance(split, Split):
        raise SplitError([f"split must be a Split, got {type(split).__name__}: make one with splitfg.split(model)"])


def _rates(module: nn.Module) -> tuple[float, ...]:
    """Return the numbers among a module's attributes that usually are rates of dropout."""
    held = vars(module)
    return tuple(held[name] for name in ("p", "dropout", "drop_prob") if isinstance(held.get(name), float))
