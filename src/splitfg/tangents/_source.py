"""K tangents in chunks: the same numbers whatever the chunk, and no more of them in memory than one chunk."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.tangents._laws import TangentLaw
from splitfg.tangents._layout import Layout


class TangentSource:
    """The K tangents of one estimate, handed out chunk by chunk and dropped after use.

    Args:
        law: Where they come from.
        layout: The space.
        count: K.
        chunk: How many at a time; ``None`` for all.
        generator: Advanced by exactly one estimate's worth once iterated.
        remember: Keep what :meth:`again` needs to draw a chunk once more: generator states, not tangents.
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
        """Chunks of shape ``(c, P)``."""
        if self.law.joint:
            self._whole = _draw(self.law, self.layout, self.count, self._generator)
            yield from self._whole.split(self.chunk)
            return
        for size in self.chunk_sizes:
            if self._remember:
                self._states.append(self._generator.get_state())
            yield _draw(self.law, self.layout, size, self._generator)

    @property
    def chunk_sizes(self) -> list[int]:
        """How many tangents each chunk holds."""
        full, rest = divmod(self.count, self.chunk)
        return [self.chunk] * full + [rest] * bool(rest)

    def again(self, index: int) -> Tensor:
        """Chunk ``index`` once more, drawn anew from its remembered state."""
        if self._whole is not None:
            return self._whole[index * self.chunk : (index + 1) * self.chunk]
        generator = torch.Generator(self._generator.device)
        generator.set_state(self._states[index])
        return _draw(self.law, self.layout, self.chunk_sizes[index], generator)


def _draw(law: TangentLaw, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
    """Tangents drawn outside compiled code, so that compiled and eager estimates see the same ones."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled then, and loading the compiler takes a second
        return _draw_eagerly(law, layout, count, generator)
    from splitfg.tangents._uncompiled import call_uncompiled

    rows: Tensor = call_uncompiled(_draw_eagerly, law, layout, count, generator)
    return rows


@torch.no_grad()
def _draw_eagerly(law: TangentLaw, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
    rows = law.draw(layout, count, generator)
    if rows.shape != (count, layout.total):
        raise SplitError(
            [f"{type(law).__name__} drew tangents of shape {tuple(rows.shape)}, not {(count, layout.total)}"]
        )
    return rows
