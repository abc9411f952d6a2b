"""Errors of torch's compiler, with a cure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from splitfg.compiled._recorder import Compile
from splitfg.errors import SplitError


def with_explained_errors(compile_: Compile) -> Compile:
    """Return a ``compile_`` whose functions raise :class:`~splitfg.SplitError` where torch's compiler fails.

    Drops the compiler's own error with its frames, and restores the state of torch's dispatcher: after a failure inside
    forward mode, the frames hold guards that change it whenever they are freed, and all later passes with tangents
    would fail.

    Args:
        compile_: Compiles a function.
    """

    def explained(function: Callable[..., Any]) -> Callable[..., Any]:
        run = compile_(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _same_dispatcher():
                try:
                    return run(*args, **kwargs)
                except RuntimeError as error:
                    if not _is_of_compiler(error):
                        raise
                    words = _reason(error)
                    _drop(error)
            raise SplitError(
                [
                    f"torch's compiler fails on this network ({words}): use a GradientLearner without CapturedLearner,"
                    " or pass compile_=None to CapturedLearner"
                ]
            )

        return call

    return explained


def _same_dispatcher() -> AbstractContextManager[object]:
    """Restore the dispatch keys of this thread afterwards."""
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[object] = torch._C._ForceDispatchKeyGuard(*keys)
    return guard


def _is_of_compiler(error: Exception) -> bool:
    errors = sys.modules.get("torch._dynamo.exc")
    return errors is not None and isinstance(error, errors.TorchDynamoException)


def _reason(error: Exception) -> str:
    """Return the first line of a message, and the explanation that follows it, if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explanations = [line for line in lines if line.startswith("Explanation:")]
    return "; ".join(dict.fromkeys(line[:200] for line in (*lines[:1], *explanations[:1]))) or type(error).__name__


def _drop(error: BaseException | None) -> None:
    """Forget the frames of an error and of those that led to it."""
    while error is not None:
        error.__traceback__, later = None, error.__cause__ or error.__context__
        error.__cause__ = error.__context__ = None
        error = later
