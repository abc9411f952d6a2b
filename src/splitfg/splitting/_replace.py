"""Replacing modules of a model without copying parameters."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.calling import Following
from splitfg.errors import SplitError
from splitfg.splitting._interface import Interface


def submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the named submodule.

    Raises:
        SplitError: If there is none, with the closest names.
    """
    known = [n for n, _ in model.named_modules() if n]
    if name in known:
        return model.get_submodule(name)
    near = difflib.get_close_matches(name, known, n=3) or known[-3:]
    raise SplitError([f"there is no module named {name!r}; did you mean {' or '.join(near)}?"])


def names_of(part: nn.Module, model: nn.Module) -> dict[str, str]:
    """Map a part's parameter names to the model's names of the same parameters."""
    outer = {id(p): name for name, p in model.named_parameters()}
    strangers = [name for name, p in part.named_parameters() if id(p) not in outer]
    if strangers:
        raise SplitError(
            [
                f"{', '.join(strangers)} of the {type(part).__name__} are not parameters of the model: build both"
                " parts from the modules of model=..., or leave model out"
            ]
        )
    return {name: outer[id(p)] for name, p in part.named_parameters()}


def original(model: nn.Module) -> nn.Module:
    """Return the module from before :func:`replaced`, or the module itself."""
    return model.original if isinstance(model, _Twin) else model


def labelled(name: str, module: nn.Module) -> str:
    """Return the name and the class of a trunk's module, for messages."""
    return f"{name or 'the trunk'} ({type(original(module)).__name__})"


def replaced(
    model: nn.Module, new: Mapping[str, nn.Module], interface: Interface | None = None, left_out: Sequence[str] = ()
) -> nn.Module:
    """Return the model with some modules replaced, sharing all parameters and all other modules.

    Copies only the containers of the replaced modules, and these shallowly. Later changes of the model's attributes
    and modules take effect in the result too.

    Args:
        model: The model.
        new: Modules by the name of the one that they replace.
        interface: How to call the model; by default with the inputs as they are.
        left_out: Parameters that the containers of replaced modules hold and the result does not use.
    """
    for name in new:
        submodule(model, name)
    if isinstance(model, _Twin):  # keep the earlier replacements
        return _Twin(model.original, {**model.new, **new}, model.interface, model.left_out)
    return _Twin(model, new, interface or Interface(), left_out)


def without(model: nn.Module, name: str, interface: Interface | None = None) -> nn.Module:
    """Return the model with one module replaced by the identity, so that it returns that module's input."""
    return replaced(model, {name: nn.Identity()}, interface)


def held_beside(model: nn.Module, name: str) -> list[str]:
    """Return the names under which the containers of a module hold its bias too, as heads of transformers do."""
    layer, found = submodule(model, name), []
    bias = layer._parameters.get("bias")
    path = name.split(".")
    for depth in range(len(path)):
        holder = ".".join(path[:depth])
        own = model.get_submodule(holder)._parameters
        found += [f"{holder}.{leaf}" if holder else leaf for leaf, p in own.items() if p is not None and p is bias]
    return found


class _Twin(Following):
    """The model with some modules replaced; follows later changes of the model."""

    def __init__(
        self, model: nn.Module, new: Mapping[str, nn.Module], interface: Interface, left_out: Sequence[str]
    ) -> None:
        super().__init__()
        self.new, self.interface, self.left_out = dict(new), interface, tuple(left_out)
        self._copies: dict[str, tuple[nn.Module, nn.Module]] = {}
        self._own: set[str] = set()
        root = self._copied("", model)
        for name, module in new.items():
            *path, leaf = name.split(".")
            holder = root
            for depth, step in enumerate(path, start=1):
                child = self._copied(".".join(path[:depth]), holder.get_submodule(step))
                holder._modules[step] = child
                holder = child
                self._own.add(".".join(path[:depth]))
            holder._modules[leaf] = module
            self._own.add(name)
        for name in self.left_out:
            holder_name, _, leaf = name.rpartition(".")
            holder = self._copies[holder_name][1]
            holder.__dict__["_parameters"] = {**holder._parameters, leaf: None}
        # Adopt the copy's registries, so that parameter names stay the model's own.
        self._modules, self._parameters, self._buffers = root._modules, root._parameters, root._buffers

    @property
    def original(self) -> nn.Module:
        """The model this is the twin of."""
        return self._copies[""][0]

    def _copied(self, name: str, module: nn.Module) -> nn.Module:
        if name not in self._copies:
            twin = copy.copy(module)
            twin.__dict__["_modules"] = dict(module._modules)
            twin.__dict__["_compiled_call_impl"] = None  # of module.compile(), which would call the module itself
            self._copies[name] = (module, twin)
        return self._copies[name][1]

    def followed(self) -> list[nn.Module]:
        """Return the copied containers, with the model's present attributes."""
        self._follow()
        return [twin for _, twin in self._copies.values()]

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        if torch.compiler.is_compiling():  # compiled code treats other attributes as constants
            for original, twin in self._copies.values():
                if twin.training != original.training:
                    twin.training = original.training
        else:
            self._follow()
        h: Tensor = self.interface.outputs(self._copies[""][1](*inputs, **self.interface.named(named)))
        return h

    def _follow(self) -> None:
        """Copy attributes and modules that were set in the model since the last call."""
        for path, (original, twin) in self._copies.items():
            known, own = twin.__dict__, ["_modules", "_compiled_call_impl"]
            if any(name.rpartition(".")[0] == path for name in self.left_out):
                own.append("_parameters")
            known.update({k: v for k, v in vars(original).items() if k not in own and known.get(k, self) is not v})
            for name, child in original._modules.items():
                if (f"{path}.{name}" if path else name) not in self._own:
                    twin._modules[name] = child
