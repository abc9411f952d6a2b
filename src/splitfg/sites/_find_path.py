"""Find the residual stream of a trunk in a recorded pass."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if, shorten
from splitfg.sites._layers import LAYER_HOOK, has_layer_gradients
from splitfg.sites._path import ResidualPath
from splitfg.sites._pullback import has_pull_back, is_norm
from splitfg.sites._record_tape import record_tape
from splitfg.sites._tape import Operation, Tape, is_leaf
from splitfg.sites._validate import broadcasts
from splitfg.splitting import Split, split as cut
from splitfg.types import Inputs

_KEEPS_VALUES = (
    *("getitem", "view", "reshape", "contiguous", "clone", "to", "float", "type_as", "dropout"),
    *("expand", "expand_as", "unsqueeze", "repeat"),  # of positions, to every row
)
_SCALES = ("mul", "div")


def find_path(network: Split | nn.Module, batch: Inputs, *, strict: bool) -> ResidualPath:
    """Find the stream that ends in h; see :meth:`ResidualPath.find`."""
    given = network if isinstance(network, Split) else cut(network)
    x = given.interface.inputs(batch)
    problem = given.disagreement(x)
    raise_if([] if problem is None else [problem])
    trained = {id(p): name for name, p in given.trunk.named_parameters()}
    tape = record_tape(given.trunk, partial(given.trunk_function(x), {}), trained)
    search = _Search(tape, trained, strict)
    path = search.path()
    if search.unknown or not path.writers:
        raise SplitError([_message(path, search.unknown)])
    return path


class _Search:
    """Follows a stream from h to its beginning: through the top, then from sums to their terms."""

    def __init__(self, tape: Tape, trained: Mapping[int, str], strict: bool) -> None:
        self._tape, self._trained, self._strict = tape, trained, strict
        self._makers = {id(o.output): place for place, o in enumerate(tape.operations) if isinstance(o.output, Tensor)}
        self._writers: dict[int, str] = {}
        self._added: list[str] = []
        self.unknown: list[str] = []

    def path(self) -> ResidualPath:
        top, stream = self._top(self._tape.h)
        self._follow(stream)
        names = tuple(dict.fromkeys(name for _, name in sorted(self._writers.items())))
        added = dict.fromkeys(self._added, names[0]) if names else {}
        return ResidualPath(names, top, added, strict=self._strict)

    def _top(self, h: Tensor) -> tuple[str | None, Tensor]:
        """Return the module that gives h, and its input; h itself if a sum gives it."""
        operation = self._maker(h)
        if operation is not None and operation.module is not None and has_pull_back(operation.module):
            return operation.name, operation.input
        inner = None if operation is None else _unchanged(operation)
        return (None, h) if inner is None else self._top(inner)

    def _follow(self, stream: Any) -> None:
        if id(stream) in self._trained:
            self._added.append(self._trained[id(stream)])
            return
        operation = self._maker(stream)
        if operation is None:
            return  # a constant, such as data that the stream begins with
        module, inner = operation.module, _unchanged(operation)
        if inner is not None:
            self._follow(inner)
        elif operation.name == "add" and module is None and operation.kwargs.get("alpha", 1) == 1:
            for term in (*operation.args, *operation.kwargs.values()):
                self._follow(term)
        elif module is not None and has_layer_gradients(module) and not is_norm(module):
            self._writers[self._makers[id(stream)]] = operation.name
        elif not self._strict and (self._is_norm(operation) or operation.name in _SCALES):
            self._follow(operation.input)
        else:
            self.unknown.append(f"{operation}, which gives {tuple(stream.shape)}")

    def _is_norm(self, operation: Operation) -> bool:
        return operation.module is not None and is_leaf(operation.module) and is_norm(operation.module)

    def _maker(self, value: Any) -> Operation | None:
        place = self._makers.get(id(value))
        return None if place is None else self._tape.operations[place]


def _unchanged(operation: Operation) -> Tensor | None:
    """Return the input of a function that passes its values on as they are, or broadcasts them."""
    if operation.module is not None or operation.name not in _KEEPS_VALUES or not isinstance(operation.output, Tensor):
        return None
    given, output = operation.input, operation.output
    same = broadcasts(given, output) and torch.equal(given.expand_as(output).to(output.dtype), output)
    return given if same else None


def _message(path: ResidualPath, unknown: list[str]) -> str:
    if not unknown:
        return (
            f"no layer writes to a stream that ends in h; found top={path.top!r}: use LearnedFeedback(), or SplitFG()"
        )
    listed = shorten(list(dict.fromkeys(unknown)), limit=3)
    if path.writers:
        stream = f"is a sum of {shorten(path.writers)}, and of values from: {listed}"
    else:
        stream = (
            f"is no sum of layers' outputs: it comes from {listed}. If that follows the stream, as a mean over tokens"
            " does, cut before it with split(model, at=...); without a residual stream use ParallelPull() or"
            " LearnedFeedback()"
        )
    return (
        f"the stream that ends in h (top={path.top!r}) {stream}. Name the"
        " writers yourself with ResidualPath(...), pass strict=False to follow the stream through norms and scales, as"
        f" an approximation, or give the module that writes these values a method{LAYER_HOOK}"
    )
