"""The language experiments on one GPU within a time limit: several runs at once, results written as they come.

``python -m benchmarks.language_gpu verify``       captured steps against eager ones, on GPT small8
``python -m benchmarks.language_gpu cost``         step time, peak memory, memory against depth and length
``python -m benchmarks.language_gpu throughput``   what running several at once gains
``python -m benchmarks.language_gpu runs``         the plans below, going on where the last call ended

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

PLANS = {
    "screen": [
        "language/frozen-10",
        *(f"language/split_fg-k4-rho{rho}-10" for rho in ("0.1", "1", "0.03", "0.3", "0.01", "0.003")),
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
        "language/split_fg-k4-rho0.1",
        "language/frozen",
        "language/split_fg-k4-rho1",
        "language/split_fg-k4-rho0.03",
        "language/backprop",
        "language/backprop-tuned",
        "language/split_fg-k8-rho0.1",
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
    parser.add_argument("what", choices=("verify", "cost", "throughput", "runs"))
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="run folders, kept between calls")
    parser.add_argument("--out", type=Path, default=Path("results"), help="where results files go")
    parser.add_argument("--minutes", type=float, default=9.0, help="save and stop everything after this long")
    parser.add_argument(
        "--pools", nargs="+", default=["epoch:3", "screen+extra:5"], help="PLAN[+PLAN]:JOBS, side by side"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "verify":
        verify(args)
    elif args.what == "cost":
        cost(args, _environment())
    else:
        with shared_gpu() as environment:
            (throughput if args.what == "throughput" else plans)(args, environment)


def verify(args: argparse.Namespace) -> None:
    """A few captured steps and as many eager ones from the same start, for every kind of method."""
    from benchmarks._captured import compare

    found = compare()
    (args.out / "verify.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    if not all(case["ok"] for case in found.values()):
        sys.exit("captured and eager steps differ")


def cost(args: argparse.Namespace, environment: dict[str, str]) -> None:
    """Compile all variants side by side first, so that the process that times them finds them compiled."""
    from splitfg.experiments.language_cost import VARIANTS

    warm = {**environment, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    began = time.perf_counter()
    groups = [VARIANTS[i::6] for i in range(6)]
    settings = [["--set", f"variants={','.join(group)}", "--set", "blocks=1", "--set", "steps=1"] for group in groups]
    jobs = [_cli(["run", "language_cost/compiled", *s, "--runs", str(args.runs / "warm")], warm) for s in settings]
    for job in jobs:
        job.wait()
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    _cli(["run", "language_cost/compiled", "--runs", str(args.runs)], environment).wait()
    print(f"timed after {time.perf_counter() - began:.0f} s", flush=True)
    rest = ["language_cost/eager", "language_cost/depth-*", "language_cost/length-*"]
    _within(args, [["run", *rest, "--jobs", "4", "--runs", str(args.runs)]], environment)
    _cli(["report", "--experiment", "language_cost", "--runs", str(args.runs)], environment).wait()


def throughput(args: argparse.Namespace, environment: dict[str, str]) -> None:
    """Milliseconds per step of one run alone, and of four and eight at once."""
    settings = ["--set", "steps=3000", "--set", "corpus=synthetic", "--set", "evaluations=1", "--set", "checkpoints=1"]
    found: dict[str, float] = {}
    for count in (1, 4, 8):
        folder = args.runs / f"throughput-{count}"
        target = ["run", "language/split_fg-k4-rho0.1-10", *settings, "--seeds", f"0-{count - 1}"]
        _cli([*target, "--jobs", str(count), "--runs", str(folder)], environment).wait()
        times = [json.loads(path.read_text())["step_ms"] for path in folder.glob("**/report.json")]
        found[f"ms_per_step_with_{count}"] = sum(times) / max(1, len(times))
        found[f"steps_per_second_with_{count}"] = sum(1e3 / ms for ms in times)
    found["multi_process_service"] = float("CUDA_MPS_PIPE_DIRECTORY" in environment)
    (args.out / "throughput.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2), flush=True)


def plans(args: argparse.Namespace, environment: dict[str, str]) -> None:
    """The pools side by side, each its plans in order, until they are done or the time is."""
    commands = []
    for pool in args.pools:
        names, _, jobs = pool.partition(":")
        targets = [target for name in names.split("+") for target in PLANS.get(name, [name])]
        commands.append(["run", *targets, "--jobs", jobs or "1", "--runs", str(args.runs)])
    _within(args, commands, environment)


def _within(args: argparse.Namespace, commands: Sequence[list[str]], environment: dict[str, str]) -> None:
    """Run commands until they end or the time is up, collecting results every half minute."""
    deadline = time.monotonic() + 60 * args.minutes
    jobs, collect_at = [_cli(command, environment) for command in commands], 0.0
    while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
        time.sleep(5)
        if time.monotonic() > collect_at:
            _collect(args)
            collect_at = time.monotonic() + 30
    for job in jobs:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
    for job in jobs:
        job.wait()
    _collect(args)


def _collect(args: argparse.Namespace) -> None:
    """Every finished run into one results file per experiment."""
    from splitfg.runs.folder import RunFolder
    from splitfg.runs.results import add_results

    configs = [
        p for name in ("language", "language_cost", "language_energy") for p in (args.runs / name).rglob("config.json")
    ]
    folders = [RunFolder(path.parent) for path in sorted(configs)]
    add_results([folder for folder in folders if folder.finished], args.out)


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
    started = subprocess.run([control, "-d"], env=served, check=False)
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
