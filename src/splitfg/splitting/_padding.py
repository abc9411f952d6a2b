"""Rows of embedding tables that backprop never trains."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def padded_tables(part: nn.Module) -> list[nn.Embedding]:
    """Return the embedding tables with a ``padding_idx``."""
    return [m for m in part.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]


def still_rows(part: nn.Module, names: Mapping[int, str]) -> dict[str, int]:
    """Return the padding row of every table that all its lookups pad alike.

    Args:
        part: A module.
        names: From ``id`` of a parameter to its name.

    Returns:
        Rows by the name of the table's weight.
    """
    lookups: dict[str, set[int | None]] = {}
    for module in part.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in names:
            lookups.setdefault(names[id(module.weight)], set()).add(module.padding_idx)
    return {name: row for name, rows in lookups.items() for row in rows if len(rows) == 1 and row is not None}


@contextmanager
def constant_padding(tables: Collection[nn.Embedding], replaced: Mapping[int, Tensor] | None = None) -> Iterator[None]:
    """Look up padding rows with their present values, whatever the tables are replaced by: constants to backprop.

    Args:
        tables: Modules with a padding row.
        replaced: From ``id`` of a tensor that replaces a further table to the table itself, for lookups by functions.
    """
    if not (tables or replaced) or torch.compiler.is_compiling():  # compiled code does not follow temporary hooks
        yield
        return
    with ExitStack() as stack:
        lookups = _Lookups(replaced or {})
        for table in tables:
            row = table.weight.detach()[table.padding_idx]
            if type(table).forward is nn.Embedding.forward:  # before hooks of the user, which may scale
                handles = [table.register_forward_hook(_restore_row(row), with_kwargs=True, prepend=True)]
            else:
                handles = lookups.follow(table, row)
            for handle in handles:
                stack.callback(handle.remove)
        if lookups.used:
            stack.enter_context(lookups)
        yield


def _restore_row(row: Tensor) -> Any:
    def hook(table: nn.Embedding, args: Any, kwargs: Any, found: Tensor) -> Tensor:
        return _restored(args[0] if args else kwargs["input"], table.padding_idx, row, found)

    return hook


def _restored(tokens: Tensor, padding: int | None, row: Tensor, found: Tensor) -> Tensor:
    return torch.where(tokens.eq(padding or 0).unsqueeze(-1), row, found)


class _Lookups(TorchFunctionMode):
    """Restores padding rows in calls of ``F.embedding``, by tables with a forward pass of their own and by functions.

    Such a table may scale its rows, or compute the tokens itself, as tables of positions do.

    Args:
        replaced: From ``id`` of a tensor that replaces a table to the table itself.

    Attributes:
        used: Whether there are such tables.
    """

    def __init__(self, replaced: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.used, self._replaced = bool(replaced), replaced
        self._called: list[Tensor] = []

    def follow(self, table: nn.Embedding, row: Tensor) -> list[Any]:
        """Register hooks that show which table is being called, and return their handles."""
        self.used = True
        return [
            table.register_forward_pre_hook(lambda *_: self._called.append(row)),
            table.register_forward_hook(lambda *_: self._called.__delitem__(-1), always_call=True),
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func is not F.embedding:
            return found
        given = {**dict(zip(LOOKUP_ARGUMENTS, args, strict=False)), **kwargs}
        padding, table = given.get("padding_idx"), self._replaced.get(id(given["weight"]))
        if padding is None or (table is None and not self._called):
            return found
        row = self._called[-1] if table is None else table[padding]
        return _restored(given["input"], padding % len(given["weight"]), row, found)


LOOKUP_ARGUMENTS = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""Arguments of ``F.embedding``."""
