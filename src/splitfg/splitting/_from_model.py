"""Split an existing model at a module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from splitfg.errors import SplitError, raise_if
from splitfg.heads import CrossEntropy, Head, LinearHead, OutputLoss, ReverseModeHead, has_closed_form
from splitfg.splitting._cut import cut_at, graph_of, is_readout, last_linear
from splitfg.splitting._replace import submodule, without
from splitfg.splitting._split import Split, Tied
from splitfg.splitting._wrappers import wrapper_problems
from splitfg.types import Inputs


def split(
    model: nn.Module,
    at: str | None = None,
    *,
    loss: OutputLoss | None = None,
    head: Callable[[nn.Module, OutputLoss], Head] | None = None,
    tied: Tied | str | None = None,
    example: Inputs | None = None,
    check: bool = True,
) -> Split:
    """Split a model at one of its modules.

    Without ``at`` the last linear layer becomes the head, in closed form. With ``at``, the named module and everything
    after it become the head, differentiated by reverse mode confined to the head, or probed (``head=ProbedHead``). The
    last linear layer is the one called last if the model can be traced symbolically, else the one defined last.

    A model from :func:`torch.compile` is replaced by its original. Modules and attributes that are set in the model
    later take effect after a split at the last linear layer; other splits keep the model as it was traced.

    Use ``.detach()`` to treat values inside a trunk as constants: forward mode passes through ``torch.no_grad()``
    blocks, and estimators that use it raise on the first batch if h depends on such a block. That batch compares one
    directional derivative with a finite difference; ``check=False`` skips this and all other validations that run the
    network.

    Args:
        model: The network; the split shares its parameters and their names.
        at: Dotted name of the module that reads h; by default the last :class:`torch.nn.Linear`.
        loss: Loss on the model's outputs; cross-entropy by default.
        head: Makes the head from the part after h, e.g. ``ReverseModeHead`` or ``ProbedHead``.
        tied: Policy for parameters that trunk and head share.
        example: Inputs to validate the cut with now; by default the first batch validates it.
        check: Whether the first batch validates the network numerically: its cut, its determinism, and its derivatives.

    Returns:
        The split, with ``split.model is model``.

    Raises:
        SplitError: If there is no such module, or the part after it reads other values than h.

    Example:
        >>> from torch import nn
        >>> import splitfg
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> splitfg.split(model)
        Split(trunk=112, head=27)
        >>> splitfg.split(model, at="2", loss=splitfg.SquaredError())
        Split(trunk=40, head=99)
    """
    raise_if(_argument_problems(model, at, head))
    model, loss = getattr(model, "_orig_mod", model), loss if loss is not None else CrossEntropy()
    graph = graph_of(model)
    name = at if at is not None else last_linear(model, graph)
    if not name:
        raise SplitError(["the model contains no nn.Linear to cut at: name a module with at=..."])
    layer = submodule(model, name)
    if head is None and is_readout(model, name, graph) and has_closed_form(layer):
        assert isinstance(layer, nn.Linear)
        result = Split(without(model, name), LinearHead(layer, loss=loss), tied=tied, model=model, check=check)
    elif head is None and at is None:
        raise SplitError([_no_closed_form(name, layer)])
    else:
        trunk, rest = cut_at(model, name)
        result = Split(trunk, (head or ReverseModeHead)(rest, loss), tied=tied, model=model, check=check)
    problem = None if example is None else result.disagreement(example)
    raise_if([] if problem is None else [problem])
    return result


def _argument_problems(model: object, at: object, head: object) -> list[str]:
    found = []
    if not isinstance(model, nn.Module):
        found.append(f"the model is a {type(model).__name__}, not an nn.Module: for a function use BlackBoxTrunk")
    elif isinstance(model, torch.jit.ScriptModule):
        found.append("the model is scripted and cannot be cut: split the module that it was scripted from")
    elif any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        found.append("the model has lazy layers without a shape: run one batch through it first")
    else:
        found += wrapper_problems([model])
    if not isinstance(at, str | None):
        found.append(f"at is {at!r}: pass the module's name as a string, such as at={str(at)!r}")
    if isinstance(head, nn.Module):
        found.append("head is a module: pass a class such as head=ReverseModeHead, or use Split(trunk, head)")
    return found


def _no_closed_form(name: str, layer: nn.Module) -> str:
    return (
        f"the last linear layer, {name} ({type(layer).__name__}), overrides nn.Linear's forward or weight, so that its"
        f" gradient has no known closed form: pass at={name!r} to differentiate it by reverse mode"
    )
