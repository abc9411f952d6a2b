"""Errors of reverse mode, with their cures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from splitfg.errors import SplitError


def require_reverse_mode() -> None:
    """Raise :class:`SplitError` in inference mode, where gradients would be zero without an error."""
    if torch.is_inference_mode_enabled():
        raise SplitError(["reverse mode does not work under torch.inference_mode(): leave it, or use SplitFG()"])


@contextmanager
def explained_reverse() -> Iterator[None]:
    """Turn errors of torch about reverse mode into a :class:`SplitError` with a cure."""
    try:
        yield
    except NotImplementedError as error:
        cure = "use SplitFG(engine=CentralDifference()), or write it with other operators"
        raise SplitError([f"torch has no backward rule for an operator of the trunk ({error}): {cure}"]) from error
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            words = "the trunk checkpoints its activations in a way that torch.autograd.grad does not support"
            raise SplitError([f"{words}: pass use_reentrant=False to torch.utils.checkpoint.checkpoint"]) from error
        if "Inference tensors" in str(error):
            words = "inputs or constants of the trunk were made under torch.inference_mode()"
            raise SplitError([f"{words}, and reverse mode cannot save them: use .clone() on them"]) from error
        raise
