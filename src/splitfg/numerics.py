"""Arithmetic on tensors and on gradients keyed by name that several packages need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce

import torch
from torch import Tensor

from splitfg.types import Params


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over many numbers: float32, or ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or wider."""
    return x.to(wide(x.dtype))


def derivative_rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative difference of forward and reverse mode that rounding explains; TF32's on a GPU."""
    if dtype == torch.float32 and device.type != "cpu":
        return 1e-2
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.1)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which products keep the dtype of their factors, for use under ``torch.autocast``."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode, in which torch counts no writes and some versions lose tangents, and record no graph."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def inner_products(moves: Tensor, u: Tensor) -> Tensor:
    """Compute <u, a_k> for moves a, shape ``(K, *u.shape)``, summed in float32 or wider; shape ``(K,)``."""
    with without_autocast(u.device):
        return widened(moves.flatten(1)) @ widened(u.flatten())


def added(first: Params, second: Params) -> Params:
    """Add two sets of gradients name by name; a name that occurs in one of them is copied unchanged."""
    return {**first, **{n: first[n] + g if n in first else g for n, g in second.items()}}


def add_into(total: Params, more: Params) -> Params:
    """Add two sets of gradients name by name in the memory of ``total``; otherwise like :func:`added`.

    Copies first where a sum in place would change another gradient or the dtype of the sum, and where ``total`` has no
    memory for every entry.

    Args:
        total: Gradients that belong to the caller alone; their values are lost.
        more: Gradients to add, which stay unchanged.
    """
    users = Counter(g.untyped_storage().data_ptr() for g in (*total.values(), *more.values()))

    def summed(own: Tensor, g: Tensor) -> Tensor:
        memory = own.untyped_storage()
        alone = users[memory.data_ptr()] == 1 and memory.nbytes() >= own.numel() * own.element_size()
        fits = alone and not own.requires_grad and own.dtype == torch.promote_types(own.dtype, g.dtype)
        return own.add_(g) if fits and own.shape == g.shape else own + g

    return {**total, **{n: summed(total[n], g) if n in total else g for n, g in more.items()}}


def norm(grads: Params, *, like: Tensor | None = None) -> Tensor:
    """Compute the Euclidean norm over all entries together, summed in float32 or wider.

    Args:
        grads: Tensors keyed by name.
        like: Tensor whose device holds the zero returned for empty ``grads``.

    Returns:
        Scalar tensor.
    """
    if not grads:
        return torch.zeros(()) if like is None else torch.zeros((), device=like.device)
    values = list(grads.values())
    # one kernel launch for many parameters, without storing their squares
    each = torch._foreach_norm(values, 2, dtype=wide(reduce(torch.promote_types, (v.dtype for v in values))))
    norms: Tensor = torch.linalg.vector_norm(torch.stack(each))
    return norms


def each_its_own(grads: Params) -> Params:
    """Return every gradient dense and with its own storage, so that callers may write to it in place.

    Both terms of a sum have the same gradient, in autograd and in closed forms, and reduced dimensions an expanded one.
    """
    seen: set[int] = set()
    found = Params()
    for name, given in grads.items():
        g = given.to_dense() if given.is_sparse else given
        start = g.untyped_storage().data_ptr()
        shared = start in seen or g.untyped_storage().nbytes() < g.numel() * g.element_size()
        seen.add(start)
        found[name] = g.clone(memory_format=torch.contiguous_format) if shared else g
    return found


def close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have one shape and are equal up to the rounding of sums in another order."""
    if found.shape != expected.shape:
        return False
    allowed = {torch.float64: 1e-6, torch.float32: 1e-3}.get(expected.dtype, 0.05)
    return bool((found - expected).double().norm() <= allowed * expected.double().norm())
