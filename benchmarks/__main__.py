"""``make bench``: print the ratios. ``python -m benchmarks --record`` also keeps them, with what they rest on."""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._cases import Case, flat_head, gpt, mlp, tabm, toy
from benchmarks._measure import interleaved_ms, peak_mib
from splitfg import Backprop, ForwardMode, FrozenTrunk, GradientLearner, LearnedFeedback, LinearHead, SplitFG
from splitfg.estimators import Estimator
from splitfg.recipes import Adam
from splitfg_lab.runs.environment import describe_device, resolve_device, source_revision
from splitfg_lab.runs.storage import make_folder, write_json

RECORDED = Path(__file__).parent / "recorded.json"
Step = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Print the ratios.")
    parser.add_argument(
        "--record",
        type=Path,
        nargs="?",
        const=RECORDED,
        help=f"also write them to a file ({RECORDED.name} if not named)",
    )
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(arguments)
    device = resolve_device("auto")
    found = measure(device.type, args.repeats)
    _print(found)
    if args.record is not None:
        record(args.record, device, found)
        print(f"written: {args.record}")


def measure(device: str, repeats: int) -> dict[str, Any]:
    """Everything that is printed."""
    return {
        "step": [_step_ratios(make(device), repeats) for make in (toy, tabm, mlp, gpt)],
        "feedback": [_feedback_ratios(make(device), repeats) for make in (tabm, mlp, gpt)],
        "chunk": _chunk_ratios(gpt(device), repeats),
        "head": _head_ratios(flat_head(device), repeats),
    }


def _training_step(case: Case, estimator: Estimator) -> Step:
    learner = GradientLearner(case.split, estimator, Adam(lr=1e-5).build(case.split, rho=0.03))
    generator = torch.Generator(case.x.device).manual_seed(0)
    return lambda: learner.step(case.x, case.y, generator=generator)


def _step_ratios(case: Case, repeats: int) -> dict[str, object]:
    """Learned feedback, Split-FG at several K, and the frozen trunk, against backprop: whole training steps."""
    estimators: dict[str, Estimator] = {"backprop": Backprop(), "frozen": FrozenTrunk(), "learned": LearnedFeedback()}
    estimators |= {f"split_fg_k{K}": SplitFG(K) for K in (1, 4, 8)}
    ms = interleaved_ms({n: _training_step(case, e) for n, e in estimators.items()}, repeats=repeats)
    return {"case": case.name, "ms": ms, "ratio_to_backprop": {n: t / ms["backprop"] for n, t in ms.items()}}


def _feedback_ratios(case: Case, repeats: int) -> dict[str, object]:
    """Learned feedback against backprop: time and memory of an estimate, whose maps have begun to learn."""
    generator, learned = torch.Generator(case.x.device).manual_seed(0), LearnedFeedback()

    def feedback() -> object:
        estimate = learned(case.split, case.x, case.y, generator=generator)
        learned.update_state(case.split, estimate)
        return estimate

    closed = Backprop(closed_head=True)
    steps: dict[str, Step] = {
        "backprop": lambda: Backprop()(case.split, case.x, case.y),
        "backprop_closed_head": lambda: closed(case.split, case.x, case.y),
        "learned": feedback,
    }
    ms = interleaved_ms(steps, repeats=repeats)
    return {"case": case.name, "ms": ms, "peak_mib": {n: peak_mib(s) for n, s in steps.items()}}


def _chunk_ratios(case: Case, repeats: int) -> dict[str, object]:
    """K = 8 tangents one after another against all at once, beside backprop: time and memory of an estimate."""
    generator = torch.Generator(case.x.device).manual_seed(0)

    def estimate(estimator: Estimator) -> Step:
        return lambda: estimator(case.split, case.x, case.y, generator=generator)

    steps = {
        "backprop": estimate(Backprop()),
        "backprop_closed_head": estimate(Backprop(closed_head=True)),
        "split_fg_k8_chunk1": estimate(SplitFG(8, engine=ForwardMode(chunk=1))),
        "split_fg_k8_chunk8": estimate(SplitFG(8)),
        "split_fg_k1_chunk1": estimate(SplitFG(1)),
    }
    ms = interleaved_ms(steps, repeats=repeats)
    return {"case": case.name, "ms": ms, "peak_mib": {n: peak_mib(s) for n, s in steps.items()}}


def _head_ratios(case: Case, repeats: int) -> dict[str, object]:
    """The closed-form head, from all logits at once (2^25) to few of them, against autograd on the full logits."""
    layer = case.split.head.layers[0]  # type: ignore[attr-defined]

    def closed(block: int) -> Step:
        head = LinearHead(layer, block=2**block)
        return lambda: head(case.x, case.y)

    def autograd() -> object:
        h = case.x.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(layer(h), case.y)
        return torch.autograd.grad(loss, [h, layer.weight, layer.bias])

    steps: dict[str, Step] = {"autograd": autograd} | {f"block{n}": closed(n) for n in (25, 24, 22, 20)}
    ms = interleaved_ms(steps, repeats=repeats)
    return {"case": "512 rows, 50,257 classes", "ms": ms, "peak_mib": {n: peak_mib(s) for n, s in steps.items()}}


def _print(found: dict[str, Any]) -> None:
    print("A training step against backprop's (median of steps that take turns)")
    for case in found["step"]:
        print(f"  {case['case']}")
        for name, ms in case["ms"].items():
            print(f"    {name:<22}{ms:>10.2f} ms {case['ratio_to_backprop'][name]:>8.2f} x")
    for case in found["feedback"]:
        _print_case("An estimate: learned feedback", case)
    _print_case("An estimate: tangents one by one or together", found["chunk"])
    _print_case("The exact head", found["head"])


def _print_case(title: str, case: dict[str, Any]) -> None:
    print(f"{title}: {case['case']}")
    first = next(iter(case["ms"]))
    for name, ms in case["ms"].items():
        mib, base = case["peak_mib"][name], case["peak_mib"][first]
        time_ratio = ms / case["ms"][first]
        print(f"    {name:<22}{ms:>10.2f} ms {time_ratio:>6.2f} x {mib:>10.1f} MiB {mib / base:>6.2f} x")


def made(device: torch.device) -> dict[str, Any]:
    """Return what measurements rest on: date, device, revision and versions."""
    revision = source_revision()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "git": None if revision is None else revision.commit,
        "git_dirty": None if revision is None else revision.dirty,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def record(path: Path, device: torch.device, found: dict[str, Any]) -> None:
    """Replace a file as a whole by what was found, and by what it rests on."""
    make_folder(path.parent)
    write_json(path, {**made(device), **found})


if __name__ == "__main__":
    main()
