"""``python -m benchmarks.rank_kills``: kill and stop random processes of a run under torchrun, and compare its end.

The run must end with the log lines and parameters of an undisturbed one, bit for bit. ``--record`` writes
``benchmarks/rank_kills.json`` or the file that it names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import made
from splitfg_lab.runs import RunFolder, load_checkpoint, read_metrics
from splitfg_lab.runs.storage import make_folder, write_json

RECORDED = Path(__file__).parent / "rank_kills.json"
TIMEOUT_S = 20
GRACE_S = 30
"""Seconds that torchrun gives a stopped process before it kills it."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hangs", type=int, default=4, help="of these, so many are processes that hang")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--record", type=Path, nargs="?", const=RECORDED)
    args = parser.parse_args()
    facts = made(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        plain, disturbed = Path(folder) / "plain", Path(folder) / "disturbed"
        _finish(_start(plain, args, restarts=0))
        pauses = disturb(disturbed, args)
        same = end(plain) == end(disturbed)
        found = {
            **facts,
            "preset": "demo/split_fg",
            "steps": args.steps,
            "ranks": args.ranks,
            "kills": args.kills,
            "of_which_hangs": args.hangs,
            "same_end": same,
            "timeout_s": TIMEOUT_S,
            "longest_pause_s": round(max(pauses["kill"]), 1),
            "longest_pause_after_hang_s": round(max(pauses["hang"], default=0.0), 1),
            "median_pause_s": round(sorted(pauses["kill"])[len(pauses["kill"]) // 2], 1),
            "wall_s": round(time.monotonic() - began),
        }
    print(json.dumps(found, indent=1))
    if args.record is not None:
        make_folder(args.record.parent)
        write_json(args.record, found)
    sys.exit(0 if same else 1)


def disturb(root: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Run while killing at random steps; returns the seconds from each kill to the next step, for kills and hangs."""
    rng = random.Random(0)
    kinds = ["hang"] * args.hangs + ["kill"] * (args.kills - args.hangs)
    rng.shuffle(kinds)
    due = sorted(rng.sample(range(1, args.steps * 9 // 10), args.kills), reverse=True)
    process, pauses = _start(root, args, restarts=args.kills), {"kill": [], "hang": []}
    struck: tuple[str, float] | None = None
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event.get("event") != "progress":
            if event.get("event") != "metrics":
                print({**event, "folder": ""}, file=sys.stderr)
            continue
        now = time.monotonic()
        if struck is not None and now - struck[1] > 1.0:  # events of before the kill may still be in the pipe
            pauses[struck[0]].append(now - struck[1])
            print(f"{struck[0]}: {pauses[struck[0]][-1]:.1f} s, at step {event['step']}", file=sys.stderr)
            struck = None
        if struck is None and due and event["step"] >= due[-1]:
            due.pop()
            kind = kinds.pop()
            _strike(rng.choice(_workers(process.pid)), kind)
            struck = kind, time.monotonic()
    if process.wait() != 0:
        logs = [path.read_text(encoding="utf-8")[-4000:] for path in root.glob("demo/*/seed0/log.txt")]
        raise RuntimeError("\n".join(["the run failed", *logs]))
    assert not kinds, f"the run ended before {len(kinds)} of the kills: pass more --steps"
    return pauses


def end(root: Path) -> tuple[Any, ...]:
    """Return all log lines without their times, the metrics, and the parameters as bytes."""
    (path,) = root.glob("demo/*/seed0")
    lines = [{k: v for k, v in line.items() if k != "wall_s"} for line in read_metrics(path / "metrics.jsonl")]
    checkpoint = load_checkpoint(path)
    assert checkpoint is not None
    model = checkpoint.state["state"]["learner"]["model"]
    return lines, RunFolder(path).report().metrics, {name: p.numpy().tobytes() for name, p in model.items()}


def _start(root: Path, args: argparse.Namespace, *, restarts: int) -> subprocess.Popen[str]:
    options = ["--ranks", str(args.ranks), "--restarts", str(restarts), "--rank-timeout", str(TIMEOUT_S)]
    command = ["run", "demo/split_fg", "--set", f"steps={args.steps}", "--device", "cpu", "--json", "--runs", str(root)]
    whole = [sys.executable, "-m", "splitfg_lab.cli", *command, *options]
    return subprocess.Popen(whole, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> None:
    process.communicate()
    assert process.returncode == 0


def _strike(pid: int, kind: str) -> None:
    os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def _workers(command: int) -> list[int]:
    """Return the processes of torchrun below a command: the children of its only child."""
    return [worker for agent in _children(command) for worker in _children(agent)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text(encoding="utf-8").split())
    return found


if __name__ == "__main__":
    main()
