"""Validate numerically that activity tangents explain what the weights of a trunk do to every row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from splitfg.sites._activities import Activities
from splitfg.sites._layers import layer_gradients, under
from splitfg.sites._recorder import TapPoints, record
from splitfg.sites._taps import each_row, shifted, tapped
from splitfg.splitting import Split
from splitfg.types import Inputs, Params, TrunkFunction

# Relative errors that rounding explains; finite differences are less exact.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 0.1
_TF32 = 0.02

Derivative = Callable[[TrunkFunction, Params, Params], Tensor]
"""From a function, its argument and a direction to the directional derivative."""


def activity_problems(
    split: Split, chosen: Activities, x: Inputs, derivative: Derivative, *, exact: bool = True
) -> list[str]:
    """List reasons why estimates from noise at the outputs of layers would be biased.

    A random change v of the layers' parameters changes their outputs z_l by e_l to first order, at fixed inputs. Then

        <layer_gradients(a_l, δ), v_l> = <δ, e_l>    for every layer and any δ,
        dtop/dθ v = Σ_l dtop/dz_l e_l                if no parameter is used outside its layer,

    and noise in some rows must not move the other rows of the top.

    Args:
        split: The network.
        chosen: Layers, top and rows.
        x: Inputs.
        derivative: Computes a directional derivative of the top.
        exact: Whether it does so up to rounding.
    """
    case = _case(split, chosen, x)
    p = next(iter(case.change.values()), torch.empty(0))
    allowed = _rounding(split, case) if exact else _COARSE
    found = [problem for name in case.inputs for problem in _layer_problems(split, case, name, allowed)]
    if found or not case.inputs:
        return found
    sides = _sides(next(iter(case.moved.values())).shape[: chosen.rows], p.device)
    noise = [{n: _masked(e, side) for n, e in case.moved.items()} for side in sides]
    responses = [derivative(case.by_outputs, case.still, e) for e in noise]
    if any(_mixes(r, side, allowed) for r, side in zip(responses, sides, strict=True)):
        return [_mixing(chosen)]
    by_weights = derivative(case.by_weights, case.params, case.change)
    if _close(sum(responses, torch.zeros_like(by_weights)), by_weights, allowed):
        return []
    return [_elsewhere(case, name) for name in _misused(split, case, derivative, allowed)]


def _rounding(split: Split, case: _Case) -> float:
    """Return the relative error that the narrowest dtype of the trunk explains, that of frozen parameters included."""
    tensors = [*split.all_trunk_params().values(), *case.outputs.values()]
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    tf32 = any(t.is_cuda for t in tensors) and torch.get_float32_matmul_precision() != "highest"
    return max((max(_ROUNDING.get(d, _COARSE), _TF32 * tf32) for d in dtypes), default=_COARSE)


@dataclass(frozen=True)
class _Case:
    """A change of parameters, by the model's names, and what it changes in the outputs of the layers."""

    inputs: Params
    outputs: Params
    moved: Params
    params: Params
    change: Params
    names: Mapping[str, Mapping[str, str]]
    by_outputs: TrunkFunction
    by_weights: TrunkFunction

    @property
    def still(self) -> Params:
        return {name: torch.zeros_like(e) for name, e in self.moved.items()}


def _case(split: Split, chosen: Activities, x: Inputs) -> _Case:
    names = chosen.names(split.trunk)
    outputs: Params = {}
    with tapped(split.trunk, names, lambda name, _, z: outputs.update({name: z.clone()})):
        seen = record(split, x, TapPoints(names), None)
    rows = seen.h.shape[0]
    inputs = {name: each_row(seen.reads[name][0], rows) for name in names if len(seen.reads.get(name, ())) == 1}
    outputs = {name: each_row(z, rows) for name, z in outputs.items()}
    outer, trained = {id(p): name for name, p in split.model.named_parameters()}, split.trunk_params()
    owned = {
        name: {
            inner: outer[id(p)]
            for inner, p in split.trunk.get_submodule(name).named_parameters()
            if outer[id(p)] in trained
        }
        for name in inputs
    }
    params = {name: trained[name] for own in owned.values() for name in own.values()}
    draws = torch.Generator().manual_seed(0)
    change = {n: torch.randn(p.shape, generator=draws).to(p) * _scale(p) for n, p in params.items()}
    for name, own in owned.items():
        layer = split.trunk.get_submodule(name)
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None and own:
            change[own["weight"]][layer.padding_idx] = 0  # torch never trains that row
    moved = _all_moved(split, inputs, owned, change)
    run = split.trunk_function(x)
    by_outputs = shifted(split.trunk, partial(run, {}), inputs, chosen.top)

    def by_weights(params: Params) -> Tensor:
        return shifted(split.trunk, partial(run, params), (), chosen.top)({})

    return _Case(inputs, outputs, moved, params, change, owned, by_outputs, by_weights)


def _scale(p: Tensor) -> float:
    """Return the typical size of a parameter, so that no layer hides the others; 1 if it is zero."""
    size = p.double().square().mean().sqrt().item() if p.numel() else 0.0
    return size or 1.0


def _all_moved(split: Split, inputs: Params, names: Mapping[str, Mapping[str, str]], change: Params) -> Params:
    """Return the change of every layer's output to first order, at fixed inputs."""
    return {
        n: _moved(split.trunk.get_submodule(n), a, {inner: change[outer] for inner, outer in names[n].items()})
        for n, a in inputs.items()
    }


class _Bare(nn.Module):
    """A layer without its hooks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, a: Tensor) -> Tensor:
        z: Tensor = self.layer.forward(a)
        return z


def _moved(layer: nn.Module, a: Tensor, change: Params) -> Tensor:
    """Return the change of a layer's output to first order, at a fixed input."""
    bare, own = _Bare(layer), dict(layer.named_parameters())
    params = {f"layer.{name}": own[name].detach() for name in change}

    def run(params: Params) -> Tensor:
        buffers = {name: b.clone() for name, b in bare.named_buffers()}  # batch norm writes to them
        z: Tensor = functional_call(bare, {**params, **buffers}, (a.clone(),))
        return z

    moved: Tensor = jvp(run, (params,), ({f"layer.{name}": v for name, v in change.items()},))[1]
    return moved


def _layer_problems(split: Split, case: _Case, name: str, allowed: float) -> list[str]:
    layer, a, e = split.trunk.get_submodule(name), case.inputs[name], case.moved[name]
    if not _close(_Bare(layer)(a.clone()), case.outputs[name], allowed):
        cure = "remove the hook, or compute its effect in a module of its own after the layer"
        return [f"a hook changes the output of {name} ({type(layer).__name__}), which its gradient ignores: {cure}"]
    delta = torch.randn(e.shape, generator=torch.Generator().manual_seed(1)).to(e)
    change = under(name, {inner: case.change[outer] for inner, outer in case.names[name].items()})
    grads = under(name, layer_gradients(layer, a, delta))
    terms = [(grads[n] * v).double() for n, v in change.items() if n in grads]
    size = sum(t.norm().item() for t in terms) + (delta * e).double().norm().item()
    difference = sum(t.sum().item() for t in terms) - (delta * e).double().sum().item()
    if abs(difference) <= 10 * allowed * size:
        return []
    cure = "correct its layer_gradients(a, delta), or leave it out with Activities(layers=...)"
    return [f"{name} ({type(layer).__name__}) returns wrong gradients of its parameters: {cure}"]


def _sides(rows: torch.Size, device: torch.device) -> list[Tensor]:
    """Divide the rows into two parts at random; one part if there is a single row."""
    count = rows.numel()
    if count < 2:
        return [torch.ones(rows, dtype=torch.bool, device=device)]
    side = torch.zeros(count, dtype=torch.bool)
    side[torch.randperm(count, generator=torch.Generator().manual_seed(2))[: count // 2]] = True
    side = side.reshape(rows).to(device)
    return [side, ~side]


def _masked(e: Tensor, side: Tensor) -> Tensor:
    return e * side.reshape(*side.shape, *[1] * (e.ndim - side.ndim)).to(e.dtype)


def _mixes(response: Tensor, side: Tensor, allowed: float) -> bool:
    """Whether noise in some rows moves the others."""
    return bool(response[~side].double().norm() > allowed * response.double().norm())


def _close(a: Tensor, b: Tensor, allowed: float) -> bool:
    a, b = a.double(), b.double()
    return a.shape == b.shape and bool((a - b).norm() <= allowed * torch.maximum(a.norm(), b.norm()))


def _mixing(chosen: Activities) -> str:
    top = "h" if chosen.top is None else f"the input of {chosen.top}"
    return (
        f"rows of a batch mix on the way to {top}: the activations of one row move {top} of another, and scores by row"
        " would be biased. Use SplitFG, or name the module up to which rows stay apart with Activities(top=...)"
    )


def _misused(split: Split, case: _Case, derivative: Derivative, allowed: float) -> list[str]:
    """Return the layers whose parameters do more than their own output explains; all, if none does so by itself."""
    found = []
    for name in case.moved:
        own = set(case.names[name].values())
        change = {n: v if n in own else torch.zeros_like(v) for n, v in case.change.items()}
        noise = _all_moved(split, case.inputs, case.names, change)
        by_outputs = derivative(case.by_outputs, case.still, noise)
        if not _close(by_outputs, derivative(case.by_weights, case.params, change), allowed):
            found.append(name)
    return found or list(case.moved)[:1]


def _elsewhere(case: _Case, name: str) -> str:
    listed = ", ".join(case.names[name].values())
    return (
        f"parameters of {name} ({listed}) also act outside its own call, as in F.linear(x, {name}.weight), and noise at"
        " its output misses that part of the gradient: use SplitFG, or choose other layers with Activities(layers=...)"
    )
