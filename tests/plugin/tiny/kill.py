"""``python -m tiny.kill STRAIGHT KILLED KILLS``: runs one folder in peace, and one in processes that are killed.

The processes die of SIGKILL at random moments; the steps they would go on from are printed. They are forked from one
that has imported torch already, so that dying often costs little.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from splitfg_lab.runs import RunFolder, execute, from_json, load_checkpoint
from tiny import TinyConfig
from tiny.run import run


def start(folder: RunFolder) -> int:
    child = os.fork()
    if child == 0:
        config = from_json(TinyConfig, folder.identity().config)
        execute(folder, run, config, device="cpu", emit=lambda event: None)
        os._exit(0)
    return child


def finish(folder: RunFolder) -> None:
    _, status = os.waitpid(start(folder), 0)
    if status != 0:
        sys.exit("a run that nobody killed failed")


def kill(folder: RunFolder, saves: int, after_s: float) -> int:
    """Kill a session some time after it has saved so often; the step that the next one goes on from."""
    child = start(folder)
    for _ in range(saves):
        _wait_for_change(folder.path / "checkpoint.json")
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        sys.exit("the run ended before it could be killed: make it longer")
    checkpoint = load_checkpoint(folder.path)
    return 0 if checkpoint is None else int(checkpoint.state["state"]["step"])


def _wait_for_change(path: Path) -> None:
    before, deadline = _version(path), time.monotonic() + 60
    while _version(path) == before:
        if time.monotonic() > deadline:
            sys.exit("the run saves nothing")
        time.sleep(0.001)


def _version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def main(straight: str, killed: str, kills: str) -> None:
    moments = random.Random(0)
    finish(RunFolder(Path(straight)))
    folder = RunFolder(Path(killed))
    # the first before anything can have been saved, the others after one save or two, wherever that finds them
    steps = [kill(folder, min(i, moments.randint(1, 2)), moments.uniform(0.0, 0.05)) for i in range(int(kills))]
    finish(folder)
    print(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
