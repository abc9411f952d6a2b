"""Comparison of the processes: same model, settings and versions, and later the same parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import splitfg
from splitfg.distributed._ranks import Ranks
from splitfg.errors import SplitError
from splitfg.types import Params

_CHUNK = 2**20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(ranks: Ranks, params: Params) -> None:
    """Compare parameters between all processes by a hash of their bits.

    Args:
        ranks: The processes.
        params: Parameters by name, or any other tensors that must be equal everywhere.

    Raises:
        SplitError: In every process, if a parameter differs; names the first one and the processes.

    Example:
        In every process: ``check_replicas(ranks, dict(model.named_parameters()))``.
    """
    if not params:
        return
    own = torch.stack([digest(p).to(ranks.device) for p in params.values()])
    found = ranks.texts(" ".join(str(h) for h in own.tolist()))
    hashes = [text.split() for text in found]
    differing = [name for i, name in enumerate(params) if len({row[i] for row in hashes}) > 1]
    if differing:
        column = [row[list(params).index(differing[0])] for row in hashes]
        others = [str(rank) for rank, value in enumerate(column) if value != column[0]]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise SplitError(
            [
                f"{differing[0]}{more} differs between rank 0 and rank {', '.join(others)}: start all processes from"
                " the same parameters, and let no process change them by itself"
            ]
        )


def digest(values: Tensor) -> Tensor:
    """Return a 64-bit hash of a tensor's bits, as a 0-d int64 tensor on its device."""
    words = values.detach().contiguous().reshape(-1).view(_WORDS[values.element_size()])
    total = torch.full((), words.numel(), dtype=torch.int64, device=values.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].long()
        place = torch.arange(start, start + len(part), device=values.device)
        odd = place * 0x5851F42D4C957F2D + 0x14057B7EF767814F | 1  # products wrap around modulo 2^64
        total = total * 0x2545F4914F6CDD1D + ((part ^ (part >> 15) ^ place) * odd).sum()
    return total


def check_facts(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Compare settings between all processes.

    Raises:
        SplitError: In every process; lists all differences.
    """
    plain = {name: re.sub(r" at 0x[0-9a-f]+", "", value) for name, value in facts.items()}
    found = [json.loads(text) for text in ranks.texts(json.dumps(plain))]
    problems = [_difference(name, [other.get(name, "") for other in found]) for name in plain]
    if any(problems):
        raise SplitError([problem for problem in problems if problem])


def common_facts(params: Params, generator: torch.Generator | None) -> dict[str, str]:
    """Return the facts that all estimators share: versions, parameters and the generator's state."""
    state = 0 if generator is None else int(digest(generator.get_state()))
    return {
        "splitfg": splitfg.__version__,
        "torch": torch.__version__,
        "parameters": ", ".join(f"{n} {tuple(p.shape)} {p.dtype}" for n, p in params.items()),
        "generator": "another seed or state" if generator is None else f"state {state & 0xFFFFFFFF:08x}",
    }


def _difference(name: str, values: Sequence[str]) -> str:
    if len(set(values)) == 1:
        return ""
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    first, second = _shortened(values[0], values[other])
    verb = "differ" if name.endswith("s") else "differs"
    return f"{name} {verb}: {first} on rank 0, {second} on rank {other}; start all processes alike"


def _shortened(first: str, second: str) -> tuple[str, str]:
    """Cut two long texts to where they begin to differ."""
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    start = max(0, same - 30)
    return tuple(("..." if start else "") + text[start : same + 50] for text in (first, second))  # type: ignore[return-value]
