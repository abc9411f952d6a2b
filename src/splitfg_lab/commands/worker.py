"""The process behind one run: ``python -m splitfg_lab.commands.worker FOLDER`` runs ``FOLDER/config.json``.

It prints events to standard output as JSON lines and redirects the output of the experiment to standard error. The
exit code is 0 if the run is done, 1 if it diverged or failed, 2 if its config cannot be used, 130 if it was stopped.

``torchrun --nproc-per-node N -m splitfg_lab.commands.worker FOLDER`` runs it in N processes, the first of which writes
the folder and prints the events. If a process is lost, the others exit with code 1, and torchrun may restart them.
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
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from splitfg.errors import LostRankError
from splitfg_lab.commands._targets import find_preset
from splitfg_lab.commands.errors import EXIT_FAILED, EXIT_LOST, EXIT_OK, EXIT_STOPPED, EXPECTED, exit_code
from splitfg_lab.experiments.spec import Experiment
from splitfg_lab.runs import RunFolder, Runner, StoppedError, from_json
from splitfg_lab.runs.context import Emit
from splitfg_lab.runs.interrupts import stop_signals
from splitfg_lab.runs.lease import BusyError

if TYPE_CHECKING:
    from splitfg.distributed import Ranks


def main(arguments: list[str] | None = None) -> int:
    """Run one folder and return the exit code."""
    options = _parse(arguments)
    _log_in_utf8()
    for number in stop_signals():
        signal.signal(number, _interrupt)
    try:
        ranks = join_ranks(options.device, options.timeout)
    except (*EXPECTED, LostRankError) as error:
        print(error, file=sys.stderr)
        return EXIT_LOST
    code = run_folder(RunFolder(options.folder), options.device, tensorboard=options.tensorboard, ranks=ranks)
    # torchrun would restart a run that ends the same way every time; the events tell how it ended
    return EXIT_OK if options.no_restart and code != EXIT_LOST else code


def run_folder(folder: RunFolder, device: str, *, tensorboard: bool = False, ranks: Ranks | None = None) -> int:
    """Run one folder, alone or with other processes, and return the exit code."""
    stream: Emit = _EventStream() if ranks is None or ranks.is_first else _Silence()

    def end(event: str, message: str, **more: Any) -> None:
        stream({"event": event, "run": folder.name, "message": message, **more})

    try:
        return _work(folder, device, _listeners(stream, folder, tensorboard=tensorboard), ranks)
    except StoppedError as error:
        end("stopped", str(error))
        return EXIT_STOPPED
    except KeyboardInterrupt:
        end("stopped", _unsaved(folder))
        return EXIT_STOPPED
    except LostRankError as error:
        end("note", str(error), text=str(error))
        return EXIT_LOST
    except BusyError as error:
        end("elsewhere", str(error))
        return EXIT_FAILED
    except EXPECTED as error:
        # the event first: on a full disk the log cannot be written
        end("failed", str(error), refused=not getattr(stream, "begun", True))
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
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a hung process is lost")
    parser.add_argument("--no-restart", action="store_true", help="exit with 0 unless a process was lost")
    return parser.parse_args(arguments)


def join_ranks(device: str, timeout: float) -> Ranks | None:
    """Join the processes that torchrun has started; ``None`` in a process that was started by itself.

    Raises:
        LostRankError: Not all processes arrive.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ and "RANK" not in os.environ:
        return None
    from splitfg.distributed import connect
    from splitfg_lab.runs.environment import resolve_device

    return connect(device=resolve_device(device).type, timeout=timedelta(seconds=timeout))


def _work(folder: RunFolder, device: str, emit: Emit, ranks: Ranks | None) -> int:
    from splitfg_lab.runs import execute

    identity = folder.identity()
    experiment, preset = find_preset(identity.experiment, identity.preset)
    config = from_json(type(preset.config), experiment.completed(identity.config))
    report = execute(folder, _load_runner(experiment), config, device=device, emit=emit, ranks=ranks)
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


class _Silence:
    """Drop the events of processes other than the first."""

    def __call__(self, event: dict[str, Any]) -> None:
        """Do nothing."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in stop_signals():  # the same request may arrive as two signals
        signal.signal(number, _ignore)
    raise KeyboardInterrupt


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: unlike ``SIG_IGN``, this is safe while another signal is pending."""


if __name__ == "__main__":
    sys.exit(main())
