"""Pullbacks of functions that read, write or choose entries by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splitfg.sites._rule_table import Pulled, argument, rule, summed_to
from splitfg.sites._tape import Operation


@rule("index_select", inputs=False, output=False)
def _index_select(operation: Operation, delta: Tensor) -> Pulled:
    dim, index = argument(operation, 1, "dim", 0), argument(operation, 2, "index", None)
    yield operation.input, torch.zeros_like(operation.input).index_add_(dim, index, delta)


@rule("gather", inputs=False, output=False)
def _gather(operation: Operation, delta: Tensor) -> Pulled:
    x, dim, index = operation.input, argument(operation, 1, "dim", None), argument(operation, 2, "index", None)
    yield x, torch.zeros_like(x).scatter_add_(dim, index, delta)


@rule("index_add", inputs=False, output=False)
def _index_add(operation: Operation, delta: Tensor) -> Pulled:
    dim, index, source = _written(operation, "source")
    yield operation.input, delta
    yield source, operation.kwargs.get("alpha", 1) * delta.index_select(dim, index).reshape(source.shape)


@rule("scatter", "scatter_add", inputs=False, output=False)
def _scatter(operation: Operation, delta: Tensor) -> Pulled:
    dim, index, source = _written(operation, "src")
    if operation.kwargs.get("reduce") is not None:
        raise NotImplementedError("scatter with reduce: use scatter_add or scatter_reduce")
    yield operation.input, delta if operation.name == "scatter_add" else delta.scatter(dim, index, 0)
    if isinstance(source, Tensor):
        if source.shape != index.shape:
            raise NotImplementedError("an index with another shape than the source: slice the source")
        yield source, delta.gather(dim, index)


def _written(operation: Operation, source: str) -> tuple[int, Tensor, Tensor]:
    """Return dimension, index and source of a function that writes a source into its input."""
    dim, index = argument(operation, 1, "dim", 0), argument(operation, 2, "index", None)
    return dim, index, argument(operation, 3, source, operation.kwargs.get("value"))


@rule("repeat_interleave", inputs=False, output=False)
def _repeat_interleave(operation: Operation, delta: Tensor) -> Pulled:
    x, repeats, dim = operation.input, argument(operation, 1, "repeats", 1), argument(operation, 2, "dim", None)
    flat, along = (x.flatten(), 0) if dim is None else (x, dim)
    source = torch.arange(flat.shape[along], device=x.device).repeat_interleave(repeats)
    zeros = torch.zeros(flat.shape, dtype=delta.dtype, device=x.device)
    yield x, zeros.index_add_(along, source, delta).reshape(x.shape)


@rule("max", "min", "maximum", "minimum")
def _larger(operation: Operation, delta: Any) -> Pulled:
    """δ goes to the larger entry; equal ones share it where torch chooses none."""
    a, b = operation.input, argument(operation, 1, "other", None)
    if not isinstance(operation.output, Tensor):
        yield from _chosen(operation, delta)
    elif isinstance(b, Tensor):
        share = torch.where(a == b, 0.5, (operation.output == a).to(operation.output.dtype))
        yield a, summed_to(delta * share, a)
        yield b, summed_to(delta * (1 - share), b)
    else:
        hit = (a == operation.output).to(operation.output.dtype)
        yield a, delta * hit / hit.sum()


@rule("topk", "sort", inputs=False, output=False)
def _chosen(operation: Operation, delta: Sequence[Tensor]) -> Pulled:
    x, (values, _), (_, index) = operation.input, delta, operation.output
    dim = argument(operation, 2 if operation.name == "topk" else 1, "dim", -1)
    if index.ndim < x.ndim:
        values, index = values.unsqueeze(dim), index.unsqueeze(dim)
    yield x, torch.zeros_like(x).scatter(dim, index, values)
