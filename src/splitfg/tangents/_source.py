"""K tangents in chunks: the values do not depend on the chunk size, and memory holds one chunk at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.tangents._laws import TangentLaw
from splitfg.tangents._layout import Layout


class TangentSource:
    """Iterates over the K tangents of one estimate, chunk by chunk.

    Args:
        law: Distribution of the tangents.
        layout: The space.
        count: K.
        chunk: Tangents per chunk; ``None`` for all.
        generator: Source of randomness; one iteration advances it by K tangents.
        remember: Store the generator's state before each chunk, so that :meth:`again` can draw it again; a single chunk
            is kept instead.
    """

    def __init__(
        self,
        law: TangentLaw,
        layout: Layout,
        count: int,
        chunk: int | None,
        generator: torch.Generator,
        *,
        remember: bool = False,
    ) -> None:
        self.law, self.layout, self.count = law, layout, count
        self.chunk = min(chunk or count, count)
        self._generator, self._remember = generator, remember
        self._whole: Tensor | None = None
        self._states: list[Tensor] = []

    def __iter__(self) -> Iterator[Tensor]:
        """Yield chunks of shape ``(c, P)``."""
        if self.law.joint:
            self._whole = _draw(self.law, self.layout, self.count, self._generator)
            yield from self._whole.split(self.chunk)
            return
        if self._remember and len(self.chunk_sizes) == 1:
            self._whole = _draw(self.law, self.layout, self.count, self._generator)
            yield self._whole
            return
        for size in self.chunk_sizes:
            if self._remember:
                self._states.append(self._generator.get_state())
            yield _draw(self.law, self.layout, size, self._generator)

    @property
    def chunk_sizes(self) -> list[int]:
        """Number of tangents in each chunk."""
        full, rest = divmod(self.count, self.chunk)
        return [self.chunk] * full + [rest] * bool(rest)

    def again(self, index: int) -> Tensor:
        """Return chunk ``index``, drawn again from its stored generator state unless it was kept."""
        if self._whole is not None:
            return self._whole[index * self.chunk : (index + 1) * self.chunk]
        return _draw(self.law, self.layout, self.chunk_sizes[index], self._generator, self._states[index])


def _draw(
    law: TangentLaw, layout: Layout, count: int, generator: torch.Generator, state: Tensor | None = None
) -> Tensor:
    """Draw tangents outside compiled code, so that compiled and eager estimates use the same ones.

    With a ``state``, they come from a new generator that begins there.
    """
    if "torch._dynamo" not in sys.modules:  # no compiled code exists, and importing the compiler takes a second
        return _draw_eagerly(law, layout, count, generator, state)
    from splitfg.tangents._uncompiled import call_uncompiled

    rows: Tensor = call_uncompiled(_draw_eagerly, law, layout, count, generator, state)
    return rows


@torch.no_grad()
def _draw_eagerly(
    law: TangentLaw, layout: Layout, count: int, generator: torch.Generator, state: Tensor | None
) -> Tensor:
    if state is not None:
        generator = torch.Generator(generator.device)
        generator.set_state(state)
    rows = law.draw(layout, count, generator)
    if rows.shape != (count, layout.total):
        raise SplitError(
            [
                f"{type(law).__name__}.draw returned tangents of shape {tuple(rows.shape)}: return shape"
                f" {(count, layout.total)}"
            ]
        )
    for start, stop in layout.still:
        rows[:, start:stop] = 0
    return rows
