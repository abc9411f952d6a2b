"""The values of a residual stream, from a recorded pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.sites._path import ResidualPath
from splitfg.sites._recorder import Recording


def stream_after_writers(trunk: nn.Module, path: ResidualPath, seen: Recording) -> dict[str, Tensor]:
    """Return the stream's value after every write, by writer, each of the stream's shape.

    The top of the stream is the sum of all writes, so the value after a write is the top less the later ones,
    x_i = x_L - w_{i+1} - ... - w_L. Writes are computed once more from what their writers read, without a graph.

    Args:
        trunk: The trunk.
        path: Its stream, a strict one.
        seen: A pass in which the inputs of the writers and of the top were recorded.

    Raises:
        SplitError: The stream is scaled on its way, or a writer is called more than once.
    """
    problems = [] if path.strict else ["a stream that is scaled on its way is no sum of its writes"]
    problems += [f"{name} writes more than once" for name in path.writers if len(seen.reads.get(name, ())) > 1]
    if problems:
        raise SplitError([f"{problem}: use feedback that does not read the stream" for problem in problems])
    x = seen.h if path.top is None else seen.reads[path.top][0]
    found: dict[str, Tensor] = {}
    called = [name for name in path.writers if seen.reads.get(name)]
    with torch.no_grad():
        for i, name in reversed(list(enumerate(called))):
            found[name] = x
            if i > 0:
                x = x - trunk.get_submodule(name)(seen.reads[name][0])
    return found
