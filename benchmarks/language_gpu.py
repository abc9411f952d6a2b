"""The language experiments on one GPU within a time limit: several runs at once, results written as they come.

``python -m benchmarks.language_gpu time``    the time of a step, with the GPU to itself
``python -m benchmarks.language_gpu check``   GPU tests, captured steps against eager ones, memory of a step
``python -m benchmarks.language_gpu verify``  captured steps against eager ones alone
``python -m benchmarks.language_gpu runs``    the plans below, going on where the last call ended

Only ``time`` needs a GPU that nothing else uses; ``check`` may go on beside ``runs``. Two runs go side by side: one
trains while the other compiles. More only slow each other down, and an epoch may not end within the limit. They share
the GPU through CUDA's multi-process service where it is installed; without it their kernels take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]

PLANS = {
    "varied": [
        *(
            f"language/{name}{variation}-10"
            for variation in ("-apart", "-torch-apart", "-torch")
            for name in (
                "split_fg-k4-rho0.003",
                "split_fg-k4-rho0.1",
                "split_fg-k4-rho0.03",
                "split_fg-k4-rho0.3",
                "frozen",
                "frozen-fixed",
            )
        ),
        "language/frozen-fixed-10",
    ],
    "screen": [
        "language/frozen-10",
        *(f"language/split_fg-k4-rho{rho}-10" for rho in ("0.1", "0.003", "0.03", "1", "0.3", "0.01")),
        *(f"language/split_fg-k{K}-rho0.1-10" for K in (1, 2, 8, 32)),
        "language/backprop-adam-lr0.0015-rho1-10",
        "language/backprop-adam-lr0.0015-rho0.3-10",
        "language/backprop-adam-lr0.0015-rho0.1-10",
        "language/backprop-adamw-lr0.0015-rho0.3-10",
        "language/backprop-adam-lr0.0045-rho0.3-10",
        "language/backprop-adam-lr0.0045-rho0.1-10",
        "language/split_fg-k32-rho0.3-10",
        "language_energy/init",
    ],
    "epoch": [
        "language/frozen",
        "language/split_fg-k4-rho0.1",
        "language/split_fg-k4-rho0.03",
        "language/split_fg-k4-rho1",
        "language/backprop",
        "language/split_fg-k8-rho0.03",
        "language/backprop-tuned",
    ],
    "extra": [
        "language/fg-adam-k4-lr0.00045-10",
        "language/light-rho1-10",
        "language/light-rho0.03-10",
        "language/conditioned-rho0.1-10",
        "language/split_fg-muon-10",
        "language/split_fg-adamw-10",
        "language/split_fg-sgd-10",
        "language/fg-adam-k4-lr0.0015-10",
        "language/fg-adam-k4-lr0.00015-10",
        "language/fg-adam-k1-10",
        "language/es-adam-k1-10",
        "language/knn_lm",
        "language/unigram",
        "language/bigram",
    ],
}

COSTS = {
    "time": ["language_cost/compiled", "language_cost/eager"],
    "memory": ["language_cost/compiled-memory", "language_cost/eager-memory"],
    "swept memory": ["language_cost/depth-*", "language_cost/length-*"],
}
MEMORY = ("memory", "swept memory")
TESTS = ["-p", "no:cacheprovider", "--show-capture=no", "-ofilterwarnings=default", "tests/gpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=VERBS)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="run folders, kept between calls")
    parser.add_argument("--out", type=Path, default=Path("results"), help="where results files go")
    parser.add_argument("--minutes", type=float, default=9.0, help="save and stop everything after this long")
    parser.add_argument(
        "--pools", nargs="+", default=["epoch:1", "screen+extra:1"], help="PLAN[+PLAN]:JOBS side by side"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    VERBS[args.what](args)


def verify(args: argparse.Namespace) -> None:
    """A few captured steps and as many eager ones from the same start, for every kind of method."""
    from benchmarks._captured import compare

    found = compare()
    (args.out / "verify.json").write_text(json.dumps(found, indent=2) + "\n")
    if not all(case["ok"] for case in found.values()):
        sys.exit("captured and eager steps differ")


def timing(args: argparse.Namespace) -> None:
    """The time of a step, compiled and captured, and in eager code."""
    _finish([_cli(["run", *COSTS["time"], "--jobs", "1", "--runs", str(args.runs)], _compiling())], args)


def check(args: argparse.Namespace) -> None:
    """GPU tests, captured steps against eager ones, and memory, side by side."""
    environment, python = _compiling(), [sys.executable, "-m"]
    checks = [["pytest", "-q", *TESTS], ["benchmarks.language_gpu", "verify", "--out", str(args.out)]]
    jobs = [subprocess.Popen([*python, *command], env=environment, cwd=ROOT) for command in checks]
    jobs += [_cli(["run", *COSTS[what], "--jobs", "1", "--runs", str(args.runs)], environment) for what in MEMORY]
    _finish(jobs, args)
    if any(job.returncode for job in jobs):
        sys.exit("a check failed, or had to be stopped")


def plans(args: argparse.Namespace) -> None:
    """The pools side by side, each its plans in order, until they are done or the time is up."""
    with shared_gpu() as environment:
        _finish([_pool(pool, args, environment) for pool in args.pools], args)


def _pool(text: str, args: argparse.Namespace, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    names, _, jobs = text.partition(":")
    targets = [target for name in names.split("+") for target in PLANS.get(name, [name])]
    return _cli(["run", *targets, "--jobs", jobs or "1", "--runs", str(args.runs)], environment)


def _finish(jobs: Sequence[subprocess.Popen[bytes]], args: argparse.Namespace) -> None:
    """Wait for processes, collecting what is done; when the time is up they are asked to save and stop."""
    deadline, collect_at = time.monotonic() + 60 * args.minutes, time.monotonic() + 30
    while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
        time.sleep(1)
        if time.monotonic() > collect_at:
            _collect(args)
            collect_at = time.monotonic() + 30
    for job in jobs:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
    for job in jobs:
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
    _collect(args)
    _print(args)


def _collect(args: argparse.Namespace) -> None:
    """Every finished run into one results file per experiment."""
    from splitfg_lab.runs.folder import RunFolder
    from splitfg_lab.runs.results import add_results

    configs = [
        p for name in ("language", "language_cost", "language_energy") for p in (args.runs / name).rglob("config.json")
    ]
    folders = [RunFolder(path.parent) for path in sorted(configs)]
    add_results([folder for folder in folders if folder.finished], args.out)


def _print(args: argparse.Namespace) -> None:
    """What was collected, a line per run; of the costs, a line per variant."""
    for path in sorted(args.out.glob("language*.json")):
        for run in json.loads(path.read_text())["runs"]:
            metrics = {name: float(f"{value:.5g}") for name, value in run["metrics"].items()}
            print(
                path.stem, run["preset"], run["status"], f"{run['steps']} steps", f"{run['step_ms']} ms", run["message"]
            )
            if path.stem == "language_cost":
                _print_variants(metrics)
            else:
                print("   ", metrics)


def _print_variants(metrics: dict[str, float]) -> None:
    for variant in dict.fromkeys(name.partition("/")[2] for name in metrics):
        found = {name.partition("/")[0]: value for name, value in metrics.items() if name.endswith(f"/{variant}")}
        print("   ", variant, found)


def _cli(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "splitfg_lab.cli", *arguments], env=environment, cwd=ROOT)


@contextmanager
def shared_gpu() -> Iterator[dict[str, str]]:
    """The environment for runs that share the GPU: with the multi-process service while this lasts, if it starts."""
    environment = _environment()
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("no multi-process service here: kernels of several runs take turns", flush=True)
        yield environment
        return
    folder = tempfile.mkdtemp(prefix="mps-")
    served = {**environment, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    quiet = subprocess.DEVNULL
    started = subprocess.run([control, "-d"], env=served, stdin=quiet, stdout=quiet, stderr=quiet, check=False)
    if started.returncode == 0 and _sees_gpu(served):
        try:
            yield served
        finally:
            subprocess.run([control], input=b"quit\n", env=served, check=False)
        return
    print("the multi-process service does not start here: kernels of several runs take turns", flush=True)
    yield environment


def _compiling() -> dict[str, str]:
    """The environment for processes that compile side by side."""
    return {**_environment(), "TORCHINDUCTOR_COMPILE_THREADS": "2"}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}


def _sees_gpu(environment: dict[str, str]) -> bool:
    code = "import torch; torch.zeros(1, device='cuda').item()"
    try:
        return subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


VERBS = {"time": timing, "check": check, "verify": verify, "runs": plans}


if __name__ == "__main__":
    main()
