"""Pullbacks of functions that move entries around."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from splitfg.sites._rule_table import Pulled, argument, first_and_rest, rule, summed_to
from splitfg.sites._tape import Operation


@rule(
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "clone",
    "view_as",
    inputs=False,
    output=False,
)
def _same_entries(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta.reshape(operation.input.shape)


@rule("to", "float", "double", "half", "bfloat16", "type_as", inputs=False, output=False)
def _cast(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta.to(operation.input)


@rule("detach", "zeros_like", "ones_like", inputs=False, output=False)
def _detach(operation: Operation, delta: Tensor) -> Pulled:  # noqa: ARG001
    return ()


@rule("expand", "expand_as", "broadcast_to", inputs=False, output=False)
def _expand(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, summed_to(delta, operation.input)


@rule("repeat", inputs=False, output=False)
def _repeat(operation: Operation, delta: Tensor) -> Pulled:
    x, rest, _ = first_and_rest(operation)
    counts = operation.kwargs.get("repeats", rest[0] if len(rest) == 1 and isinstance(rest[0], Sequence) else rest)
    sizes = (*[1] * (len(counts) - x.ndim), *x.shape)
    pairs = [n for pair in zip(counts, sizes, strict=True) for n in pair]
    yield x, delta.reshape(pairs).sum(tuple(range(0, len(pairs), 2))).reshape(x.shape)


@rule("transpose", "swapaxes", "swapdims", inputs=False, output=False)
def _transpose(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta.transpose(argument(operation, 1, "dim0", 0), argument(operation, 2, "dim1", 1))


@rule("mT", "T", "t", inputs=False, output=False)
def _last_two(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta.mT


@rule("roll", inputs=False, output=False)
def _roll(operation: Operation, delta: Tensor) -> Pulled:
    shifts, dims = argument(operation, 1, "shifts", 0), argument(operation, 2, "dims", None)
    back = -shifts if isinstance(shifts, int) else [-shift for shift in shifts]
    yield operation.input, torch.roll(delta, back, dims)


@rule("flip", inputs=False, output=False)
def _flip(operation: Operation, delta: Tensor) -> Pulled:
    x, rest, _ = first_and_rest(operation)
    dims = operation.kwargs.get("dims", rest[0] if len(rest) == 1 and isinstance(rest[0], Sequence) else rest)
    yield x, delta.flip(dims)


@rule("movedim", "moveaxis", inputs=False, output=False)
def _movedim(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta.movedim(argument(operation, 2, "destination", 0), argument(operation, 1, "source", 0))


@rule("pixel_shuffle", inputs=False, output=False)
def _pixel_shuffle(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, F.pixel_unshuffle(delta, argument(operation, 1, "upscale_factor", 1))


@rule("pixel_unshuffle", inputs=False, output=False)
def _pixel_unshuffle(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, F.pixel_shuffle(delta, argument(operation, 1, "downscale_factor", 1))


@rule("permute", inputs=False, output=False)
def _permute(operation: Operation, delta: Tensor) -> Pulled:
    x, rest, _ = first_and_rest(operation)
    dims = operation.kwargs.get("dims", rest[0] if len(rest) == 1 and isinstance(rest[0], Sequence) else rest)
    order = [d % x.ndim for d in dims]
    yield x, delta.permute([order.index(d) for d in range(x.ndim)])


@rule("getitem", inputs=False, output=False)
def _getitem(operation: Operation, delta: Tensor) -> Pulled:
    x, index = operation.args
    indices = index if isinstance(index, tuple) else (index,)
    share = torch.zeros_like(x)
    if all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in indices):
        share[index] = delta
    else:  # tensors, arrays, lists and ranges may read an entry more than once
        places = torch.arange(x.numel(), device=x.device).view(x.shape)[index]
        share.view(-1).index_add_(0, places.reshape(-1), delta.reshape(-1))
    yield x, share


@rule("cat", "concat", inputs=False, output=False)
def _cat(operation: Operation, delta: Tensor) -> Pulled:
    parts, dim = argument(operation, 0, "tensors", ()), argument(operation, 1, "dim", 0)
    parts = [p for p in parts if p.shape != (0,)]  # torch.cat skips these, such as a cache before the first key
    yield from zip(parts, delta.split([p.shape[dim] for p in parts], dim), strict=True)


@rule("stack", inputs=False, output=False)
def _stack(operation: Operation, delta: Tensor) -> Pulled:
    yield from zip(argument(operation, 0, "tensors", ()), delta.unbind(argument(operation, 1, "dim", 0)), strict=True)


@rule("unbind", inputs=False, output=False)
def _unbind(operation: Operation, delta: Sequence[Tensor | None]) -> Pulled:
    yield operation.input, torch.stack(_filled(operation, delta), argument(operation, 1, "dim", 0))


@rule("split", "chunk", "tensor_split", "split_with_sizes", inputs=False, output=False)
def _split(operation: Operation, delta: Sequence[Tensor | None]) -> Pulled:
    yield operation.input, torch.cat(_filled(operation, delta), argument(operation, 2, "dim", 0))


def _filled(operation: Operation, delta: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.zeros_like(o) if d is None else d for o, d in zip(operation.output, delta, strict=True)]


@rule("pad", inputs=False, output=False)
def _pad(operation: Operation, delta: Tensor) -> Pulled:
    x, sizes = operation.input, argument(operation, 1, "pad", ())
    if argument(operation, 2, "mode", "constant") != "constant":
        raise NotImplementedError("padding by entries: pad with a constant")
    for dim, (before, _) in enumerate(zip(sizes[::2], sizes[1::2], strict=True), start=1):
        delta = delta.narrow(-dim, max(before, 0), x.shape[-dim])
        if min(sizes) < 0:
            raise NotImplementedError("negative padding: use slices")
    yield x, delta
