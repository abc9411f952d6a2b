"""Parts of a trunk that the tape of a forward pass does not record."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from splitfg.splitting import Split, custom_functions
from splitfg.types import Inputs


def pass_problems(split: Split, x: Inputs) -> list[str]:
    """List unrecorded parts of the trunk: blocks without gradients, and functions with a backward of their own.

    Builds the graph of one pass without what a backward pass would need of it.
    """
    watch, params = _WithoutGradients(), split.trunk_params()
    x = pytree.tree_map_only(Tensor, torch.clone, x)  # a graph cannot hold tensors from inference mode
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda t: t), watch:
            h = split.trunk_function(x)({n: p.detach().requires_grad_() for n, p in params.items()})
    except (RuntimeError, TypeError) as error:
        if "saved tensor" not in str(error):
            raise
        return [
            "the trunk computes gradients in its forward pass, which learned feedback does not follow: use SplitFG(),"
            " or write them as a module with pull_back(x, u)"
        ]
    found = _function_problems(h)
    if watch.functions:
        found.append(
            f"the trunk computes {', '.join(watch.functions)} under torch.no_grad() from values that depend on trained"
            " parameters, which a tape does not see: call .detach() on the result instead"
        )
    return found


class _WithoutGradients(TorchFunctionMode):
    """Records the functions that read values with gradients while gradients are disabled."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled() and isinstance(output, Tensor) and output.is_floating_point():
            leaves = pytree.tree_leaves((args, kwargs))
            if any(isinstance(t, Tensor) and t.requires_grad for t in leaves):
                self.functions[getattr(func, "__name__", str(func))] = None
        return output


def _function_problems(h: Tensor) -> list[str]:
    """List calls of ``torch.autograd.Function``: their own backward may differ from the closed forms of their parts."""
    return [
        f"{name} is a torch.autograd.Function, whose own backward learned feedback does not follow: write it as a"
        " module with pull_back(x, u), or use SplitFG()"
        for name in sorted(custom_functions(h))
    ]
