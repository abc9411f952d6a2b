"""A network cut at h, and the role of each of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from splitfg.calling import ForwardState, Observed, Traits, places_of, preserved, restored
from splitfg.errors import SplitError, raise_if, shorten
from splitfg.heads import Head
from splitfg.splitting._agreement import disagreement
from splitfg.splitting._black_box import ForwardOnlyTrunk
from splitfg.splitting._interface import Interface, arguments
from splitfg.splitting._joined import Joined, part_problems
from splitfg.splitting._kernels import tangent_kernels
from splitfg.splitting._own_loss import own_loss_problems
from splitfg.splitting._padding import constant_padding, padded_tables, still_rows
from splitfg.splitting._passes import Passes, observe, skip_checks, written_inputs
from splitfg.splitting._replace import names_of
from splitfg.splitting._roles import Role, Tied, policy
from splitfg.splitting._wrappers import wrapper_problems
from splitfg.types import Inputs, Params, Target, TrunkFunction

FIRST_BATCH = "first batch"
"""Key of the validation of a split's first batch; see :meth:`Split.validate_once`."""

TANGENTS = "tangents"
"""Key of the comparison of J·v with a finite difference."""

HOOKS = "hooks"
"""Key of the search for hooks on the backward pass."""

OWN_LOSS = "own loss"
"""Key of the comparison of the loss with the one that the model computes from labels."""


class Split:
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
        self.trunk, self.head, self.tied, self.check = trunk, head, policy(tied), check
        self.interface = interface or Interface()
        self.model = model if model is not None else Joined(trunk, head)
        self._trunk_names, self._trunk_places = names_of(trunk, self.model), places_of(trunk)
        self._head_names = names_of(head, self.model)
        self._of_trunk, self._of_head = set(self._trunk_names.values()), set(self._head_names.values())
        raise_if(self._problems())
        self._validated: set[tuple[Hashable, tuple[bool, ...]]] = set()
        self._passes = Passes(getattr(head, "observed", None) or Observed())
        self._source: Split | None = None

    def __repr__(self) -> str:
        counts = {role.value: self.count(role) for role in Role}
        return f"Split({', '.join(f'{k}={v:,}' for k, v in counts.items() if v)})"

    @property
    def roles(self) -> dict[str, Role]:
        """The role of every parameter of the model, in the model's order."""
        return {name: self._role(name, p) for name, p in self.model.named_parameters()}

    def _role(self, name: str, p: Tensor) -> Role:
        in_trunk, in_head = name in self._of_trunk, name in self._of_head
        if not p.requires_grad or not (in_trunk or in_head):
            return Role.FROZEN
        if in_trunk and in_head:
            return Role.TIED
        return Role.TRUNK if in_trunk else Role.HEAD

    def training_flags(self) -> tuple[bool, ...]:
        """Return ``training`` of every module of the trunk, the head and the model."""
        return tuple(module.training for part in (self.trunk, self.head, self.model) for module in part.modules())

    def validate_once(self, key: Hashable, problems: Callable[[], Sequence[str]]) -> None:
        """Run a validation that needs a batch, unless it has passed before in the present training mode.

        Does nothing for a split with ``check=False``.

        Args:
            key: Identifies the validation.
            problems: Lists all problems.

        Raises:
            SplitError: If there are problems.
        """
        in_this_mode = (key, self.training_flags())
        if self.check and in_this_mode not in self._validated:
            with preserved(self.trunk, self.head, self.model):
                raise_if(problems())
            self._validated.add(in_this_mode)

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
        twin._validated = {(key, twin.training_flags()) for key in {FIRST_BATCH, TANGENTS, HOOKS, *passed}}
        twin._passes, twin._source = self._passes, self
        return twin

    def traits(self, x: Inputs) -> Traits:
        """Return what a forward pass does in the present training mode beside computing h, from one pass.

        The pass is made once for every training mode, and its changes are undone.

        Raises:
            SplitError: If it writes in place to a tensor that is not a buffer.
        """
        if self._source is not None:
            return self._source.traits(x)
        known, flags = self._passes.observed.traits, self.training_flags()
        if flags not in known:
            if skip_checks() or isinstance(self.trunk, ForwardOnlyTrunk):
                return Traits()  # a device may be noisy and slow
            parts, given = [self.trunk, self.head, self.model], pytree.tree_map_only(Tensor, torch.clone, x)
            known[flags], problems = observe(parts, self._passes.observed, lambda: self._run(given))
            raise_if(problems + written_inputs(given))
        return known[flags]

    @property
    def observed(self) -> Observed:
        """What forward passes were observed to do, for ``call``."""
        return self._passes.observed

    def for_step(self, x: Inputs, generator: torch.Generator | None) -> Split:
        """Return a split whose passes all draw the same random numbers, such as one dropout mask for a whole step.

        Draws one seed from the generator, unless the network is deterministic in its present mode or this split is
        already that of a step.

        Args:
            x: Inputs.
            generator: Source of the seed.

        Raises:
            SplitError: If the network is random and there is no generator.
        """
        if self._passes.seed is not None or not self.traits(x).random:
            return self
        if generator is None:
            raise SplitError(
                [
                    "the trunk draws random numbers, as dropout does in training mode: pass"
                    " generator=torch.Generator().manual_seed(0), or call .eval() on the model"
                ]
            )
        return self._seeded(int(torch.randint(2**62, (), generator=generator, device=generator.device)))

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

    def count(self, *roles: Role) -> int:
        """Count the numbers that the parameters with these roles hold."""
        held = self.roles
        return sum(p.numel() for name, p in self.model.named_parameters() if held[name] in roles)

    def trunk_params(self) -> Params:
        """Return the parameters that tangents perturb: the trunk's trained ones, and tied ones under ``INCLUDE``."""
        return self._params(Role.TRUNK, *([Role.TIED] if self.tied is Tied.INCLUDE else []))

    def still_rows(self) -> dict[str, int]:
        """Return the ``padding_idx`` of the trunk's embedding tables by name: rows that no tangent moves."""
        return still_rows(self.trunk, {id(p): name for name, p in self.model.named_parameters()})

    def all_trunk_params(self) -> Params:
        """Return every parameter of the trunk, frozen and tied ones included."""
        return {n: p.detach() for n, p in self.model.named_parameters() if n in self._of_trunk}

    def head_params(self) -> Params:
        """Return the parameters with an exact gradient from the head: its own trained ones and tied ones."""
        return self._params(Role.HEAD, Role.TIED)

    def trained_params(self) -> Params:
        """Return all trained parameters, in the model's order."""
        return self._params(Role.TRUNK, Role.HEAD, Role.TIED)

    def named_head_grads(self, grads: Params) -> Params:
        """Rename the head's gradients to the model's names, without those of frozen parameters."""
        wanted = self.head_params()
        return {self._head_names[n]: g for n, g in grads.items() if self._head_names[n] in wanted}

    def named_trunk_grads(self, grads: Params) -> Params:
        """Rename the trunk's gradients to the model's names, without those of parameters it does not train.

        Gradients of a parameter that several modules of the trunk share are summed.
        """
        outer, found = {id(p): name for name, p in self.model.named_parameters()}, Params()
        for inner, g in grads.items():
            name = outer[id(self.trunk.get_parameter(inner))]
            found[name] = found[name] + g if name in found else g
        wanted = self.trunk_params()
        return {name: g for name, g in found.items() if name in wanted}

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

        def f(params: Params) -> Tensor:
            own = {local[name]: p for name, p in params.items() if name in local}
            with tangent_kernels(self.trunk), constant_padding(padded if own else ()):
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

    def head_view(self, params: Params) -> Params:
        """Return the head's parameters by its own names, with values from ``params`` where given."""
        own = self.head.params()
        return {n: params.get(self._head_names[n], p) for n, p in own.items()}

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
            self.validate_once(
                OWN_LOSS, lambda: own_loss_problems(self.model, given, lambda: self.head.loss_and_u(self.h(x), y)[0])
            )
        return x, y

    def disagreement(self, x: Inputs) -> str | None:
        """Explain why trunk and head do not compute the model's outputs, or return ``None`` if they do."""
        if isinstance(self.model, Joined):
            return None
        with preserved(self.trunk, self.head, self.model), self._passes.drawing(self.model.parameters()):
            return disagreement(self.model, self.head, self.predict, x, self.interface)

    def _params(self, *roles: Role) -> Params:
        return {n: p.detach() for n, p in self.model.named_parameters() if self._role(n, p) in roles}

    def _problems(self) -> list[str]:
        found = []
        shared = [name for name, role in self.roles.items() if role is Role.TIED]
        if shared and self.tied is None:
            found.append(
                f"trunk and head share {', '.join(shared)}: pass tied=Tied.EXCLUDE (only the head trains it) or"
                " tied=Tied.INCLUDE (both do)"
            )
        trained, trunk, head = self.trained_params(), self.trunk_params(), self.head_params()
        if not trained:
            found.append("no parameter requires a gradient: set requires_grad=True on those to train")
        if any(p.is_inference() for p in self.model.parameters()):
            found.append(
                "parameters were made under torch.inference_mode(), which forbids training them: build the model"
                " outside of it, or load its state_dict into a new one"
            )
        numbers = [n for n, p in trained.items() if p.is_complex()]
        if numbers:
            found.append(
                f"{shorten(numbers)} are complex, and tangents and gradients are real: hold real numbers of shape"
                " (..., 2) as the parameter p, and use torch.complex(p[..., 0], p[..., 1]) in forward()"
            )
            return found
        expanded = [n for n, p in trained.items() if any(_repeats(p))]
        if expanded:
            found.append(
                f"entries of {shorten(expanded)} share memory, as those of an expanded tensor do, so that no optimizer"
                " can write to them: hold a copy, nn.Parameter(p.clone()), or expand a smaller parameter in forward()"
            )
        kinds = [
            ("trunk's parameters have mixed dtypes", {str(p.dtype) for p in trunk.values()}),
            ("head's parameters have mixed dtypes", {str(p.dtype) for p in head.values()}),
            ("parameters have mixed devices", {str(p.device) for p in trained.values()}),
        ]
        for what, mixed in kinds:
            if len(mixed) > 1:
                cure = "convert those with requires_grad to one with p.data = p.data.to(...)"
                found.append(f"the {what} ({', '.join(sorted(mixed))}): {cure}")
        return found


def _repeats(p: Tensor) -> Iterator[bool]:
    """Yield for every dimension whether its entries share memory."""
    return (size > 1 and stride == 0 for size, stride in zip(p.shape, p.stride(), strict=True))


def require_split(split: object) -> None:
    """Raise :class:`SplitError` if the argument is not a :class:`Split`."""
    if not isinstance(split, Split):
        raise SplitError([f"split must be a Split, got {type(split).__name__}: make one with splitfg.split(model)"])
