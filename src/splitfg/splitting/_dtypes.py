"""Error messages for tensors of different dtypes in one operator."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.splitting._replace import labelled
from splitfg.splitting._split import Split
from splitfg.types import Inputs

# As torch words it for products, convolutions, attention, losses and operators with a result of one dtype.
_MIXED = re.compile(
    r"same (data ?)?type|same dtype|(expected|found) scalar type|(Found|expected) dtype|should be the same|mixed dtype",
    re.IGNORECASE,
)


def is_about_dtypes(message: str) -> bool:
    """Whether an error of torch says that an operator got tensors of different dtypes."""
    return _MIXED.search(message) is not None


def dtype_problem(error: Exception, split: Split, x: Inputs) -> str | None:
    """Name the module in which a forward pass meets two dtypes; ``None`` if the error has another cause.

    Runs the pass once more, and returns the innermost module that does not complete.
    """
    if not is_about_dtypes(str(error)):
        return None
    running: list[tuple[str, nn.Module, Any]] = []
    handles = []
    for name, module in split.trunk.named_modules():
        handles += [
            module.register_forward_pre_hook(
                lambda m, args, kwargs, name=name: running.append((name, m, (*args, *kwargs.values()))),
                with_kwargs=True,
            ),
            module.register_forward_hook(lambda *_: running.pop() and None),
        ]
    try:
        split.h(x)
    except Exception:
        return _worded(str(error), *running[-1]) if running else None
    finally:
        for handle in handles:
            handle.remove()
    return None


def _worded(message: str, name: str, module: nn.Module, given: tuple[Any, ...]) -> str:
    own = _dtypes(list(module.parameters(recurse=False)))
    read = _dtypes([t for t in given if isinstance(t, Tensor) and t.is_floating_point()])
    facts = f"; its inputs are {read or 'no floats'}, its own parameters {own}" if own else ""
    cure = "convert its parameters, or cast its inputs in forward()"
    return f"{labelled(name, module)} gets tensors of different dtypes ({message.splitlines()[0]}{facts}): {cure}"


def _dtypes(tensors: list[Tensor]) -> str:
    return " and ".join(sorted({_word(t.dtype) for t in tensors}))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tangent_problem(outputs: list[Tensor], tangents: list[Tensor]) -> str | None:
    """Explain an output with a tangent of another dtype, which operators that follow do not take."""
    for output, tangent in zip(outputs, tangents, strict=True):
        if output.dtype != tangent.dtype:
            return (
                f"an operator gives its {_word(output.dtype)} output a tangent in {_word(tangent.dtype)}, which the"
                " next one cannot combine: give it a float32 input, op(x.float()).to(x.dtype), return tangents of the"
                " output's dtype from a jvp of your own, or use engine=CentralDifference()"
            )
    return None
