"""Split an existing model at a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitfg.errors import SplitError, raise_if
from splitfg.heads import CrossEntropy, Head, LinearHead, OutputLoss, ReverseModeHead, has_closed_form
from splitfg.splitting._cut import cut_at, graph_of, is_readout, last_linear
from splitfg.splitting._hugging_face import (
    classifier_name,
    interface_of,
    is_hugging_face,
    model_problems,
    readout_name,
    substitutes,
)
from splitfg.splitting._interface import Interface
from splitfg.splitting._readout import Kept, PassedOn, postprocessed
from splitfg.splitting._replace import held_beside, replaced, submodule, without
from splitfg.splitting._roles import Tied
from splitfg.splitting._split import Split
from splitfg.splitting._wrappers import wrapper_problems
from splitfg.types import Inputs


def split(
    model: nn.Module,
    at: str | None = None,
    *,
    loss: OutputLoss | None = None,
    head: Callable[[nn.Module, OutputLoss], Head] | None = None,
    tied: Tied | str | None = None,
    output: Callable[[Any], Tensor] | None = None,
    example: Inputs | None = None,
    check: bool = True,
) -> Split:
    """Split a model at one of its modules.

    Without ``at`` the last linear layer becomes the head, in closed form. With ``at``, the named module and everything
    after it become the head, differentiated by reverse mode confined to the head, or probed (``head=ProbedHead``). The
    last linear layer is the one called last if the model can be traced symbolically, else the one defined last.

    A model of Hugging Face's transformers, also one with adapters of peft, takes batches as dicts, such as
    ``{"input_ids": ..., "attention_mask": ..., "labels": ...}``: :meth:`Split.unpack` returns inputs and target, and
    learners call it. The head is its output layer, tied tables get both gradients (``Tied.INCLUDE``), and no cache of
    keys and values is used. Any other model may take keyword inputs as a dict too.

    A model from :func:`torch.compile` is replaced by its original. Modules and attributes that are set in the model
    later take effect after a split at the last linear layer; other splits keep the model as it was traced.

    Use ``.detach()`` to treat values inside a trunk as constants: forward mode passes through ``torch.no_grad()``
    blocks, and estimators that use it raise on the first batch if h depends on such a block. That batch compares one
    directional derivative with a finite difference; ``check=False`` skips this and all other validations that run the
    network.

    Args:
        model: The network; the split shares its parameters and their names.
        at: Dotted name of the module that reads h; by default the last :class:`torch.nn.Linear`. With ``at`` or
            ``head`` the model is traced: numbers in attributes of your own modules, such as a temperature, stay as
            they are. Split the model again after changing one.
        loss: Loss on the model's outputs; cross-entropy by default.
        head: Makes the head from the part after h, e.g. ``ReverseModeHead`` or ``ProbedHead``.
        tied: Policy for parameters that trunk and head share.
        output: From the model's return value to its outputs, if it returns more than these, such as
            ``lambda returned: returned.logits``.
        example: Inputs to validate the cut with now; by default the first batch validates it.
        check: Whether the first batch validates the network numerically: its cut, its determinism, and its derivatives.

    Returns:
        The split, with ``split.model is model``.

    Raises:
        SplitError: If there is no such module, or the part after it reads other values than h.

    Example:
        >>> from torch import fx, nn
        >>> import splitfg
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> splitfg.split(model)
        Split(trunk=112, head=27)
        >>> splitfg.split(model, at="2", loss=splitfg.SquaredError())
        Split(trunk=40, head=99)
    """
    raise_if(_argument_problems(model, at, head))
    model = getattr(model, "_orig_mod", model)
    if is_hugging_face(model):
        interface = replace(interface_of(model), own_loss=loss is None and output is None)
        interface = interface if output is None else replace(interface, output=output)
        tied = Tied.INCLUDE if tied is None else tied
        trunk, made = _cut_hugging_face(model, at, loss, head, interface, named=output is not None)
    else:
        interface = Interface(output)
        trunk, made = _cut_any(model, at, loss if loss is not None else CrossEntropy(), head, interface, check)
    result = Split(trunk, made, tied=tied, model=model, interface=interface, check=check)
    problem = None if example is None else result.disagreement(example)
    raise_if([] if problem is None else [problem])
    return result


def _cut_any(
    model: nn.Module,
    at: str | None,
    loss: OutputLoss,
    head: Callable[[nn.Module, OutputLoss], Head] | None,
    interface: Interface,
    check: bool,
) -> tuple[nn.Module, Head]:
    graph = graph_of(model)
    name = _named_or_last(model, at, graph)
    layer = submodule(model, name)
    if head is None and is_readout(model, name, graph, check=check) and has_closed_form(layer):
        assert isinstance(layer, nn.Linear)
        return without(model, name, interface), LinearHead(layer, loss=loss)
    if head is None and at is None:
        raise SplitError([_no_closed_form(name, layer)])
    trunk, rest = cut_at(model, name)
    if interface.output is not None:
        rest = _WithOutput(rest, interface.output)
    return trunk, (head or ReverseModeHead)(rest, loss)


def _cut_hugging_face(
    model: nn.Module,
    at: str | None,
    loss: OutputLoss | None,
    head: Callable[[nn.Module, OutputLoss], Head] | None,
    interface: Interface,
    *,
    named: bool,
) -> tuple[nn.Module, Head]:
    """Cut at the output layer, which may be anything that ends the model; other layers raise on the first batch."""
    raise_if(model_problems(model, default_loss=loss is None, default_cut=at is None and not named))
    name = at or readout_name(model) or classifier_name(model) or _named_or_last(model, None, None)
    layer, loss = submodule(model, name), loss if loss is not None else CrossEntropy()
    rest = postprocessed(model, layer) if name == readout_name(model) else None
    if rest is not None:
        kept = Kept(layer, layer.get_parameter("weight").shape[0])
        trunk = replaced(
            model, {**substitutes(model), name: kept}, replace(interface, output=kept.taken), held_beside(model, name)
        )
        return trunk, (head or ReverseModeHead)(rest, loss)
    trunk = replaced(model, {**substitutes(model), name: PassedOn(layer)}, interface, held_beside(model, name))
    if head is None and has_closed_form(layer):
        assert isinstance(layer, nn.Linear)
        return trunk, LinearHead(layer, loss=loss)
    return trunk, (head or ReverseModeHead)(layer, loss)


def _named_or_last(model: nn.Module, at: str | None, graph: fx.Graph | None) -> str:
    name = at if at is not None else last_linear(model, graph)
    if not name and isinstance(model, nn.Linear):
        raise SplitError(["the model is a single linear layer, with nothing to cut: train it with any optimizer"])
    if not name:
        raise SplitError(["the model contains no nn.Linear to cut at: name a module with at=..."])
    return name


class _WithOutput(nn.Module):
    """The second part of a model, which returns the outputs alone."""

    def __init__(self, rest: nn.Module, output: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.rest, self._output = rest, output

    def forward(self, h: Tensor) -> Tensor:
        return self._output(self.rest(h))


def _argument_problems(model: object, at: object, head: object) -> list[str]:
    found = []
    if not isinstance(model, nn.Module):
        found.append(f"the model is a {type(model).__name__}, not an nn.Module: for a function use BlackBoxTrunk")
    elif isinstance(model, torch.jit.ScriptModule):
        found.append("the model is scripted and cannot be cut: split the module that it was scripted from")
    elif isinstance(model, fx.GraphModule) and "train" in vars(model):  # torch.export forbids a change of mode
        found.append(
            "the model is exported and cannot be cut: split the module that it was exported from, or export the trunk"
            " alone and build Split(trunk, head)"
        )
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
