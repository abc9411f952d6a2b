"""A network cut at h: which parameters belong to the trunk, to the head, to both, or to nobody."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.heads import CrossEntropy, Head, LinearHead, OutputLoss, ReverseModeHead, has_closed_form
from splitfg.splitting._agreement import disagreement
from splitfg.splitting._call import call, places_of
from splitfg.splitting._cut import cut_at, graph_of, is_readout, last_linear, names_of, submodule, without
from splitfg.types import Inputs, Params, Target, TrunkFunction

FIRST_BATCH = "first batch"
"""Key of the validation that every split runs on its first batch."""


class Tied(Enum):
    """What happens to a parameter that both trunk and head use, such as a tied vocabulary table.

    ``EXCLUDE``: the trunk reads its current value, but only the head's exact gradient trains it (the paper's
    readout-only surrogate). ``INCLUDE``: the trunk's estimate is added to the head's exact gradient (strict).
    """

    EXCLUDE = "exclude"
    INCLUDE = "include"


class Role(Enum):
    """Who trains a parameter."""

    TRUNK = "trunk"
    HEAD = "head"
    TIED = "tied"
    FROZEN = "frozen"


class Split:
    """A trunk, x ↦ h, and a head, h ↦ loss.

    Nothing is copied: parameters keep their storage. ``split.model`` is the module that owns them all, whose
    parameter names key every estimate; save it, evaluate it and hand its parameters to an optimizer as usual.

    Args:
        trunk: Maps the inputs to h, shape ``(B, ..., d)``.
        head: Maps h to the loss.
        tied: What to do with parameters that both use, or its value as a string; without a policy such a pair is
            refused.
        model: The module that owns both, where there is one already; by default they are joined into one whose
            names start with ``trunk.`` and ``head.``.
    """

    def __init__(
        self, trunk: nn.Module, head: Head, *, tied: Tied | str | None = None, model: nn.Module | None = None
    ) -> None:
        raise_if(_part_problems(trunk, head))
        self.trunk, self.head, self.tied = trunk, head, _policy(tied)
        self.model = model if model is not None else _Joined(trunk, head)
        self._trunk_names, self._trunk_places = names_of(trunk, self.model), places_of(trunk)
        self._head_names = names_of(head, self.model)
        raise_if(self._problems())
        self._validated: set[tuple[Hashable, tuple[bool, ...]]] = set()

    def __repr__(self) -> str:
        counts = {role.value: self.count(role) for role in Role}
        return f"Split({', '.join(f'{k}={v:,}' for k, v in counts.items() if v)})"

    @property
    def roles(self) -> dict[str, Role]:
        """Every parameter of the model and who trains it, in the model's order."""
        trunk, head = set(self._trunk_names.values()), set(self._head_names.values())
        roles = {}
        for name, p in self.model.named_parameters():
            if not p.requires_grad or name not in trunk | head:
                roles[name] = Role.FROZEN
            elif name in trunk & head:
                roles[name] = Role.TIED
            else:
                roles[name] = Role.TRUNK if name in trunk else Role.HEAD
        return roles

    def training_flags(self) -> tuple[bool, ...]:
        """Return ``training`` of every module of the trunk, the head and the model."""
        return tuple(module.training for part in (self.trunk, self.head, self.model) for module in part.modules())

    def validate_once(self, key: Hashable, problems: Callable[[], Sequence[str]]) -> None:
        """Validate something that needs a batch, the first time it is asked for in the present training mode.

        Args:
            key: Names the validation.
            problems: Lists all problems; called if this validation has not passed yet.

        Raises:
            SplitError: There are problems.
        """
        in_this_mode = (key, self.training_flags())
        if in_this_mode not in self._validated:
            raise_if(problems())
            self._validated.add(in_this_mode)

    def twin(self, trunk: nn.Module, head: Head) -> Split:
        """Return a split with the same model, policy and passed validations, and other modules for its parts.

        Args:
            trunk: Computes the same function as this split's trunk, with the same parameters.
            head: Likewise.
        """
        twin = Split(trunk, head, tied=self.tied, model=self.model)
        # validating the twin itself would run, and so compile, it for evaluation too
        passed = {key for key, flags in self._validated if flags == self.training_flags()}
        twin._validated = {(key, twin.training_flags()) for key in {FIRST_BATCH, *passed}}
        return twin

    def count(self, *roles: Role) -> int:
        """How many numbers the parameters in these roles hold."""
        held = self.roles
        return sum(p.numel() for name, p in self.model.named_parameters() if held[name] in roles)

    def trunk_params(self) -> Params:
        """What tangents are drawn for: the trunk's trained parameters, with the tied ones under ``INCLUDE``."""
        return self._params(Role.TRUNK, *([Role.TIED] if self.tied is Tied.INCLUDE else []))

    def all_trunk_params(self) -> Params:
        """Everything the trunk reads, frozen and tied parameters included."""
        return {n: p.detach() for n, p in self.model.named_parameters() if n in set(self._trunk_names.values())}

    def head_params(self) -> Params:
        """What the head trains exactly: its own parameters and the tied ones."""
        return self._params(Role.HEAD, Role.TIED)

    def trained_params(self) -> Params:
        """Everything that is trained, in the model's order."""
        return self._params(Role.TRUNK, Role.HEAD, Role.TIED)

    def named_head_grads(self, grads: Params) -> Params:
        """The head's gradients under the model's names, frozen ones left out."""
        wanted = self.head_params()
        return {self._head_names[n]: g for n, g in grads.items() if self._head_names[n] in wanted}

    def named_trunk_grads(self, grads: Params) -> Params:
        """The trunk's gradients under the model's names, those of parameters it does not train left out.

        Names of the trunk for one parameter, where modules share it, are added up.
        """
        outer, found = {id(p): name for name, p in self.model.named_parameters()}, Params()
        for inner, g in grads.items():
            name = outer[id(self.trunk.get_parameter(inner))]
            found[name] = found[name] + g if name in found else g
        wanted = self.trunk_params()
        return {name: g for name, g in found.items() if name in wanted}

    def trunk_function(self, x: Inputs) -> TrunkFunction:
        """θ ↦ h for these inputs; parameters not in θ keep their current value."""
        local = {outer: inner for inner, outer in self._trunk_names.items()}
        inputs = x if isinstance(x, tuple) else (x,)

        def f(params: Params) -> Tensor:
            own = {local[name]: p for name, p in params.items() if name in local}
            h: Tensor = call(self.trunk, own, inputs, places=self._trunk_places)
            return h

        return f

    def loss_function(self, x: Inputs, y: Target, normaliser: Tensor) -> Callable[[Params], Tensor]:
        """θ ↦ L over trunk and head together, differentiable."""
        trunk = self.trunk_function(x)
        excluded = set(self._params(Role.TIED)) if self.tied is Tied.EXCLUDE else set()

        def f(params: Params) -> Tensor:
            h = trunk({name: p for name, p in params.items() if name not in excluded})
            return self.head.loss(self.head_view(params), h, y, normaliser)

        return f

    def head_view(self, params: Params) -> Params:
        """The head's parameters by its own names, taken from ``params`` where given."""
        own = self.head.params()
        return {n: params.get(self._head_names[n], p) for n, p in own.items()}

    def h(self, x: Inputs) -> Tensor:
        """The representation on the current parameters, with no tape."""
        with torch.no_grad():
            return self.trunk_function(x)({})

    def predict(self, x: Inputs) -> Tensor:
        """The head's outputs on the current parameters, with no tape."""
        with torch.no_grad():
            return self.head.predict(self.h(x))

    def disagreement(self, x: Inputs) -> str | None:
        """Why what the head computes on these inputs is not what the model returns, or ``None`` if it is."""
        joined = isinstance(self.model, _Joined)
        return None if joined else disagreement(self.model, self.head, self.predict, x)

    def _params(self, *roles: Role) -> Params:
        held = self.roles
        return {n: p.detach() for n, p in self.model.named_parameters() if held[n] in roles}

    def _problems(self) -> list[str]:
        found = []
        shared = [name for name, role in self.roles.items() if role is Role.TIED]
        if shared and self.tied is None:
            found.append(
                f"trunk and head share {_listed(shared)}: say tied=Tied.EXCLUDE (only the head trains it) or"
                " tied=Tied.INCLUDE (both do)"
            )
        trained = self.trained_params().values()
        if not trained:
            found.append("no parameter is trained: set requires_grad on what should be")
        for what, kinds in (("dtypes", {p.dtype for p in trained}), ("devices", {p.device for p in trained})):
            if len(kinds) > 1:
                found.append(f"parameters have mixed {what} ({_listed(sorted(map(str, kinds)))}): use one")
        return found


def require_split(split: object) -> None:
    """Refuse anything but a split where one is wanted."""
    if not isinstance(split, Split):
        raise SplitError([f"a Split is wanted here, and this is a {type(split).__name__}: make one with split(model)"])


class _Joined(nn.Module):
    """Trunk and head as one module, so that they can be saved and evaluated together."""

    def __init__(self, trunk: nn.Module, head: Head) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, *inputs: Any) -> Tensor:
        return self.head.outputs(dict(self.head.named_parameters()), self.trunk(*inputs))


def split(
    model: nn.Module,
    at: str | None = None,
    *,
    loss: OutputLoss | None = None,
    head: Callable[[nn.Module, OutputLoss], Head] | None = None,
    tied: Tied | str | None = None,
    example: Inputs | None = None,
) -> Split:
    """Cut a model that was written without us in mind.

    At its last linear layer the head is a closed form. At any other module, that module and all that follows
    becomes the head, differentiated by reverse mode confined to it, or probed (``head=ProbedHead``). The last linear
    layer is the one that is called last, where the model can be traced, and else the one that is defined last.

    Of a model from :func:`torch.compile`, the original is cut. Attributes and modules that are set in the model later
    count at its last linear layer; elsewhere it is traced, and stays cut as it was.

    Forward mode looks through ``torch.no_grad()`` blocks inside a trunk; use ``.detach()`` to stop a tangent.

    Args:
        model: Its parameters are shared, its names kept.
        at: Dotted name of the module that reads h; by default the last :class:`torch.nn.Linear`.
        loss: The loss on the model's outputs; cross-entropy by default.
        head: Makes the head from what follows h, e.g. ``ReverseModeHead`` or ``ProbedHead``.
        tied: What to do with parameters that trunk and head share.
        example: Inputs to check the cut with now, rather than with the first batch.

    Raises:
        SplitError: If there is no such module, or what follows it reads more than h.
    """
    raise_if(_argument_problems(model, at, head))
    model, loss = getattr(model, "_orig_mod", model), loss if loss is not None else CrossEntropy()
    graph = graph_of(model)
    name = at if at is not None else last_linear(model, graph)
    if not name:
        raise SplitError(["there is no nn.Linear inside the model to cut at: name a module with at=..."])
    layer = submodule(model, name)
    if head is None and is_readout(model, name, graph) and has_closed_form(layer):
        assert isinstance(layer, nn.Linear)
        result = Split(without(model, name), LinearHead(layer, loss=loss), tied=tied, model=model)
    elif head is None and at is None:
        raise SplitError([_no_closed_form(name, layer)])
    else:
        trunk, rest = cut_at(model, name)
        result = Split(trunk, (head or ReverseModeHead)(rest, loss), tied=tied, model=model)
    problem = None if example is None else result.disagreement(example)
    raise_if([] if problem is None else [problem])
    return result


def _argument_problems(model: object, at: object, head: object) -> list[str]:
    found = []
    if not isinstance(model, nn.Module):
        found.append(f"the model is a {type(model).__name__}, not an nn.Module: for a function use BlackBoxTrunk")
    elif isinstance(model, torch.jit.ScriptModule):
        found.append("the model is scripted, and cannot be cut: split the module that it was made from")
    elif any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        found.append("the model has lazy layers without a shape yet: run one batch through it first")
    if not isinstance(at, str | None):
        found.append(f"at is {at!r}: name the module by a string, such as at={str(at)!r}")
    if isinstance(head, nn.Module):
        found.append("head is a module: give what makes one, such as head=ReverseModeHead, or use Split(trunk, head)")
    return found


def _part_problems(trunk: object, head: object) -> list[str]:
    found = []
    if not isinstance(trunk, nn.Module):
        found.append(f"the trunk is a {type(trunk).__name__}, not an nn.Module: for a function use BlackBoxTrunk")
    if not isinstance(head, Head):
        found.append(
            f"the head is a {type(head).__name__}: use LinearHead(nn.Linear(...)), or ReverseModeHead(module) for any"
            " other module"
        )
        return found
    loss: object = head.output_loss
    if not isinstance(loss, OutputLoss):
        given = loss if isinstance(loss, type) else type(loss)
        found.append(f"the loss is {given.__name__}: use splitfg's CrossEntropy() or SquaredError()")
    return found


def _no_closed_form(name: str, layer: nn.Module) -> str:
    return (
        f"the last linear layer, {name} ({type(layer).__name__}), has a forward or a weight of its own making, for"
        f" which there is no closed form: say at={name!r} to have it differentiated by reverse mode"
    )


def _policy(tied: Tied | str | None) -> Tied | None:
    if tied is None or isinstance(tied, Tied):
        return tied
    known = {policy.value: policy for policy in Tied}
    if tied not in known:
        raise SplitError([f"tied is {tied!r}: say Tied.EXCLUDE (only the head trains it) or Tied.INCLUDE (both do)"])
    return known[tied]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
