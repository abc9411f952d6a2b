"""Rows for a network: validation, conversion to tensors, held-out parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split
from torch import Tensor

from splitfg.errors import SplitError, raise_if
from splitfg.onnx._trunk import OnnxTrunk
from splitfg.onnx._tuning import Rows

_MIXED = 0.1
"""Relative change of h from other rows that is an error; dynamic quantisation gives less."""


def inputs_of(trunk: OnnxTrunk, X: Any) -> tuple[Tensor, ...]:
    """Return the inputs of a network as tensors, floating-point ones in float32.

    Raises:
        SplitError: If they do not fit its inputs.
    """
    names = trunk.file.inputs
    if isinstance(X, Mapping):
        missing = [name for name in names if name not in X]
        raise_if([f"X lacks the inputs {', '.join(missing)}: the network reads {', '.join(names)}"] if missing else [])
        arrays = [np.asarray(X[name]) for name in names]
    else:
        if len(names) > 1:
            raise SplitError([f"the network has {len(names)} inputs: pass X as a dict with {', '.join(names)}"])
        arrays = [np.asarray(X)]
    found = [problem for name, array in zip(names, arrays, strict=True) for problem in _shape(trunk, name, array)]
    raise_if(found)
    return tuple(torch.as_tensor(a.astype(np.float32) if a.dtype.kind == "f" else a) for a in arrays)


def require_other_file(source: object, path: str | Path) -> None:
    """Raise an error if ``path`` is the file that is tuned."""
    if isinstance(source, str | Path) and Path(path).resolve() == Path(source).resolve():
        raise SplitError([f"{path} is the network that is tuned, which is never written to: choose another name"])


def _shape(trunk: OnnxTrunk, name: str, array: NDArray[Any]) -> list[str]:
    if array.dtype.kind not in "fiub":
        return [f"input {name} holds {array.dtype}, not numbers: encode text and dates first"]
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [f"input {name} contains NaN or infinite values: drop or impute those rows"]
    if array.ndim and not len(array):
        return [f"input {name} has no rows: give at least one"]
    shape = trunk.file.shapes.get(name)
    if shape is None:
        return []
    fits = len(shape) == array.ndim and all(
        want is None or want == have for want, have in zip(shape[1:], array.shape[1:], strict=True)
    )
    wanted = ", ".join("any" if d is None else str(d) for d in shape[1:])
    return [] if fits else [f"input {name} has rows of shape {array.shape[1:]}: the network reads ({wanted})"]


def row_problems(x: Sequence[Tensor], y: NDArray[Any], fraction: float) -> list[str]:
    """List the problems of inputs and targets."""
    found = [] if y.ndim == 1 else [f"targets have shape {y.shape}: pass one target per row"]
    counts = {len(t) for t in x} | {len(y)}
    if len(counts) > 1:
        found.append(f"inputs and targets have different numbers of rows ({', '.join(map(str, sorted(counts)))})")
    elif min(counts) < 4:
        found.append(f"{min(counts)} rows are too few to train on and to hold some out")
    if not 0 <= fraction < 1:
        found.append(f"validation_fraction must be in [0, 1), got {fraction}")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        found.append("targets contain NaN or infinite values: drop those rows")
    return found


def mixing_problems(trunk: OnnxTrunk, x: Sequence[Tensor]) -> list[str]:
    """List whether h of a row depends on the other rows of the batch: then rows cannot have their own noise."""
    both, alone = trunk(*(t[:4] for t in x))[2:], trunk(*(t[2:4] for t in x))
    if (both - alone).abs().max() <= _MIXED * alone.abs().max().clamp_min(1e-6):
        return []
    cures = "use learned_feedback, weights or head, or export it for inference"
    return [f"in {trunk.file.name} the rows of a batch change each other, which activity perturbations forbid: {cures}"]


def divided(rows: Rows, fraction: float, seed: int, *, stratify: bool) -> tuple[Rows, Rows | None]:
    """Return rows to train on and a share to hold out; ``None`` for a share of zero."""
    if not fraction:
        return rows, None
    counts = torch.bincount(rows.y) if stratify else None
    by = rows.y.numpy() if counts is not None and int(counts[counts > 0].min()) > 1 else None
    try:
        train, held = train_test_split(np.arange(len(rows)), test_size=fraction, random_state=seed, stratify=by)
    except ValueError:  # fewer held-out rows than classes
        train, held = train_test_split(np.arange(len(rows)), test_size=fraction, random_state=seed)
    return rows.part(torch.as_tensor(train)), rows.part(torch.as_tensor(held))
