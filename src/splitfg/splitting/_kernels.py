"""Kernels with a forward-mode rule, for passes that carry tangents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def tangent_kernels(*parts: nn.Module) -> Iterator[None]:
    """Use kernels that have a forward-mode rule while tangents are pushed, and any kernel otherwise.

    Attention runs as matmul and softmax, and modules of torch run without their fused path for evaluation. Parts with
    an LSTM, GRU or RNN also run without oneDNN and cuDNN, whose kernels for them have no rule.
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
        yield


def _disable(library: Any, stack: ExitStack) -> None:
    """Disable a library until the stack closes; its own context manager would also set flags of other devices."""
    stack.callback(setattr, library, "enabled", library.enabled)
    library.enabled = False
