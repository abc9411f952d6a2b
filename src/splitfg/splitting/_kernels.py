"""Kernels with a forward-mode rule, for passes that carry tangents."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from splitfg.splitting._norms import TangentNorms, has_reduced_precision

_LOGGER = logging.getLogger("splitfg")
_WATCHED: WeakSet[nn.Module] = WeakSet()


@contextmanager
def tangent_kernels(*parts: nn.Module) -> Iterator[None]:
    """Use kernels that have a forward-mode rule while tangents are pushed, and any kernel otherwise.

    Attention runs as matmul and softmax, and modules of torch run without their fused path for evaluation. Parts with
    an LSTM, GRU or RNN also run without oneDNN and cuDNN, whose kernels for them have no rule; weight norm and the
    grouped products of experts are written out. Parts of reduced precision compute norms in float32. The first such
    pass of a process logs it.
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
        if any(_is_written_out(module) for part in parts for module in part.modules()):
            stack.enter_context(_WrittenOut())
        if has_reduced_precision(*parts):
            stack.enter_context(TangentNorms())
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


def _is_written_out(module: nn.Module) -> bool:
    """Whether a module calls an operator of :class:`_WrittenOut`: weight norm, old or new, or experts."""
    kind = type(module).__name__
    hooks = (type(hook).__name__ for hook in module._forward_pre_hooks.values())
    return kind == "_WeightNorm" or "Experts" in kind or "WeightNorm" in hooks


class _WrittenOut(TorchFunctionMode):
    """Computes operators without a forward-mode rule from others that have one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(str(getattr(func, "__name__", "")))
        return (rule or func)(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g v / ‖v‖, with one norm for every index of a dimension."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _grouped_product(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x_r W_g for rows r of every group g.

    Args:
        x: Rows ``(S, n)``, sorted by group.
        weight: ``(G, n, m)``.
        offs: ``(G,)``, the row after the last one of every group.
        bias: Not supported by torch either.
        out_dtype: Dtype of the result.
    """
    if offs is None or bias is not None or (x.ndim, weight.ndim) != (2, 3):
        raise NotImplementedError("Trying to use forward AD with _grouped_mm that does not support it")
    ends = [int(end) for end in offs]
    groups = [x[first:last] @ weight[g] for g, (first, last) in enumerate(pairwise([0, *ends]))]
    product = torch.cat([*groups, x.new_zeros(len(x) - ends[-1], weight.shape[-1])])
    return product if out_dtype is None else product.to(out_dtype)


_RULES: dict[str, Any] = {
    "_weight_norm": _weight_norm,
    "grouped_mm": _grouped_product,
    "_grouped_mm": _grouped_product,
    "grouped_mm_fallback": _grouped_product,
}


def _disable(library: Any, stack: ExitStack) -> None:
    """Disable a library until the stack closes; its own context manager would also set flags of other devices."""
    stack.callback(setattr, library, "enabled", library.enabled)
    library.enabled = False
