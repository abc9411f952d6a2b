"""Errors for splits that are used as modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn


class UnlikeModule:
    """Raises errors with a cure where a split is called like a module, or asked for a module's methods.

    Type checkers do not see these methods, and report such uses by themselves.
    """

    if not TYPE_CHECKING:

        def __call__(self, *_: Any, **__: Any) -> NoReturn:
            name = type(self).__name__
            raise TypeError(f"a {name} is not a module to call: use split.predict(x) for outputs, split.h(x) for h")

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or not (hasattr(nn.Module, name) or name == "training"):
                return self.__getattribute__(name)  # raises the error of Python, or of a property, once more
            cure = "split.predict(x)" if name == "forward" else f"split.model.{name}"
            kind, for_optimizers = type(self).__name__, ", or splitfg.parameter_groups(split, lr=...)"
            raise AttributeError(
                f"a {kind} is not a module and has no {name!r}: use {cure}"
                f"{for_optimizers if name == 'parameters' else ''}",
                name=name,
                obj=self,
            )
