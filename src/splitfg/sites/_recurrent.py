"""Recurrent layers as the linear layers, products and activations that they consist of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

State: TypeAlias = tuple[Tensor, ...]
"""h, or h and c of an LSTM."""

Cell: TypeAlias = Callable[[Tensor, Tensor, State], State]
"""From the products of input and h with their weights, and the state, to the next state."""


def _gru(x: Tensor, y: Tensor, state: State) -> State:
    (xr, xz, xn), (yr, yz, yn), (h,) = x.chunk(3, -1), y.chunk(3, -1), state
    n = torch.tanh(xn + torch.sigmoid(xr + yr) * yn)
    return (n + torch.sigmoid(xz + yz) * (h - n),)


def _lstm(x: Tensor, y: Tensor, state: State) -> State:
    i, f, g, o = (x + y).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


_CELLS: dict[str, Cell] = {
    "gru": _gru,
    "lstm": _lstm,
    "rnn_tanh": lambda x, y, _: (torch.tanh(x + y),),
    "rnn_relu": lambda x, y, _: (torch.relu(x + y),),
}


def is_recurrent(name: str) -> bool:
    """Whether a function of this name runs a recurrent layer or one of its cells."""
    return name.removesuffix("_cell") in _CELLS


def recurrent_in_parts(name: str, *args: Any, **kwargs: Any) -> Any:
    """Compute a function of torch that runs a recurrent layer, such as ``torch.gru``, or a cell, by ``F.linear``.

    Raises:
        NotImplementedError: For arguments without a closed form here.
    """
    if name.endswith("_cell"):
        return _one_step(_CELLS[name.removesuffix("_cell")], *args, **kwargs)
    if len(args) != 9 or isinstance(args[2], Tensor):
        raise NotImplementedError("packed sequences; pad them, and pass the tensor")
    return _all_steps(_CELLS[name], *args)


def _one_step(cell: Cell, x: Tensor, hx: Tensor | State, *weights: Any) -> Tensor | State:
    """Compute one step, as ``torch.gru_cell`` does."""
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    state = hx if isinstance(hx, tuple) else (hx,)
    found = cell(F.linear(x, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
    return found if len(found) > 1 else found[0]


def _all_steps(
    cell: Cell,
    x: Tensor,
    hx: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Compute all steps of all layers, with the arguments of ``torch.gru``."""
    ways, each = 1 + bidirectional, 4 if has_biases else 2
    if len(weights) != layers * ways * each:
        raise NotImplementedError("proj_size")
    starts = zip(*((hx,) if isinstance(hx, Tensor) else hx), strict=True)
    own = (weights[i : i + each] for i in range(0, len(weights), each))
    x, ends = x.transpose(0, 1) if batch_first else x, []
    for layer in range(layers):
        found = [_one_way(cell, x, next(starts), next(own), backwards=bool(way)) for way in range(ways)]
        ends += [end for _, end in found]
        x = torch.cat([outputs for outputs, _ in found], -1) if bidirectional else found[0][0]
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    last = (torch.stack(parts) for parts in zip(*ends, strict=True))
    return x.transpose(0, 1) if batch_first else x, *last


def _one_way(cell: Cell, x: Tensor, state: State, weights: Sequence[Any], *, backwards: bool) -> tuple[Tensor, State]:
    """Return the outputs of a layer in one direction, ``(T, B, d)``, and its last state."""
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    steps, outputs = F.linear(x, w_ih, b_ih).unbind(0), []
    for step in reversed(steps) if backwards else steps:
        state = cell(step, F.linear(state[0], w_hh, b_hh), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state
