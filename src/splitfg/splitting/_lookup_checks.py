"""Validation of lookups in tables: backprop treats padding rows as constants, and divides gradients by frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from splitfg.calling import eager_code
from splitfg.splitting._audit import named_calls
from splitfg.splitting._padding import LOOKUP_ARGUMENTS
from splitfg.splitting._replace import labelled
from splitfg.splitting._split import Split
from splitfg.types import Inputs


def lookup_problems(split: Split, x: Inputs) -> list[str]:
    """List lookups whose gradient by backprop is another one than an estimate's.

    Estimates hold the padding row of an ``nn.Embedding`` constant, so that it must act in padded lookups alone.
    Remembers further tables that ``F.embedding`` gets with a ``padding_idx``: later passes hold their row constant in
    these lookups. Makes one forward pass, and one more if there are padding rows.

    Args:
        split: The network.
        x: Inputs.
    """
    params, still = split.all_trunk_params(), split.still_rows()
    trained = split.trunk_params()
    watch = _Watch(split.trunk, {id(p): name for name, p in params.items() if name in trained}, still)
    f = split.trunk_function(x)
    with torch.no_grad(), eager_code():
        with named_calls(split.trunk, watch.stack), watch:
            h = f(params)
        split.observed.padded.update(watch.padded)
        found = [f"{labelled(name, split.trunk.get_submodule(name))}: {words}" for words, name in watch.found.items()]
        rows = {name: _with_moved_row(params[name], row) for name, row in still.items() if name in trained}
        with _Unmoved({id(moved): params[name] for name, moved in rows.items()}):
            if found or not rows or _same(h, f({**params, **rows})):
                return found
            elsewhere = [name for name, moved in rows.items() if not _same(h, f({**params, name: moved}))]
    words = "also acts outside of padded lookups, where backprop trains it and estimates would not"
    return [f"the padding row of {name} {words}: create the table with padding_idx=None" for name in elsewhere]


def _with_moved_row(table: Tensor, row: int) -> Tensor:
    moved = table.clone()
    moved[row] += 1 + moved[row].abs()
    return moved


def _same(h: Tensor, again: Tensor) -> bool:
    return torch.allclose(h, again, rtol=1e-4, atol=1e-6, equal_nan=True)


class _Unmoved(TorchFunctionMode):
    """Looks up with a ``padding_idx`` in the tables themselves, in place of those with moved padding rows.

    Args:
        tables: From ``id`` of a table with a moved row to the table itself.
    """

    def __init__(self, tables: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._tables = tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip(LOOKUP_ARGUMENTS, args, strict=False)), **(kwargs or {})} if func is F.embedding else {}
        if given.get("padding_idx") is None:
            return func(*args, **(kwargs or {}))
        return func(**{**given, "weight": self._tables.get(id(given["weight"]), given["weight"])})


class _Watch(TorchFunctionMode):
    """Records lookups by ``F.embedding`` that no module accounts for.

    Args:
        trunk: The trunk.
        names: From ``id`` of a trained parameter to its name.
        still: Rows that no tangent moves, by the name of the table.

    Attributes:
        found: From the problem of a lookup to the name of the module that makes it.
        padded: Names of tables with a padding row that no module holds.
        stack: Names of the modules that are being called.
    """

    def __init__(self, trunk: nn.Module, names: Mapping[int, str], still: Mapping[str, int]) -> None:
        super().__init__()
        self._trunk, self._names, self._still = trunk, names, still
        self.found: dict[str, str] = {}
        self.padded: set[str] = set()
        self.stack: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            self._check({**dict(zip(LOOKUP_ARGUMENTS, args, strict=False)), **kwargs})
        return func(*args, **kwargs)

    def _check(self, given: Mapping[str, Any]) -> None:
        name, row = self._names.get(id(given["weight"])), given.get("padding_idx")
        if name is None:
            return
        caller = self.stack[-1] if self.stack else ""
        if given.get("scale_grad_by_freq", False):
            words = f"F.embedding divides the gradient of {name} by the frequency of a row, which is not a derivative"
            self.found[f"{words}: pass scale_grad_by_freq=False"] = caller
        if row is None:
            return
        module, row = self._trunk.get_submodule(caller), row % len(given["weight"])
        own = isinstance(module, nn.Embedding) and module.padding_idx == row
        if not own and self._still.get(name) != row:
            self.padded.add(name)
