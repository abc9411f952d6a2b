"""Recording of a forward pass: hooks at leaf modules, and a mode that sees every function between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from splitfg.calling import version_of
from splitfg.errors import SplitError
from splitfg.numerics import outside_inference_mode
from splitfg.sites._functional import attention_in_parts, dot_product_in_parts, linear_arguments, linear_layer
from splitfg.sites._nested import mapped, tensors_in
from splitfg.sites._recurrent import is_recurrent, recurrent_in_parts
from splitfg.sites._tape import Alter, Operation, Store, Tape, is_activation, is_differentiable, is_leaf
from splitfg.splitting import original


def record_tape(
    trunk: nn.Module, run: Callable[[], Tensor], trained: Mapping[int, str], *, alter: Alter | None = None
) -> Tape:
    """Run a trunk once and record its operations. No autograd graph is built, and no parameter is changed.

    Args:
        trunk: Its leaf modules are recorded as they are; other modules are recorded by the functions they call.
        run: Runs the trunk once and returns h.
        trained: From ``id`` of a trained parameter to its name.
        alter: Replaces the output of an operation, to perturb it.

    Raises:
        SplitError: An operation writes in place over one of its inputs.
    """
    tape = Tape()
    tape.h = record_into(tape, trunk, run, trained, alter)
    return tape


def record_into(
    store: Store, trunk: nn.Module, run: Callable[[], Tensor], trained: Mapping[int, str], alter: Alter | None = None
) -> Tensor:
    """Run a trunk once, record its operations into a store, and return h; see :func:`record_tape`."""
    mode = _Recorder(store, trunk, trained, alter)
    with outside_inference_mode(), torch.no_grad(), _leaf_hooks(trunk, mode), mode:
        h = run()
    mode.require_unwritten([h])
    return h


class _Recorder(TorchFunctionMode):
    def __init__(self, store: Store, trunk: nn.Module, trained: Mapping[int, str], alter: Alter | None) -> None:
        super().__init__()
        self._store, self._trained, self._alter = store, trained, alter
        named = [*trunk.named_parameters(), *trunk.named_buffers()]
        self._weights = {id(t): name for name, t in named if t.ndim == 2}
        self._written: dict[int, tuple[Tensor, str]] = {}
        self.inside = 0
        self.callers: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        self.require_unwritten(given)
        if not any(self._depends(t) for t in given):
            return func(*args, **kwargs)
        plain = _OUT_OF_PLACE.get(getattr(func, "__name__", ""))
        if plain is not None:
            return self._written_aside(plain, args, kwargs)
        if operation_name(func) in _DROPOUTS:
            return self._dropped(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return self._in_parts(attention_in_parts, args, kwargs)
        if func is F.scaled_dot_product_attention and (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)):
            return self._in_parts(dot_product_in_parts, args, kwargs)
        if is_recurrent(operation_name(func)):
            return self._in_parts(partial(recurrent_in_parts, operation_name(func)), args, kwargs, "the layer")
        if func is F.linear and id(linear_arguments(args, kwargs)[1]) in self._weights:
            return self._linear(*linear_arguments(args, kwargs))
        # a constant that an activation is written into would hide it from the tape, so constants count too
        versions = [version_of(t) for t in given]
        output = func(*args, **kwargs)
        name = operation_name(func)
        if [version_of(t) for t in given] != versions:
            raise SplitError([self._in_place(name)])
        if any(output is t for t in given):  # dropout in evaluation mode, a cast to the same dtype
            return output
        return self.record(Operation(name, None, tuple(args), kwargs, output), active=True)

    def _written_aside(self, plain: Any, args: Any, kwargs: Any) -> Any:
        """Compute a new tensor instead of writing over an activation, and record that."""
        output = plain(*args, **kwargs)
        if output.dtype != args[0].dtype or output.shape != args[0].shape:
            raise SplitError([self._in_place(operation_name(plain))])
        self.mark_written(args[0], operation_name(plain))
        return self.record(Operation(operation_name(plain), None, tuple(args), kwargs, output), active=True)

    def mark_written(self, t: Tensor, name: str) -> None:
        """Remember a tensor that an operation of the trunk writes over: its memory holds the value from before."""
        self._written[_memory(t)] = t, name

    def require_unwritten(self, given: Sequence[Tensor]) -> None:
        """Raise an error if the trunk reads memory that it has written over."""
        for t in given if self._written else ():
            if _memory(t) in self._written:
                raise SplitError([self._in_place(self._written[_memory(t)][1])])

    def _dropped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record dropout as the product with its mask, which the same random numbers give for an input of ones."""
        x, *rest = args if args else (kwargs["input"],)
        ones = torch.ones_like(x)
        mask = func(ones, *rest[:2], **{name: v for name, v in kwargs.items() if name not in ("input", "inplace")})
        if mask is ones:  # evaluation mode
            return x
        if _drops_in_place(args, kwargs):
            self.mark_written(x, operation_name(func))
        return self.record(Operation("mul", None, (x, mask), {}, x * mask), active=True)

    def _in_parts(self, function: Callable[..., Any], args: Any, kwargs: Any, kind: str = "attention") -> Any:
        """Record attention, or a recurrent layer, as the functions that it consists of."""
        try:
            with self:
                return function(*args, **kwargs)
        except NotImplementedError as error:
            words = f"{kind} has no closed form for {error}: leave these settings out, or use SplitFG()"
            raise SplitError([f"{self.caller}: {words}"]) from error

    @property
    def caller(self) -> str:
        """Name and class of the innermost module that is being called."""
        return self.callers[-1] if self.callers else "the trunk"

    def _in_place(self, what: str) -> str:
        return f"{self.caller}: the trunk writes in place ({what}): use the operation that returns a new tensor"

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """Record W x + b as a layer of its own, named by its weight."""
        trains = id(weight) in self._trained
        own = bias is None or (id(bias) in self._trained if trains else not self._depends(bias))
        layer, name = linear_layer(weight, bias if own else None), self._weights[id(weight)]
        output = layer.forward(x)
        z = self.record(Operation(name, layer, (x,), {}, output, _autocast(output)), active=trains)
        if own:
            return z
        with self:  # a bias that is computed, or only one of weight and bias is trained
            return z + bias

    def record(self, operation: Operation, *, active: bool) -> Any:
        """Put an operation on the tape, and return the value with which the pass continues."""
        outputs = [t for t in tensors_in(operation.output) if is_differentiable(t)]
        if not outputs or not (active or any(self._depends(t) for t in tensors_in((operation.args, operation.kwargs)))):
            return operation.output
        _require_rows(operation)
        output = operation.output
        if self._alter is not None:
            output = self._alter(self._store.count, output)
        # copies of lists among the arguments, to which the trunk may append later
        args, kwargs = mapped(Tensor, lambda value: value, (operation.args, dict(operation.kwargs)))
        caller = self.caller if operation.module is None else ""
        name, module, autocast = operation.name, operation.module, operation.autocast
        self._store.add(Operation(name, module, args, kwargs, output, autocast, caller))
        if isinstance(output, Tensor):
            return output
        return mapped(Tensor, self._part, output)

    def _part(self, t: Tensor) -> Any:
        """Give one of several outputs a place of its own, where noise can be added for the layers that read it."""
        if not is_differentiable(t):
            return t
        with torch._C.DisableTorchFunction():
            part = t.view_as(t)
        return self.record(Operation("view", None, (t,), {}, part), active=True)

    def trains(self, module: nn.Module) -> bool:
        """Whether a module holds a trained parameter."""
        return any(id(p) in self._trained for p in module.parameters())

    def _depends(self, t: Tensor) -> bool:
        return id(t) in self._trained or self._store.is_active(t)


@contextmanager
def _leaf_hooks(trunk: nn.Module, mode: _Recorder) -> Iterator[None]:
    handles = []
    for name, module in trunk.named_modules():
        if is_leaf(module):
            # next to the forward pass itself: the tape records what other hooks do as functions
            copied: list[Tensor] = []
            handles.append(module.register_forward_pre_hook(_entered(mode, copied)))
            left = _left(mode, name, list(module.parameters()), copied)
            handles.append(module.register_forward_hook(left, prepend=True, with_kwargs=True, always_call=True))
        else:
            label = f"{name or 'the trunk'} ({type(original(module)).__name__})"
            handles.append(module.register_forward_pre_hook(_called(mode, label), prepend=True))
            handles.append(module.register_forward_hook(_returned(mode), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _called(mode: _Recorder, label: str) -> Callable[..., None]:
    return lambda *_: mode.callers.append(label)


def _returned(mode: _Recorder) -> Callable[..., None]:
    return lambda *_: mode.callers.__delitem__(-1)


def _entered(mode: _Recorder, copied: list[Tensor]) -> Callable[..., Any]:
    """Return a hook that gives an activation that writes in place a copy of its input, and stores the input."""

    def hook(module: nn.Module, args: Any) -> Any:
        mode.inside += 1
        mode.require_unwritten(tensors_in(args))
        if not (is_activation(module) and getattr(module, "inplace", False) and args):
            return None
        copied.append(args[0])
        return (args[0].clone(), *args[1:])

    return hook


def _left(mode: _Recorder, name: str, own: Sequence[Tensor], copied: list[Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        mode.inside -= 1
        if output is None:  # the module raised
            return None
        if copied:
            args = (copied.pop(), *args[1:])
            mode.mark_written(args[0], name)
        if any(p is not q for p, q in zip(module.parameters(), own, strict=True)):
            raise SplitError(
                [
                    f"{name} ({type(module).__name__}) runs with parameters that are not its own: call it directly, not"
                    " through functional_call"
                ]
            )
        if any(output is t for t in tensors_in((args, kwargs))) and not isinstance(module, nn.Identity):
            raise SplitError([f"{name} ({type(module).__name__}) writes in place: make it with inplace=False"])
        if isinstance(module, nn.Identity):
            return None
        operation = Operation(name, module, args, kwargs, output, _autocast(output))
        return mode.record(operation, active=mode.trains(module))

    return hook


@lru_cache(maxsize=1024)  # torch takes longer to find a name than to run a small operation
def operation_name(func: Any) -> str:
    """Return the plain name of a torch function: ``add`` for ``torch.add``, ``Tensor.__add__`` and ``Tensor.add``."""
    full: str = resolve_name(func) or getattr(func, "__name__", str(func))
    parts = full.split(".")
    name = parts[-2] if parts[-1] == "__get__" else parts[-1]
    plain = name.strip("_")
    return _OPERATORS.get(plain, plain)


_OPERATORS = {"truediv": "div", "rtruediv": "rdiv", "radd": "add", "rmul": "mul", "rsub": "rsub", "multiply": "mul"}


_OUT_OF_PLACE: dict[str, Any] = {
    **{f"__i{name}__": getattr(torch.Tensor, f"__{name}__") for name in ("add", "sub", "mul", "truediv")},
    **{f"{name}_": getattr(torch.Tensor, name) for name in ("add", "sub", "mul", "div", "masked_fill", "clamp")},
    **{f"{name}_": getattr(torch.Tensor, name) for name in ("index_add", "scatter", "scatter_add")},
}
"""Operations that write over their first argument, each with the one that returns a new tensor."""


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")


def _drops_in_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[3] if len(args) > 3 else kwargs.get("inplace", False))


def _autocast(value: Any) -> torch.dtype | None:
    """Return the dtype of autocast on the device of a value, where that is on."""
    tensors = tensors_in(value)
    if not tensors or not torch.is_autocast_enabled(tensors[0].device.type):
        return None
    return torch.get_autocast_dtype(tensors[0].device.type)


def _memory(t: Tensor) -> int:
    """Return the address of a tensor's memory, also of one that forward mode has wrapped."""
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(t):
            t = torch._C._functorch.get_unwrapped(t)
        return t.untyped_storage().data_ptr()


def _require_rows(operation: Operation) -> None:
    """Raise an error if a layer reads one sample without a dimension of rows."""
    module = operation.module
    if isinstance(module, nn.Linear):
        dims = 2
    elif isinstance(module, nn.modules.conv._ConvNd):
        dims = module.weight.ndim
    else:
        return
    if operation.input.ndim < dims:
        words = f"{operation.name} reads a tensor of shape {tuple(operation.input.shape)}, without a dimension of rows"
        raise SplitError([f"{words}: call it on x.unsqueeze(0), and use .squeeze(0) on what it returns"])
