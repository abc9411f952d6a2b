"""Comparison of the processes: same model, settings and versions, and later the same parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import splitfg
from splitfg.distributed._ranks import Ranks
from splitfg.errors import SplitError, raise_if
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
        first, *rest = ranks.members
        others = [str(rank) for rank, value in zip(rest, column[1:], strict=True) if value != column[0]]
        more = f" and {len(differing) - 1} more differ" if len(differing) > 1 else " differs"
        raise SplitError(
            [
                f"{differing[0]}{more} between rank {first} and rank {', '.join(others)}: start all processes from"
                " the same parameters, and let no process change them by itself"
            ]
        )


def digest(values: Tensor) -> Tensor:
    """Return a 64-bit hash of a tensor's bits, as a 0-d int64 tensor on its device."""
    words = values.detach().contiguous().reshape(-1).view(_WORDS.get(values.element_size(), torch.int64))
    total = torch.full((), words.numel(), dtype=torch.int64, device=values.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].long()
        place = torch.arange(start, start + len(part), device=values.device)
        odd = place * 0x5851F42D4C957F2D + 0x14057B7EF767814F | 1  # products wrap around modulo 2^64
        total = total * 0x2545F4914F6CDD1D + ((part ^ (part >> 15) ^ place) * odd).sum()
    return total


def check_facts(ranks: Ranks, facts: Mapping[str, str], cure: str = "start all processes alike") -> None:
    """Compare settings between all processes.

    Args:
        ranks: The processes.
        facts: Settings by name.
        cure: Ends the message.

    Raises:
        SplitError: In every process; lists all differences.
    """
    plain = {name: re.sub(r" at 0x[0-9a-f]+", "", value) for name, value in facts.items()}
    found = [json.loads(text) for text in ranks.texts(json.dumps(plain))]
    problems = [_difference(name, [other.get(name, "") for other in found], ranks.members) for name in plain]
    raise_if([f"{problem}; {cure}" for problem in problems if problem])


def common_facts(params: Params, generator: torch.Generator | None) -> dict[str, str]:
    """Return the facts that all estimators share: versions, parameters and the generator's state."""
    described = (f"{n} {tuple(p.shape)} {p.dtype}" + " frozen" * (not p.requires_grad) for n, p in params.items())
    return {
        "splitfg": splitfg.__version__,
        "torch": torch.__version__,
        "parameters": ", ".join(described),
        "generator": generator_fact(generator),
    }


def generator_fact(generator: object) -> str:
    """Describe a generator's state, in a few letters; anything else by its type."""
    if not isinstance(generator, torch.Generator):
        return "none" if generator is None else f"of type {type(generator).__name__}"
    return f"state {int(digest(generator.get_state())) & 0xFFFFFFFF:08x}"


def _difference(name: str, values: Sequence[str], members: Sequence[int]) -> str:
    if len(set(values)) == 1:
        return ""
    other = next(i for i, value in enumerate(values) if value != values[0])
    first, second = _shortened(values[0], values[other])
    verb = "differ" if name.endswith("s") else "differs"
    return f"{name} {verb}: {first} on rank {members[0]}, {second} on rank {members[other]}"


def _shortened(first: str, second: str) -> tuple[str, str]:
    """Cut two long texts to where they begin to differ."""
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    start = max(0, same - 30)
    return tuple(("..." if start else "") + text[start : same + 50] for text in (first, second))  # type: ignore[return-value]
