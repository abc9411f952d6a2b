"""Hooks on the inputs and outputs of a trunk's modules, to record or shift them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from splitfg.types import Params

Tap: TypeAlias = Callable[[str, Tensor, Tensor], Tensor | None]
"""Called with a module's name, input and output; a return value replaces the output."""

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a module after its input."""


@contextmanager
def tapped(
    trunk: nn.Module,
    names: Iterable[str],
    tap: Tap,
    *,
    before: Callable[[str, Tensor], None] | None = None,
    arguments: Callable[[str, Arguments], None] | None = None,
) -> Iterator[None]:
    """Call ``tap`` after every call of the named modules.

    Args:
        trunk: The modules' owner.
        names: The modules.
        tap: Called after a module.
        before: Called before a module, with its input.
        arguments: Called before a module, with all its arguments but the input.
    """
    handles = []
    for name in names:
        module = trunk.get_submodule(name)
        handles.append(module.register_forward_hook(_hook(name, tap), with_kwargs=True))
        if before is not None:
            handles.append(module.register_forward_pre_hook(_pre_hook(name, before), with_kwargs=True))
        if arguments is not None:
            handles.append(module.register_forward_pre_hook(_further_hook(name, arguments), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def shifted(
    trunk: nn.Module, run: Callable[[], Tensor], names: Iterable[str], top: str | None
) -> Callable[[Params], Tensor]:
    """Return a function from offsets at the outputs of the named modules to the input of the top.

    Args:
        trunk: The modules' owner.
        run: Runs it once and returns h.
        names: Modules whose outputs are shifted.
        top: The module whose input is wanted; ``None`` for h.
    """
    every = [*names] if top is None else [*names, top]

    def f(offsets: Params) -> Tensor:
        read: list[Tensor] = []

        def shift(name: str, a: Tensor, z: Tensor) -> Tensor | None:
            if name == top:
                read.append(a)
            return z + offsets[name] if name in offsets else None

        with tapped(trunk, every, shift):
            h = run()
        return read[0] if read else h

    return f


def each_row(value: Tensor, rows: int) -> Tensor:
    """Repeat a value that is the same for all samples, such as positions, for every sample; takes no memory."""
    shared = value.ndim > 0 and value.shape[0] == 1 and rows > 1
    return value.expand(rows, *value.shape[1:]) if shared else value


def _hook(name: str, tap: Tap) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return tap(name, _first(args, kwargs), output)

    return hook


def _pre_hook(name: str, before: Callable[[str, Tensor], None]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
        before(name, _first(args, kwargs))

    return hook


def _further_hook(name: str, arguments: Callable[[str, Arguments], None]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
        first = None if args else next(iter(kwargs), None)
        arguments(name, (tuple(args[1:]), {key: value for key, value in kwargs.items() if key != first}))

    return hook


def _first(args: Any, kwargs: Any) -> Any:
    """Return the first argument, positional or by keyword; ``None`` if there is none, as in parametrizations."""
    return args[0] if args else next(iter(kwargs.values()), None)
