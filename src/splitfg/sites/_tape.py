"""A tape of one forward pass: every operation between h and the trained parameters, with what it read and wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from splitfg.errors import SplitError
from splitfg.sites._functional import attention_in_parts, linear_arguments, linear_layer
from splitfg.sites._layers import has_layer_gradients
from splitfg.sites._pullback import has_pull_back

Alter = Callable[[int, Any], Any]
"""From an operation's place on the tape and its output to the output that the pass goes on with."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of a leaf module or of a torch function.

    Attributes:
        name: Dotted name of the module, or the function's own name (``relu``, ``add``, ``matmul``).
        module: The module; ``None`` for a function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: A tensor, or a tuple of tensors.
        autocast: The dtype that autocast gave a module's products; ``None`` without autocast.
    """

    name: str
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    autocast: torch.dtype | None = None

    def run(self, a: Tensor) -> Any:
        """Return what the module writes when it reads ``a`` in place of its first argument; runs no hooks."""
        assert self.module is not None
        first = [] if self.args else [next(iter(self.kwargs))]
        args, kwargs = (a, *self.args[1:]) if self.args else (), {**self.kwargs, **dict.fromkeys(first, a)}
        with nullcontext() if self.autocast is None else torch.autocast(a.device.type, self.autocast):
            return self.module.forward(*args, **kwargs)

    @property
    def input(self) -> Tensor:
        """The first argument."""
        first: Tensor = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return first

    def __str__(self) -> str:
        return self.name if self.module is None else f"{self.name} ({type(self.module).__name__})"


@dataclass(eq=False)
class Tape:
    """Operations in the order of their calls, those alone that depend on a trained parameter.

    Attributes:
        operations: The calls.
        h: The result of the pass.
        alone: Runs layers by themselves: from their places on the tape and what they read to what they write; ``None``
            if their modules compute that.
    """

    operations: list[Operation] = field(default_factory=list)
    h: Tensor = field(default_factory=lambda: torch.empty(0))
    alone: Callable[[Mapping[int, Tensor]], Mapping[int, Tensor]] | None = None
    _active: dict[int, Tensor] = field(default_factory=dict)
    _layers: list[tuple[int, Operation]] = field(default_factory=list)
    _searched: int = 0

    @property
    def count(self) -> int:
        """Number of operations."""
        return len(self.operations)

    def is_active(self, value: Any) -> bool:
        """Whether a tensor depends on a trained parameter."""
        return isinstance(value, Tensor) and id(value) in self._active

    def add(self, operation: Operation) -> None:
        """Append an operation that depends on a trained parameter."""
        self.operations.append(operation)
        self._active.update({id(t): t for t in _tensors(operation.output) if _is_differentiable(t)})

    def release(self, place: int) -> None:
        """Let go of what an operation read and wrote; call it from the last operation to the first."""
        for t in _tensors(self.operations[place].output):
            self._active.pop(id(t), None)
            if t is self.h:
                self.h = t.new_empty(0)
        self.operations[place] = replace(self.operations[place], args=(), kwargs={}, output=None)
        self._layers = [(at, operation) for at, operation in self._layers if at != place]

    def layers(self) -> list[tuple[int, Operation]]:
        """Return the calls of layers; see :func:`layer_operations`."""
        for place in range(self._searched, len(self.operations)):
            module = self.operations[place].module
            if module is not None and has_layer_gradients(module) and not has_pull_back(module):
                self._layers.append((place, self.operations[place]))
        self._searched = len(self.operations)
        return self._layers


class Store(Protocol):
    """Takes the operations of a pass that is being recorded."""

    @property
    def count(self) -> int:
        """Number of operations so far."""

    def is_active(self, value: Any) -> bool:
        """Whether a tensor depends on a trained parameter."""

    def add(self, operation: Operation) -> None:
        """Append an operation that depends on a trained parameter."""


@runtime_checkable
class TapedTrunk(Protocol):
    """A trunk that makes its own tape, such as one that runs on a device and can only be read."""

    def tape(self, inputs: tuple[Any, ...], trained: Mapping[int, str], alter: Alter | None = None) -> Tape:
        """Run once and return the tape.

        Args:
            inputs: One batch.
            trained: From ``id`` of a trained parameter to its name.
            alter: Adds to the outputs of operations; called with a scalar zero in place of the output.
        """


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
    mode = _Recorder(store, trained, alter)
    with torch.no_grad(), _leaf_hooks(trunk, mode), mode:
        h = run()
    mode.require_unwritten([h])
    return h


def is_leaf(module: nn.Module) -> bool:
    """Whether a tape records a module as one operation: it has a rule of its own and no modules inside."""
    if next(module.children(), None) is not None:
        return False
    return has_layer_gradients(module) or has_pull_back(module) or is_activation(module)


ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.CELU: "celu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Softplus: "softplus",
    nn.Softsign: "softsign",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardtanh: "hardtanh",
    nn.LogSigmoid: "logsigmoid",
}
"""Activation modules that act on every entry by itself, with the name of their function."""


def is_activation(module: nn.Module) -> bool:
    """Whether a module is one of torch's elementwise activations; a subclass may compute something else."""
    return type(module) in ACTIVATIONS


def layer_operations(tape: Tape) -> list[tuple[int, Operation]]:
    """Return the calls of layers with their places: modules that know their own gradient, norms left out."""
    return tape.layers()


class _Recorder(TorchFunctionMode):
    def __init__(self, store: Store, trained: Mapping[int, str], alter: Alter | None) -> None:
        super().__init__()
        self._store, self._trained, self._alter = store, trained, alter
        self._written: dict[int, Tensor] = {}
        self.inside = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if not any(self._depends(t) for t in given):
            return func(*args, **kwargs)
        self.require_unwritten(given)
        plain = _OUT_OF_PLACE.get(getattr(func, "__name__", ""))
        if plain is not None and self._depends(args[0]):
            return self._written_aside(plain, args, kwargs)
        if operation_name(func) in _DROPOUTS and not _drops_in_place(args, kwargs):
            return self._dropped(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return self._in_parts(args, kwargs)
        if func is F.linear and id(linear_arguments(args, kwargs)[1]) in self._trained:
            return self._linear(*linear_arguments(args, kwargs))
        # a constant that an activation is written into would hide it from the tape, so constants count too
        versions = [t._version for t in given]
        output = func(*args, **kwargs)
        name = operation_name(func)
        if [t._version for t in given] != versions:
            raise SplitError([_in_place(name)])
        if any(output is t for t in given):  # dropout in evaluation mode, a cast to the same dtype
            return output
        return self.record(Operation(name, None, tuple(args), kwargs, output), active=True)

    def _written_aside(self, plain: Any, args: Any, kwargs: Any) -> Any:
        """Compute a new tensor instead of writing over an activation, and record that."""
        output = plain(*args, **kwargs)
        if output.dtype != args[0].dtype or output.shape != args[0].shape:
            raise SplitError([_in_place(operation_name(plain))])
        self.mark_written(args[0])
        return self.record(Operation(operation_name(plain), None, tuple(args), kwargs, output), active=True)

    def mark_written(self, t: Tensor) -> None:
        """Remember a tensor that the trunk writes over: its memory holds the value from before."""
        self._written[_memory(t)] = t

    def require_unwritten(self, given: Sequence[Tensor]) -> None:
        """Raise an error if the trunk reads memory that it has written over."""
        if self._written and any(_memory(t) in self._written for t in given):
            raise SplitError([_in_place("and reads what was there")])

    def _dropped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record dropout as the product with its mask, which the same random numbers give for an input of ones."""
        x, *rest = args if args else (kwargs["input"],)
        ones = torch.ones_like(x)
        mask = func(ones, *rest, **{name: value for name, value in kwargs.items() if name != "input"})
        if mask is ones:  # evaluation mode
            return x
        return self.record(Operation("mul", None, (x, mask), {}, x * mask), active=True)

    def _in_parts(self, args: Any, kwargs: Any) -> Any:
        """Record attention as the functions that it consists of."""
        try:
            with self:
                return attention_in_parts(*args, **kwargs)
        except NotImplementedError as error:
            raise SplitError([f"multi_head_attention_forward has no closed form for {error}"]) from error

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """Record W x + b as a layer of its own, named by its weight."""
        own = bias is None or id(bias) in self._trained
        layer, name = linear_layer(weight, bias if own else None), self._trained[id(weight)]
        output = layer.forward(x)
        z = self.record(Operation(name, layer, (x,), {}, output, _autocast(output)), active=True)
        if own:
            return z
        with self:  # a bias that is computed, or constant
            return z + bias

    def record(self, operation: Operation, *, active: bool) -> Any:
        """Put an operation on the tape, and return what the pass goes on with."""
        outputs = [t for t in _tensors(operation.output) if _is_differentiable(t)]
        if not outputs or not (active or any(self._depends(t) for t in _tensors((operation.args, operation.kwargs)))):
            return operation.output
        output = operation.output
        if self._alter is not None:
            output = self._alter(self._store.count, output)
        # copies of lists among the arguments, to which the trunk may append later
        args, kwargs = pytree.tree_map(lambda value: value, (operation.args, dict(operation.kwargs)))
        operation = replace(operation, args=args, kwargs=kwargs, output=output)
        self._store.add(operation)
        return operation.output

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
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entered(mode: _Recorder, copied: list[Tensor]) -> Callable[..., Any]:
    """Return a hook that gives an activation that writes in place a copy of its input, and stores the input."""

    def hook(module: nn.Module, args: Any) -> Any:
        mode.inside += 1
        mode.require_unwritten(_tensors(args))
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
            mode.mark_written(args[0])
        if any(p is not q for p, q in zip(module.parameters(), own, strict=True)):
            raise SplitError(
                [
                    f"{name} ({type(module).__name__}) runs with parameters that are not its own: call it directly, not"
                    " through functional_call"
                ]
            )
        if any(output is t for t in _tensors((args, kwargs))) and not isinstance(module, nn.Identity):
            raise SplitError([f"{name} ({type(module).__name__}) writes in place: make it with inplace=False"])
        if isinstance(module, nn.Identity):
            return None
        operation = Operation(name, module, args, kwargs, output, _autocast(output))
        return mode.record(operation, active=mode.trains(module))

    return hook


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
}
"""Operations that write over their first argument, each with the one that returns a new tensor."""


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")


def _drops_in_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[3] if len(args) > 3 else kwargs.get("inplace", False))


def _in_place(what: str) -> str:
    return f"the trunk writes in place ({what}): use the operation that returns a new tensor"


def _autocast(value: Any) -> torch.dtype | None:
    """Return the dtype of autocast on the device of a value, where that is on."""
    tensors = _tensors(value)
    if not tensors or not torch.is_autocast_enabled(tensors[0].device.type):
        return None
    return torch.get_autocast_dtype(tensors[0].device.type)


def _memory(t: Tensor) -> int:
    """Return the address of a tensor's memory, also of one that forward mode has wrapped."""
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(t):
            t = torch._C._functorch.get_unwrapped(t)
        return t.untyped_storage().data_ptr()


def _is_differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
