"""``python -m benchmarks.hosts``: two hosts share a table of runs, one dies, and the other finishes all.

The hosts are processes in namespaces of their own for host names and process ids, with one run folder. File locks do
nothing, as on a network file system whose locks hold on one host alone, and the second host's clock is an hour ahead:
leases alone keep them apart. One host is killed with everything on it. The runs must end with the log lines and
parameters of undisturbed ones, bit for bit. ``--record`` keeps the result in ``benchmarks/hosts.json``.
"""

from __future__ import annotations

import argparse
import json
import os
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
from splitfg_lab.runs.lease import TTL_S, holder
from splitfg_lab.runs.storage import write_json

RECORDED = Path(__file__).parent / "hosts.json"
AHEAD_S = 3600.0
_PATCH = """
import fcntl, os, time
fcntl.flock = lambda *_: None  # locks that no other host sees
_time, _ahead = time.time, float(os.environ["CLOCK_AHEAD_S"])
time.time = lambda: _time() + _ahead
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    facts = made(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_PATCH, encoding="utf-8")
        first = start("alpha", folder, folder / "shared", args, ahead=0.0)
        second = start("beta", folder, folder / "shared", args, ahead=AHEAD_S)
        taken = kill_in_a_run(first, folder / "shared")
        killed = time.monotonic()
        first.wait()
        step = checkpoint_step(taken)
        while (now := holder(taken)) is None or now.host != "beta":
            time.sleep(0.2)
            assert second.poll() is None, "the second host ended without the first one's run"
        taken_s = time.monotonic() - killed
        code = second.wait()
        plain = start("gamma", folder, folder / "plain", args, ahead=0.0)
        assert plain.wait() == 0
        same = ends(folder / "shared") == ends(folder / "plain")
    found = {
        **facts,
        "runs": args.seeds,
        "steps": args.steps,
        "ttl_s": TTL_S,
        "clock_ahead_s": AHEAD_S,
        "taken_over_s": round(taken_s, 1),
        "resumed_from_step": step,
        "exit_code": code,
        "same_end": same,
    }
    print(json.dumps(found, indent=1))
    if args.record:
        write_json(RECORDED, found)
    sys.exit(0 if same and code == 0 else 1)


def start(host: str, folder: Path, runs: Path, args: argparse.Namespace, *, ahead: float) -> subprocess.Popen[bytes]:
    """Start ``splitfg run --share`` on a host; killing the process kills everything on it."""
    options = ["--seeds", f"0-{args.seeds - 1}", "--set", f"steps={args.steps}", "--device", "cpu", "--json", "--share"]
    command = [sys.executable, "-m", "splitfg_lab.cli", "run", "demo/split_fg", *options, "--runs", str(runs)]
    own = ["unshare", "--map-root-user", "--uts", "--pid", "--fork", "--kill-child=SIGKILL"]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return subprocess.Popen(
        [*own, "bash", "-c", 'hostname "$0"; exec "$@"', host, *command],
        env=os.environ | {"PYTHONPATH": path, "CLOCK_AHEAD_S": str(ahead), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def kill_in_a_run(host: subprocess.Popen[bytes], runs: Path) -> Path:
    """Wait until the first host has saved a checkpoint of a run that it is still in, kill it, and return the folder."""
    while True:
        time.sleep(0.05)
        for folder in runs.glob("demo/*/seed*"):
            there = holder(folder)
            if there is not None and there.host == "alpha" and (folder / "checkpoint.json").exists():
                os.kill(host.pid, signal.SIGKILL)
                return folder
        assert host.poll() is None, "the host ended before it could be killed: give it more steps"


def checkpoint_step(folder: Path) -> int:
    """Return the step of a run's last checkpoint."""
    checkpoint = load_checkpoint(folder)
    assert checkpoint is not None
    return int(checkpoint.state["state"]["learner"]["step"])


def ends(root: Path) -> dict[str, Any]:
    """Return log lines without times, metrics and parameters of all runs."""
    found = {}
    for path in sorted(root.glob("demo/*/seed*")):
        lines = [{k: v for k, v in line.items() if k != "wall_s"} for line in read_metrics(path / "metrics.jsonl")]
        checkpoint = load_checkpoint(path)
        assert checkpoint is not None
        params = {name: p.numpy().tobytes() for name, p in checkpoint.state["state"]["learner"]["model"].items()}
        found[path.name] = lines, RunFolder(path).report().metrics, params
    return found


if __name__ == "__main__":
    main()
