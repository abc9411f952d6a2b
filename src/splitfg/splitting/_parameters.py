"""The parameters of a trunk and a head, by role and by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if, shorten
from splitfg.heads import Head
from splitfg.splitting._joined import Joined
from splitfg.splitting._padding import still_rows
from splitfg.splitting._replace import names_of
from splitfg.splitting._roles import Role, Tied, policy
from splitfg.splitting._unlike_module import UnlikeModule
from splitfg.types import Params


class SplitParameters(UnlikeModule):
    """The parameters of a trunk and a head, by role and by name; :class:`Split` documents the arguments."""

    def __init__(self, trunk: nn.Module, head: Head, tied: Tied | str | None, model: nn.Module | None) -> None:
        self.trunk, self.head, self.tied = trunk, head, policy(tied)
        self.model = model if model is not None else Joined(trunk, head)
        self._trunk_names, self._head_names = names_of(trunk, self.model), names_of(head, self.model)
        self._of_trunk, self._of_head = set(self._trunk_names.values()), set(self._head_names.values())
        self._listed: list[tuple[str, nn.Parameter, Role]] | None = None
        raise_if(self._problems())
        self._known = [self._registered()]  # a list, which copies of the split share

    def _named(self) -> list[tuple[str, nn.Parameter, Role]]:
        """Return name, parameter and role of every parameter of the model, in the model's order."""
        if self._listed is not None:
            return self._listed
        return [(name, p, self._role(name, p)) for name, p in self.model.named_parameters()]

    def _registered(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, id(p)) for name, p, _ in self._named())

    def name_problems(self) -> list[str]:
        """List the problem of parameters that were added, renamed or untied since the split was made."""
        registered = self._registered()
        if registered == self._known[0]:
            return []
        parts = ((self.trunk, self._trunk_names), (self.head, self._head_names))
        try:
            changed = any(not names_of(part, self.model).items() <= known.items() for part, known in parts)
        except SplitError:  # a part holds a parameter that is not the model's any more
            changed = True
        if changed:
            return ["parameters were added, replaced, renamed or untied since the model was split: split it again"]
        self._known[0] = registered
        return []

    @property
    def roles(self) -> dict[str, Role]:
        """The role of every parameter of the model, in the model's order."""
        return {name: role for name, _, role in self._named()}

    def _role(self, name: str, p: Tensor) -> Role:
        in_trunk, in_head = name in self._of_trunk, name in self._of_head
        if not p.requires_grad or not (in_trunk or in_head):
            return Role.FROZEN
        if in_trunk and in_head:
            return Role.TIED
        return Role.TRUNK if in_trunk else Role.HEAD

    def count(self, *roles: Role) -> int:
        """Count the numbers that the parameters with these roles hold."""
        return sum(p.numel() for _, p, role in self._named() if role in roles)

    def trunk_params(self) -> Params:
        """Return the parameters that tangents perturb: the trunk's trained ones, and tied ones under ``INCLUDE``."""
        return self._params(Role.TRUNK, *([Role.TIED] if self.tied is Tied.INCLUDE else []))

    def still_rows(self) -> dict[str, int]:
        """Return the ``padding_idx`` of the trunk's embedding tables by name: rows that no tangent moves."""
        return still_rows(self.trunk, self.names_by_id())

    def names_by_id(self) -> dict[int, str]:
        """Return the name of every parameter of the model by the parameter's ``id``."""
        return {id(p): name for name, p, _ in self._named()}

    def all_trunk_params(self) -> Params:
        """Return every parameter of the trunk, frozen and tied ones included."""
        return {name: p.detach() for name, p, _ in self._named() if name in self._of_trunk}

    def trained_in_trunk(self) -> dict[int, str]:
        """Return the trunk's own names of the parameters that tangents perturb, by the parameter's ``id``."""
        held = {name: p for name, p, _ in self._named()}
        wanted = self.trunk_params()
        return {id(held[name]): own for own, name in self._trunk_names.items() if name in wanted}

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
        outer, found = self.names_by_id(), Params()
        for inner, g in grads.items():
            name = outer[id(self.trunk.get_parameter(inner))]
            found[name] = found[name] + g if name in found else g
        wanted = self.trunk_params()
        return {name: g for name, g in found.items() if name in wanted}

    def head_view(self, params: Params) -> Params:
        """Return the head's parameters by its own names, with values from ``params`` where given."""
        own = self.head.params()
        return {n: params.get(self._head_names[n], p) for n, p in own.items()}

    def _params(self, *roles: Role) -> Params:
        return {name: p.detach() for name, p, role in self._named() if role in roles}

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
        if any(t.is_inference() for t in chain(self.model.parameters(), self.model.buffers())):
            found.append(
                "parameters or buffers were made under torch.inference_mode(), which forbids training with them: build"
                " the model outside of it, or load its state_dict into a new one"
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
