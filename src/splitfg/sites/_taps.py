"""Looking at what the modules of a trunk read and write while it runs, and shifting what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from splitfg.types import Params

Tap: TypeAlias = Callable[[str, Tensor, Tensor], Tensor | None]
"""Called with a module's name, what it read and what it wrote; what it returns, if anything, replaces the latter."""


@contextmanager
def tapped(
    trunk: nn.Module, names: Iterable[str], tap: Tap, *, before: Callable[[str, Tensor], None] | None = None
) -> Iterator[None]:
    """While this lasts, ``tap`` sees every call of the named modules, and ``before`` what is about to be read."""
    handles = []
    for name in names:
        module = trunk.get_submodule(name)
        handles.append(module.register_forward_hook(_hook(name, tap), with_kwargs=True))
        if before is not None:
            handles.append(module.register_forward_pre_hook(_pre_hook(name, before), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def shifted(
    trunk: nn.Module, run: Callable[[], Tensor], names: Iterable[str], top: str | None
) -> Callable[[Params], Tensor]:
    """A function from what is added to the outputs of the named modules to what the top reads.

    Args:
        trunk: The modules' owner.
        run: Runs it once, and gives h.
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


def _hook(name: str, tap: Tap) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return tap(name, _first(args, kwargs), output)

    return hook


def _pre_hook(name: str, before: Callable[[str, Tensor], None]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
        before(name, _first(args, kwargs))

    return hook


def _first(args: Any, kwargs: Any) -> Any:
    """What a module reads, however it is handed over."""
    return args[0] if args else next(iter(kwargs.values()))
