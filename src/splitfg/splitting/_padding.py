"""Rows of embedding tables that backprop never trains."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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
def constant_padding(tables: Collection[nn.Embedding]) -> Iterator[None]:
    """Look up padding rows with their present values, whatever the tables are replaced by: constants to backprop."""
    if not tables or torch.compiler.is_compiling():  # compiled code does not follow temporary hooks
        yield
        return
    with ExitStack() as stack:
        for table in tables:
            row = table.weight.detach()[table.padding_idx]
            handle = table.register_forward_hook(_restore_row(row), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _restore_row(row: Tensor) -> Any:
    def hook(table: nn.Embedding, args: Any, kwargs: Any, found: Tensor) -> Tensor:
        tokens: Tensor = args[0] if args else kwargs["input"]
        return torch.where(tokens.eq(table.padding_idx or 0).unsqueeze(-1), row, found)

    return hook
