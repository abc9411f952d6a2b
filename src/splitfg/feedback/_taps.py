"""Looking at what the modules of a trunk read and write while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

Tap: TypeAlias = Callable[[str, Tensor, Tensor], Tensor | None]
"""Called with a module's name, what it read and what it wrote; what it returns, if anything, replaces the latter."""


@contextmanager
def tapped(trunk: nn.Module, names: Iterable[str], tap: Tap) -> Iterator[None]:
    """While this lasts, ``tap`` sees every call of the named modules."""
    handles = [trunk.get_submodule(name).register_forward_hook(_hook(name, tap)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(name: str, tap: Tap) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(_module: nn.Module, inputs: Any, output: Any) -> Any:
        return tap(name, inputs[0], output)

    return hook
