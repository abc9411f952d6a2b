"""The process behind one run: ``python -m splitfg_lab.commands.worker FOLDER`` runs ``FOLDER/config.json``.

It prints events to standard output as JSON lines and redirects the output of the experiment to standard error. The
exit code is 0 if the run is done, 1 if it diverged or failed, 2 if its config cannot be used, 130 if it was stopped.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

from splitfg_lab.commands._targets import find_preset
from splitfg_lab.commands.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXPECTED, exit_code
from splitfg_lab.experiments.spec import Experiment
from splitfg_lab.runs import RunFolder, Runner, StoppedError, from_json
from splitfg_lab.runs.context import Emit
from splitfg_lab.runs.interrupts import stop_signals


def main(arguments: list[str] | None = None) -> int:
    """Run one folder and return the exit code."""
    options = _parse(arguments)
    folder = RunFolder(options.folder)
    _log_in_utf8()
    stream = _EventStream()
    for number in stop_signals():
        signal.signal(number, _interrupt)

    def end(event: str, message: str, **more: Any) -> None:
        stream({"event": event, "run": folder.name, "message": message, **more})

    try:
        return _work(folder, options.device, _listeners(stream, folder, tensorboard=options.tensorboard))
    except StoppedError as error:
        end("stopped", str(error))
        return EXIT_STOPPED
    except KeyboardInterrupt:
        end("stopped", _unsaved(folder))
        return EXIT_STOPPED
    except EXPECTED as error:
        # the event first: on a full disk the log cannot be written
        end("failed", str(error), refused=not stream.begun)
        _log_traceback()
        return exit_code(error)
    except Exception as error:
        end("failed", f"{type(error).__name__}: {error}", log=str(folder.log_path))
        _log_traceback()
        return EXIT_FAILED


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m splitfg_lab.commands.worker", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tensorboard", action="store_true")
    return parser.parse_args(arguments)


def _work(folder: RunFolder, device: str, emit: Emit) -> int:
    from splitfg_lab.runs import execute

    identity = folder.identity()
    experiment, preset = find_preset(identity.experiment, identity.preset)
    config = from_json(type(preset.config), experiment.completed(identity.config))
    report = execute(folder, _load_runner(experiment), config, device=device, emit=emit)
    return EXIT_OK if report.status == "done" else EXIT_FAILED


def _load_runner(experiment: Experiment) -> Runner:
    module, _, name = experiment.runner.partition(":")
    return cast(Runner, getattr(importlib.import_module(module), name))


def _unsaved(folder: RunFolder) -> str:
    """Explain where a run that stopped without saving resumes."""
    if folder.has_checkpoint:
        return "stopped without saving; it resumes from its last checkpoint"
    return "stopped before its first checkpoint; it starts over"


def _log_in_utf8() -> None:
    """Write the log in UTF-8, whatever the locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _log_traceback() -> None:
    with suppress(OSError):
        traceback.print_exc()
        sys.stderr.flush()


def _listeners(stream: Emit, folder: RunFolder, *, tensorboard: bool) -> Emit:
    if not tensorboard:
        return stream
    from splitfg_lab.runs.tensorboard import TensorBoardLog

    log = TensorBoardLog(folder.path / "tensorboard")

    def both(event: dict[str, Any]) -> None:
        stream(event)
        log(event)

    return both


class _EventStream:
    """Write events to standard output, and redirect other output there to standard error.

    Attributes:
        begun: Whether the run has taken a step.
    """

    def __init__(self) -> None:
        self.begun = False
        self._watched = True
        self._handle = os.dup(1)
        os.dup2(2, 1)

    def __call__(self, event: dict[str, Any]) -> None:
        self.begun |= event["event"] in ("progress", "metrics")
        if not self._watched:
            return
        try:
            os.write(self._handle, json.dumps(event).encode() + b"\n")
        except BrokenPipeError:
            # the process that started this run is gone: save and stop
            self._watched = False
            signal.raise_signal(signal.SIGTERM)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in stop_signals():  # the same request may arrive as two signals
        signal.signal(number, _ignore)
    raise KeyboardInterrupt


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: unlike ``SIG_IGN``, this is safe while another signal is pending."""


if __name__ == "__main__":
    sys.exit(main())
