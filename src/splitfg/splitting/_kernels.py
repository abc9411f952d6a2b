"""Kernels with a forward-mode rule, for passes that carry tangents."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_LOGGER = logging.getLogger("splitfg")
_WATCHED: WeakSet[nn.Module] = WeakSet()


@contextmanager
def tangent_kernels(*parts: nn.Module) -> Iterator[None]:
    """Use kernels that have a forward-mode rule while tangents are pushed, and any kernel otherwise.

    Attention runs as matmul and softmax, and modules of torch run without their fused path for evaluation. Parts with
    an LSTM, GRU or RNN also run without oneDNN and cuDNN, whose kernels for them have no rule. The first such pass of a
    process logs it.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        yield
        return
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        if any(isinstance(module, nn.RNNBase) for part in parts for module in part.modules()):
            for library in (torch.backends.mkldnn, torch.backends.cudnn):
                _disable(library, stack)
        if not _Watch.logged and not all(part in _WATCHED for part in parts):
            _WATCHED.update(parts)
            stack.enter_context(_Watch())
        yield


class _Watch(TorchFunctionMode):
    """Logs the first call of attention; active in the first pass with tangents of every trunk until then."""

    logged = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not _Watch.logged:
            _Watch.logged = True
            _LOGGER.warning(
                "attention runs as matmul and softmax in passes with tangents: fused kernels have no forward-mode rule"
            )
        return func(*args, **(kwargs or {}))


def _disable(library: Any, stack: ExitStack) -> None:
    """Disable a library until the stack closes; its own context manager would also set flags of other devices."""
    stack.callback(setattr, library, "enabled", library.enabled)
    library.enabled = False
