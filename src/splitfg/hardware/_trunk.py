"""A trunk that runs on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from splitfg.errors import NonFiniteError, SplitError, raise_if, shorten
from splitfg.hardware._device import Counts, Device, LayerDevice
from splitfg.hardware._fused import fuse
from splitfg.hardware._wiring import Node, Ref, Wiring, zero
from splitfg.sites import Alter, Operation, Tape
from splitfg.splitting import ForwardOnlyTrunk


class DeviceTrunk(ForwardOnlyTrunk):
    """A trunk h = device(θ, x): only forward runs, additions to tensors, and readings.

    Its parameters are those of the wiring's layers, under their names, so that optimizers and checkpoints find them.
    :class:`~splitfg.LearnedFeedback` trains it from two runs a step,
    :class:`~splitfg.hardware.ActivityPerturbation` from K, and
    ``SplitFG(engine=CentralDifference())`` perturbs its weights.

    Args:
        device: Implements :class:`Device`.
        wiring: Describes it.
        parameters: Further parameters that functions of the wiring use, by name.

    Attributes:
        counts: Runs, inferences (rows run forward) and seconds so far.

    Raises:
        SplitError: If the device lacks a function, or names clash.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.hardware import AnalogDevice, DeviceTrunk, Wiring
        >>> wiring = Wiring.of(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()))
        >>> trunk = DeviceTrunk(AnalogDevice(wiring, bits=6), wiring)
        >>> network = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(8, 3)))
        >>> x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> estimate = splitfg.LearnedFeedback()(network, x, y, generator=torch.Generator().manual_seed(0))
        >>> trunk.counts.runs
        2
    """

    outside: ClassVar[tuple[str, ...]] = ("device", "counts", "_memory")
    """Attributes that passes leave as they are: what a device did cannot be undone."""
    fused: ClassVar[bool] = False
    """Whether the device reads the ends of chains of functions, so that splitfg keeps nothing inside them."""

    def __init__(self, device: Device, wiring: Wiring, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        super().__init__()
        found: list[str] = (
            [] if isinstance(device, Device) else ["the device needs write(params) and run(inputs, add, read)"]
        )
        raise_if(found if isinstance(wiring, Wiring) else [*found, "wiring must be a Wiring: see Wiring.of(...)"])
        self.device, self.wiring, self.counts = device, wiring, Counts()
        self._memory = _Memory()
        _register_all(self, wiring, parameters)

    def forward(self, *inputs: Any) -> Tensor:
        """Return h at the current parameters, without autograd."""
        with torch.no_grad():
            h: Tensor = self.run(inputs, {}, [self.wiring.h])[self.wiring.h]
            return h

    def run(self, inputs: tuple[Any, ...], add: Mapping[str, Tensor], read: Sequence[str]) -> dict[str, Tensor]:
        """Write the parameters if they have changed, run the device, and return what was read as tensors.

        Raises:
            SplitError: The device does not return what it should.
            NonFiniteError: A tensor holds NaN, or h is infinite.
        """
        self._write()
        found = self.counts.timed_run(self.device, inputs, add, read)
        raise_if(_answer_problems(found, read))
        return {name: self._tensor(name, found[name], len(inputs[0])) for name in read}

    def tape(self, inputs: tuple[Any, ...], trained: Mapping[int, str], alter: Alter | None = None) -> Tape:
        """Run once with readings; see :class:`~splitfg.sites.TapedTrunk`."""
        return self._tape(self.places(trained), inputs, alter)

    def _tape(self, nodes: Sequence[Node], inputs: tuple[Any, ...], alter: Alter | None = None) -> Tape:
        add = _amounts(nodes, alter)
        values = dict(zip(self.wiring.inputs, (torch.as_tensor(i) for i in inputs), strict=True))
        values |= self.run(inputs, add, self.wiring.readings(nodes))
        tape = Tape(alone=partial(self._run_layers, nodes) if isinstance(self.device, LayerDevice) else None)
        for node in nodes:
            operation = _operation(node, values, add)
            values[node.writes] = operation.output
            tape.add(operation)
        tape.h = values[self.wiring.h]
        return tape

    def places(self, trained: Mapping[int, str]) -> list[Node]:
        """Return the nodes of a tape, in order."""
        if self._memory.trained != trained.keys():
            nodes = self.wiring.active(trained)
            self._memory.trained, self._memory.nodes = set(trained), fuse(nodes, trained) if self.fused else nodes
        return self._memory.nodes

    def problems(self, inputs: tuple[Any, ...], tolerance: float = 1e-3) -> list[str]:
        """Compare every computed function with the device's own reading, and list those that differ.

        Args:
            inputs: One batch.
            tolerance: Largest difference, relative to the largest entry.
        """
        trained = {id(p): name for name, p in self.named_parameters() if p.requires_grad}
        every = self.wiring.active(trained)
        nodes = [node for node in every if not node.measured and not node.hidden]
        if not nodes:
            return []
        tape = self._tape(every, inputs)
        computed = {n.writes: o.output for n, o in zip(every, tape.operations, strict=True)}
        readings = self.run(inputs, {}, [n.writes for n in nodes])
        return [
            f"the device computes {name} differently from its wiring: correct the node that writes it"
            for name, read in readings.items()
            if (read - computed[name]).abs().max() > tolerance * read.abs().max().clamp_min(1e-6)
        ]

    def _run_layers(self, nodes: Sequence[Node], given: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Run layers by themselves, by their places on a tape of these nodes."""
        assert isinstance(self.device, LayerDevice)
        self._write()
        names = {place: nodes[place].writes for place in given}
        found = self.counts.timed_layers(self.device, {names[place]: a for place, a in given.items()})
        return {place: self._converted(name, found[name]) for place, name in names.items()}

    def _write(self) -> None:
        params = dict(self._memory.parameters(self))
        versions = {name: (id(p), p._version) for name, p in params.items()}
        if versions != self._memory.versions:
            self.counts.timed_write(self.device, {name: p.detach().clone() for name, p in params.items()})
            # holding the tensors keeps their ids from being used again
            self._memory.versions, self._memory.written = versions, params

    def _converted(self, name: str, value: Any) -> Tensor:
        if not hasattr(value, "shape"):
            raise SplitError([f"the device returns a {type(value).__name__} for {name}: return a tensor or an array"])
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError) as error:
            cure = "return a tensor, or np.ascontiguousarray(array, dtype=np.float32)"
            raise SplitError([f"torch cannot read what the device returns for {name} ({error}): {cure}"]) from error
        raise_if([f"the device returns complex numbers for {name}: return real ones"] if tensor.is_complex() else [])
        # a reading of masked values may be infinite; the largest entry is NaN if any is
        finite = tensor.isfinite().all() if name == self.wiring.h else tensor.numel() == 0 or not tensor.amax().isnan()
        if not bool(finite):
            raise NonFiniteError([f"{name} is not finite: check the inputs and the device, or lower the learning rate"])
        return tensor.to(self._memory.dtype(self)) if tensor.is_floating_point() else tensor

    def _tensor(self, name: str, value: Any, rows: int) -> Tensor:
        tensor = self._converted(name, value)
        if name == self.wiring.h and (tensor.ndim < 2 or tensor.shape[0] != rows):
            raise SplitError(
                [
                    f"h ({name}) has shape {tuple(tensor.shape)} for {rows} rows: h must have one row per row of the"
                    " inputs; choose another tensor to cut at"
                ]
            )
        return tensor


class Twin(nn.Module):
    """Computes a wiring in torch, with the same parameters: a reference that can run backward.

    Args:
        wiring: Every node needs a torch function, and every layer its values.

    Raises:
        SplitError: If a layer holds no values.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from splitfg.hardware import Twin, Wiring
        >>> Twin(Wiring.of(nn.Sequential(nn.Linear(4, 8), nn.Tanh())))(torch.randn(2, 4)).shape
        torch.Size([2, 8])
    """

    def __init__(self, wiring: Wiring, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        super().__init__()
        empty = [n.name for n in wiring.nodes if n.module and any(p.is_meta for p in n.module.parameters())]
        cure = 'train them, as OnnxTrunk(..., train="*") does, and freeze their parameters afterwards'
        raise_if([f"layers without values cannot be computed ({shorten(empty)}): {cure}"] if empty else [])
        _register_all(self, wiring, parameters)
        names = {id(p): name for name, p in (parameters or {}).items()}
        nodes = tuple(replace(node, args=tuple(_named(a, names) for a in node.args)) for node in wiring.nodes)
        # parameters outside layers are read as attributes in each pass, and handed in behind the inputs
        self._loose = tuple(names.values())
        self.wiring = replace(wiring, nodes=nodes, inputs=(*wiring.inputs, *self._loose))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return h."""
        loose = [attrgetter(name)(self) for name in self._loose]
        return self.wiring.compute([*inputs, *loose], {})[self.wiring.h]


def _named(arg: Any, names: Mapping[int, str]) -> Any:
    """Return a reference in place of a parameter that has a name."""
    if isinstance(arg, list):
        return [_named(a, names) for a in arg]
    return Ref(names[id(arg)]) if id(arg) in names else arg


class _Memory:
    """Which parameters the device holds; an object of its own, as passes must not change attributes of modules."""

    def __init__(self) -> None:
        self.versions: dict[str, tuple[int, int]] = {}
        self.written: Mapping[str, Tensor] = {}
        self.trained: set[int] = set()
        self.nodes: list[Node] = []
        self._owners: list[tuple[str, dict[str, nn.Parameter | None], str]] = []

    def __reduce__(self) -> tuple[type[_Memory], tuple[()]]:
        """A copy of the trunk has other parameters, and writes them anew."""
        return _Memory, ()

    def parameters(self, trunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what ``trunk.named_parameters()`` does, without a walk through its modules: none is ever added."""
        if not self._owners:
            owners = {name: owner._parameters for name, owner in trunk.named_modules()}
            for name, _ in trunk.named_parameters():
                place, _, leaf = name.rpartition(".")
                self._owners.append((name, owners[place], leaf))
        for name, held, leaf in self._owners:
            parameter = held[leaf]
            assert parameter is not None
            yield name, parameter

    def dtype(self, trunk: nn.Module) -> torch.dtype:
        """Return the dtype of the parameters."""
        first = next(self.parameters(trunk), None)
        return torch.get_default_dtype() if first is None else first[1].dtype


def _answer_problems(found: object, read: Sequence[str]) -> list[str]:
    """List the problems of what a device returns from a run."""
    if not isinstance(found, Mapping):
        return [f"run() of the device returns a {type(found).__name__}: return a dict of tensors by name"]
    missing = [name for name in read if name not in found]
    return [f"the device did not return {', '.join(missing)}: return every tensor of `read`"] if missing else []


def _operation(node: Node, values: Mapping[str, Tensor], add: Mapping[str, Tensor]) -> Operation:
    """Return the operation of a node in one pass.

    Raises:
        SplitError: The readings do not fit its function.
    """
    try:
        return node.operation(values, values[node.writes] if node.measured else None, add.get(node.writes))
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(values[name].shape)}" for name in dict.fromkeys(node.reads()))
        raise SplitError(
            [
                f"{node.name} cannot be computed from the device's readings {shapes} ({error}): return tensors of the"
                " shapes that the wiring describes, with one row per row of the inputs"
            ]
        ) from error


def _amounts(nodes: Sequence[Node], alter: Alter | None) -> dict[str, Tensor]:
    """Return the numbers to add, by the name of the tensor that the device adds them to."""
    found: dict[str, Tensor] = {}
    if alter is not None:
        still = zero()
        for place, node in enumerate(nodes):
            amount, at = alter(place, still), node.add_at or node.writes
            if amount is not still:
                found[at] = found[at] + amount if at in found else amount
    return found


def _holds_values(module: nn.Module) -> bool:
    return any(not p.is_meta for p in module.parameters())


def _register_all(owner: nn.Module, wiring: Wiring, parameters: Mapping[str, nn.Parameter] | None) -> None:
    for node in wiring.nodes:
        if node.module is not None and _holds_values(node.module):
            _register(owner, node.name, node.module)
    for name, parameter in (parameters or {}).items():
        _register(owner, name, parameter)


def _register(owner: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    """Register under a dotted name, through plain modules; the same module twice is registered once."""
    *parents, leaf = name.split(".")
    for part in parents:
        child = owner._modules.get(part)
        if child is None:
            _require_free(owner, part, name)
            child = nn.Module()
            owner.add_module(part, child)
        owner = child
    if owner._modules.get(leaf) is value or owner._parameters.get(leaf) is value:
        return
    _require_free(owner, leaf, name)
    if isinstance(value, nn.Module):
        owner.add_module(leaf, value)
    else:
        owner.register_parameter(leaf, value)


def _require_free(owner: nn.Module, part: str, name: str) -> None:
    if not part or hasattr(owner, part):
        raise SplitError([f"{name!r} cannot name a layer or parameter ({part!r} is taken): choose another name"])
