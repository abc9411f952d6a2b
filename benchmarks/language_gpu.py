"""The language experiments on one GPU within a time limit: several runs at once, results written as they come.

``python -m benchmarks.language_gpu first``   captured steps against eager ones, GPU tests, step time and memory, and
                                              what running several at once gains
``python -m benchmarks.language_gpu runs``    the plans below, going on where the last call ended
``python -m benchmarks.language_gpu verify``  captured steps against eager ones alone

Runs share the GPU through CUDA's multi-process service where it is installed; without it their kernels take turns.
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
_COMPILERS = 6

PLANS = {
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("first", "verify", "runs"))
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="run folders, kept between calls")
    parser.add_argument("--out", type=Path, default=Path("results"), help="where results files go")
    parser.add_argument("--minutes", type=float, default=9.0, help="save and stop everything after this long")
    parser.add_argument(
        "--pools", nargs="+", default=["epoch:3", "screen+extra:5"], help="PLAN[+PLAN]:JOBS side by side"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    {"first": first, "verify": verify, "runs": plans}[args.what](args)


def verify(args: argparse.Namespace) -> None:
    """A few captured steps and as many eager ones from the same start, for every kind of method."""
    from benchmarks._captured import compare

    found = compare()
    (args.out / "verify.json").write_text(json.dumps(found, indent=2) + "\n")
    if not all(case["ok"] for case in found.values()):
        sys.exit("captured and eager steps differ")


def first(args: argparse.Namespace) -> None:
    """Check and compile side by side; then time alone; then measure memory and sharing."""
    began, environment = time.perf_counter(), _environment()

    def said(what: str) -> None:
        print(f"{what} after {time.perf_counter() - began:.0f} s", flush=True)
        _collect(args)

    _check_and_compile(args, environment)
    said("checked and compiled")
    _wait([_cli(["run", "language_cost/compiled", "--runs", str(args.runs)], environment)], 300)
    said("timed")
    swept = ["language_cost/depth-*", "language_cost/length-*"]
    _wait([_cli(["run", *swept, "--jobs", "6", "--runs", str(args.runs)], environment)], 90)
    said("memory measured")
    _wait([_cli(["run", "language_cost/eager", "--runs", str(args.runs)], environment)], 60)
    said("eager steps timed")
    _throughput(args)
    said("throughput measured")
    _print(args)


def _check_and_compile(args: argparse.Namespace, environment: dict[str, str]) -> None:
    """GPU tests and :func:`verify`, while the variants that will be timed are compiled into the compiler's cache."""
    from splitfg.experiments.language_cost import VARIANTS

    environment = {**environment, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    python = [sys.executable, "-m"]
    tests = [
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--show-capture=no",
        "--noconftest",
        "tests/gpu/test_captured_gpu.py",
    ]
    checks = [[*python, *tests], [*python, "benchmarks.language_gpu", "verify", "--out", str(args.out)]]
    jobs = [subprocess.Popen(command, env=environment, cwd=ROOT) for command in checks]
    for i in range(_COMPILERS):
        chosen = f"variants={','.join(VARIANTS[i::_COMPILERS])}"
        settings = ["--set", chosen, "--set", "blocks=1", "--set", "steps=1"]
        jobs.append(_cli(["run", "language_cost/compiled", *settings, "--runs", str(args.runs / "warm")], environment))
    _wait(jobs, 240)


def _throughput(args: argparse.Namespace) -> None:
    """Steps per second of one run alone, and of six at once."""
    settings = ["steps=3000", "corpus=synthetic", "evaluations=1", "checkpoints=1"]
    changes = [part for setting in settings for part in ("--set", setting)]
    found: dict[str, float] = {}
    with shared_gpu() as environment:
        for count in (1, 6):
            folder = args.runs / f"throughput-{count}"
            target = ["run", "language/split_fg-k4-rho0.1-10", *changes, "--seeds", f"0-{count - 1}"]
            _wait([_cli([*target, "--jobs", str(count), "--runs", str(folder)], environment)], 90)
            times = [json.loads(path.read_text())["step_ms"] for path in folder.glob("**/report.json")]
            found[f"ms_per_step_of_each_of_{count}"] = sum(times) / max(1, len(times))
            found[f"steps_per_second_of_{count}"] = sum(1e3 / ms for ms in times)
        found["multi_process_service"] = float("CUDA_MPS_PIPE_DIRECTORY" in environment)
    (args.out / "throughput.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2), flush=True)


def plans(args: argparse.Namespace) -> None:
    """The pools side by side, each its plans in order, until they are done or the time is up."""
    deadline, collect_at = time.monotonic() + 60 * args.minutes, 0.0
    with shared_gpu() as environment:
        jobs = [_pool(pool, args, environment) for pool in args.pools]
        while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
            time.sleep(2)
            if time.monotonic() > collect_at:
                _collect(args)
                collect_at = time.monotonic() + 30
        _wait(jobs, 0)
    _collect(args)
    _print(args)


def _pool(text: str, args: argparse.Namespace, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    names, _, jobs = text.partition(":")
    targets = [target for name in names.split("+") for target in PLANS.get(name, [name])]
    return _cli(["run", *targets, "--jobs", jobs or "1", "--runs", str(args.runs)], environment)


def _wait(jobs: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait for processes; those that take longer are asked to save and stop."""
    deadline = time.monotonic() + seconds
    while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
        time.sleep(0.5)
    for job in jobs:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
    for job in jobs:
        job.wait()


def _collect(args: argparse.Namespace) -> None:
    """Every finished run into one results file per experiment."""
    from splitfg.runs.folder import RunFolder
    from splitfg.runs.results import add_results

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
    return subprocess.Popen([sys.executable, "-m", "splitfg.cli", *arguments], env=environment, cwd=ROOT)


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


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}


def _sees_gpu(environment: dict[str, str]) -> bool:
    code = "import torch; torch.zeros(1, device='cuda').item()"
    try:
        return subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    main()
