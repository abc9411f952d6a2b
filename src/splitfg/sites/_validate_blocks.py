"""Validate a declared block path against one forward pass of the trunk."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.calling import RandomState, drawing_from, version_of
from splitfg.numerics import close
from splitfg.sites._block_path import BlockPath, PathBlock
from splitfg.sites._blocks import block_states, entries, run_block
from splitfg.sites._taps import Arguments, tapped
from splitfg.sites._validate import broadcasts, read_rows
from splitfg.sites._validate_inside import side_problems, writer_problems
from splitfg.splitting import Split
from splitfg.splitting.checks import skip_checks
from splitfg.types import Inputs


@dataclass(frozen=True)
class _Pass:
    """One pass: inputs, further arguments and outputs of every call of the named modules, and h.

    ``spoilt`` names the modules whose input was written over later.
    """

    h: Tensor
    reads: Mapping[str, Sequence[Tensor]]
    further: Mapping[str, Sequence[Arguments]]
    writes: Mapping[str, Sequence[Tensor]]
    spoilt: Sequence[str]


def validate_blocks(split: Split, path: BlockPath, x: Inputs) -> None:
    """Validate a block path on the first batch of a split, and again after a change of training mode.

    Raises:
        SplitError: A named module is missing or not called, a block run by itself gives another output than in the
            trunk, the blocks do not form the stream, or a trained parameter lies outside the path.
    """
    if skip_checks():
        return
    key = ("blocks", path.blocks, path.residual, path.top, path.writers, tuple(path.added.items()))
    split.validate_once(key, lambda: path.problems(split.trunk) or _problems(split, path, x))


def _problems(split: Split, path: BlockPath, x: Inputs) -> list[str]:
    names = {*path.modules, *(b.writer for b in path.blocks if b.writer), *([path.top] if path.top else [])}
    with entries(split.trunk, path) as states:
        seen = _passed(split, sorted(names), x)
    wanted = Counter([*path.modules, *([path.top] if path.top else [])])
    found = [
        f"{name} is called {len(seen.reads.get(name, ()))} times on the way to h, and the path names it {count} times"
        for name, count in wanted.items()
        if len(seen.reads.get(name, ())) != count
    ]
    found += [
        f"{name} takes or returns several values: name modules that map a tensor to one"
        for name in dict.fromkeys(path.modules)
        if not all(isinstance(value, Tensor) for value in (*seen.reads.get(name, ()), *seen.writes.get(name, ())))
    ]
    if found or not seen.h.isfinite().all():
        return found  # the check of the loss raises a clearer error for values that are not finite
    found = _stream_problems(split, path, seen, block_states(path, states))
    words = "is written over later: write x = x + ... in place of x += ..."
    spoilt = [f"the input of {name} {words}" for name in seen.spoilt] if found else []
    return spoilt + found + _left_out(split, path)


def _passed(split: Split, names: Sequence[str], x: Inputs) -> _Pass:
    reads: dict[str, list[Tensor]] = defaultdict(list)
    further: dict[str, list[Arguments]] = defaultdict(list)
    writes: dict[str, list[Tensor]] = defaultdict(list)

    def tap(name: str, a: Tensor, z: Tensor) -> None:
        reads[name].append(a)
        writes[name].append(z)

    def keep(name: str, arguments: Arguments) -> None:
        further[name].append(arguments)

    versions: list[tuple[str, Tensor, int]] = []

    def note(name: str, a: Tensor) -> None:
        if isinstance(a, Tensor):
            versions.append((name, a, version_of(a)))

    data = pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, x)
    # a graph without what a backward pass needs shows which values depend on parameters
    forget = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda t: t)
    with torch.enable_grad(), forget, tapped(split.trunk, names, tap, before=note, arguments=keep):
        h = split.trunk_function(data)({})
    spoilt = dict.fromkeys(name for name, a, version in versions if version_of(a) != version)
    return _Pass(h, reads, further, writes, tuple(spoilt))


def _stream_problems(split: Split, path: BlockPath, seen: _Pass, states: Sequence[RandomState]) -> list[str]:
    calls: Counter[str] = Counter()
    stream, found = None, list[str]()
    for block, state in zip(path.blocks, states, strict=True):
        first = seen.reads[block.modules[0]][calls[block.modules[0]]]
        found += _start_problems(split, path, seen, first) if stream is None else _same(stream, first, block.modules[0])
        further = []
        for name in block.modules:
            further.append(seen.further[name][calls[name]])
            output = seen.writes[name][calls[name]]
            calls[name] += 1
        found += _argument_problems(block.modules, further)
        with drawing_from(state), split.restored():
            found += _own_problems(split, block, first, further, output)
        if block.writer is not None and not any(_is(z, output) for z in seen.writes.get(block.writer, ())):
            found.append(f"{block.writer} does not give the output of {block.name}: name its last layer, or no writer")
        elif not found:
            found += side_problems(split.trunk, block, first, output)
            with drawing_from(state), split.restored():
                found += writer_problems(split.trunk, block, first, further)
        stream = first + output if path.residual and first.shape == output.shape else output
    assert stream is not None
    if path.top is not None and not _is_flattened(seen.writes[path.top][0], seen.h):
        found.append(f"h is not what {path.top} gives, flattened or not: name the module that gives h, or none")
    if path.top is not None:
        return found + _same(stream, seen.reads[path.top][0], path.top)
    return found + _same(stream, seen.h.reshape(stream.shape) if seen.h.numel() == stream.numel() else seen.h, None)


def _own_problems(split: Split, block: PathBlock, x: Tensor, further: Sequence[Arguments], y: Tensor) -> list[str]:
    """List the problem of a block that does not give its output y if it runs by itself."""
    try:
        with torch.no_grad():
            own = run_block(split.trunk, block, {}, x, further)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        cure = "pass what it reads of other modules along the stream, or make one block of all modules between"
        return [f"{block.name} fails when it runs by itself ({error}): {cure}"]
    if own.shape == y.shape and close(own, y):
        return []
    return [
        f"{' and '.join(block.modules)} run one after the other give another output than in the trunk: name"
        " everything between them"
    ]


def _start_problems(split: Split, path: BlockPath, seen: _Pass, first: Tensor) -> list[str]:
    """List the problems of x_0."""
    if not path.writers:
        if not first.requires_grad:
            return []
        name = path.blocks[0].modules[0]
        return [f"{name} reads values that depend on trained parameters: name the layers that write them in writers"]
    writes = [(name, z) for name in path.writers for z in seen.writes[name]]
    found = [
        f"{name} writes {tuple(z.shape)}, and the stream is {tuple(first.shape)}: name layers whose outputs are added"
        " to the stream as they are"
        for name, z in writes
        if not broadcasts(z, first)
    ]
    found += [
        f"{name} reads values that depend on trained parameters, whose gradient would get lost: make it a block"
        for name in path.writers
        if any(a.requires_grad for a in seen.reads[name])
    ]
    if found:
        return found
    parts = [z for _, z in writes]
    for name in path.added:
        read = read_rows(split.trunk.get_parameter(name), first)
        if read is None:
            return [f"{name} cannot be added to the stream, which is {tuple(first.shape)}"]
        parts.append(read)
    total = sum(parts, torch.zeros_like(first))
    if close(total.detach(), first.detach()):
        return []
    return ["the writers do not sum to the input of the first block: name everything that is added, and nothing else"]


def _same(stream: Tensor, read: Tensor, reader: str | None) -> list[str]:
    if stream.shape == read.shape and close(stream.detach(), read.detach()):
        return []
    return [
        f"{reader or 'h'} does not read the stream after the block before it: name every block, in order, say"
        " residual=True where outputs are added to the stream, and make functions between blocks (F.relu, a mean)"
        " modules of a block or the top"
    ]


def _argument_problems(names: Sequence[str], further: Sequence[Arguments]) -> list[str]:
    def depends(value: Any) -> bool:
        return isinstance(value, Tensor) and value.requires_grad

    return [
        f"{name} has a further argument that depends on trained parameters, whose gradient would get lost: detach it"
        for name, arguments in zip(names, further, strict=True)
        if any(depends(leaf) for leaf in pytree.tree_leaves(arguments))
    ]


def _left_out(split: Split, path: BlockPath) -> list[str]:
    """List trained parameters outside the path."""
    trunk = split.trunk
    names = [*path.modules, *([path.top] if path.top else [])]
    covered = {id(p) for name in names for p in trunk.get_submodule(name).parameters()}
    covered |= {id(trunk.get_parameter(name)) for name in path.added}
    trained = set(split.trunk_params())
    return [
        f"{name} is trained and lies outside the path: name its module in a block, or freeze it"
        for name, p in split.model.named_parameters()
        if name in trained and id(p) not in covered
    ]


def _is_flattened(given: Tensor, h: Tensor) -> bool:
    return given.numel() == h.numel() and close(given.detach().reshape(h.shape), h.detach())


def _is(z: Tensor, output: Tensor) -> bool:
    return z is output or (z.shape == output.shape and z.data_ptr() == output.data_ptr())
