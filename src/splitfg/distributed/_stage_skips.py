"""Gradients that pass along the skips of all blocks, from the last stage to the first."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from splitfg.distributed._stage_forward import Stage
from splitfg.distributed._stage_messages import StageMessages


def carried(
    stage: Stage, messages: StageMessages, r: Tensor, below: Callable[[int, Tensor], Tensor]
) -> tuple[dict[int, Tensor], Tensor]:
    """Carry a gradient down the trunk, one stage after the other.

    Args:
        stage: This process's stage.
        messages: Messages between the stages.
        r: The gradient at the top of the trunk.
        below: Returns the gradient at the input of the stage's block j from that at its output.

    Returns:
        The gradient at the output of every block of the stage, by its number in the stage, and at the stage's input.
    """
    delta = r if messages.stage == messages.stages - 1 else messages.receive_from_above(stage.output)
    found = {}
    for j in reversed(range(len(stage.inputs))):
        found[j] = delta
        delta = below(j, delta) if stage.reaches_down(j) else delta
    if messages.stage > 0:
        messages.send_down(delta)
    return found, delta
