"""Logging for TensorBoard, in addition to the run's own files; needs the ``tensorboard`` extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitfg_lab.runs._errors import RunError


class TensorBoardLog:
    """Write the metrics of a run for TensorBoard.

    Raises:
        RunError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RunError("TensorBoard is not installed: pip install 'splitfg[tensorboard]'") from error
        self._make_writer = SummaryWriter
        self._folder = folder

    def __call__(self, event: dict[str, Any]) -> None:
        """Write the numbers of a ``metrics`` event."""
        if event["event"] == "started":
            # the run logs the steps after its checkpoint again
            self._writer = self._make_writer(str(self._folder), purge_step=event["step"] + 1)
        elif event["event"] == "metrics":
            for name, value in event.items():
                if name not in ("event", "run", "step"):
                    self._writer.add_scalar(name, value, event["step"])
            self._writer.flush()
