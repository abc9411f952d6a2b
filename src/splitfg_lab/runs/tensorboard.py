"""Logged numbers in TensorBoard, beside the run's own files; needs the ``tensorboard`` extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitfg_lab.runs._errors import RunError


class TensorBoardLog:
    """Listens to a run's events and writes its metrics for TensorBoard.

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
        """Take one event."""
        if event["event"] == "started":
            # lines of an earlier session beyond its checkpoint are about to be written again
            self._writer = self._make_writer(str(self._folder), purge_step=event["step"] + 1)
        elif event["event"] == "metrics":
            for name, value in event.items():
                if name not in ("event", "run", "step"):
                    self._writer.add_scalar(name, value, event["step"])
            self._writer.flush()
