"""Values of the recorded runs on images and text, and of the costs of a step, for the claims of README and notes."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from docs_records import ROOT, Value, at_step, bench, by_seed, paper, recorded, reports
from scipy.stats import ttest_ind_from_stats, ttest_rel

from splitfg_lab.runs.results import read_results

TUNED_10, BACKPROP_10 = "backprop-adamw-lr0.0015-rho0.3-10", "backprop-adam-lr0.0015-rho1-10"


def frozen_torch() -> float:
    """The frozen control at the 10% budget, run with ``model.init=torch``."""
    runs = [r for r in reports("language") if r.preset.startswith("frozen") and r.preset.endswith("-10")]
    (found,) = [r for r in runs if r.config["model"].get("init") == "torch" and "fixed" not in r.preset]
    return found.metrics["val_ppl"]


def ppl(preset: str) -> Value:
    return lambda: recorded("language", preset, "val_ppl")


def ppl_at(preset: str, step: int) -> Value:
    """Of seed 0, in the course of training."""
    return lambda: at_step("language", preset, "val_ppl", step)


def seeds(preset: str, count: int) -> tuple[Value, ...]:
    return tuple(lambda i=i: by_seed("language", preset, "val_ppl")[i] for i in range(count))  # type: ignore[misc]


def mean_ppl(preset: str) -> float:
    """Mean perplexity over the seeds that were run."""
    return fmean(by_seed("language", preset, "val_ppl"))


def cost(metric: str) -> Value:
    return lambda: recorded("language_cost", "ladder", metric)


def image_cost(metric: str) -> Value:
    return lambda: recorded("images_cost", "compiled", metric)


def epochs_s() -> float:
    """Seconds of all steps of a Split-FG run of 60 epochs."""
    return 23_437 * recorded("images_cost", "compiled", "ms/cifar10-split_fg") / 1e3


def step_ms(preset: str) -> Value:
    """Of the run that had its machine alone."""
    return lambda: next(r.step_ms for r in reports("language") if r.preset == preset and r.side_by_side == 1)


def peak(preset: str) -> Value:
    return lambda: next(r.peak_memory_mib for r in reports("language") if r.preset == preset)


def paper_ppl(preset: str) -> Value:
    return lambda: next(iter(paper("language", preset, "val_ppl")))


def over_frozen(preset: str, frozen: str, of: Callable[[str], Value] = ppl) -> Value:
    return lambda: of(preset)() / of(frozen)()  # type: ignore[operator]


def over_tuned(preset: str, budget: str = "") -> Value:
    """By how many percent a perplexity exceeds that of tuned backprop with the same budget."""
    return lambda: 100 * (over_frozen(preset, f"tuned-rho0.3{budget}")() - 1)  # type: ignore[operator]


def trunk_gain(clipped: str = "") -> Value:
    """How far Split-FG is below the frozen control at the 10% budget."""
    return lambda: ppl("frozen-10")() - ppl(f"split_fg-k4-rho0.1{clipped}-10")()  # type: ignore[operator]


BEST_RHOS = {"split_fg-k4": "0.1", "pull-maps": "0.1", "learned": "0.3", "tuned": "0.3", "maps": "0.03"}
"""The best of the step scales that were run."""
FAST_SEARCHED = ("split_fg-k4", "pull-maps", "learned", "tuned")
"""Methods that the fast line search trains."""


def searched(name: str, seeds_run: int = 1) -> tuple[Value, ...]:
    """Perplexities with a line search, then with the best step scale and the same seeds."""
    return (*seeds(f"{name}-adaptive-10", seeds_run), *seeds(f"{name}-rho{BEST_RHOS[name]}-10", seeds_run))


def scales_run(name: str) -> float:
    """How many step scales of a method were run at the 10% budget, with the eps of the method's best run."""
    best = {"split_fg-k4": 1e-8, "maps": 1e-5}.get(name, 1e-6)
    found = [r for r in reports("language") if re.fullmatch(rf"{name}-rho[\d.]+-10", r.preset)]
    return len({r.config["rho"] for r in found if r.config["optimizer"]["eps"] == best})


def pull_search_behind() -> float:
    """How far the line search of one pull is behind the best step scale, in percent."""
    return 100 * (mean_ppl("pull-maps-adaptive-10") / mean_ppl("pull-maps-rho0.1-10") - 1)


def behind_grid(name: str, search: str = "adaptive") -> Value:
    """How far a line search is behind the best step scale, in percent, seed 0."""

    def found() -> float:
        (ours,), (grid,) = seeds(f"{name}-{search}-10", 1), seeds(f"{name}-rho{BEST_RHOS[name]}-10", 1)
        return 100 * (ours() / grid() - 1)  # type: ignore[operator]

    return found


def smallest_rho(preset: str) -> tuple[Value, Value]:
    """The smallest rho of a line search with seed 0, and its step."""

    def found() -> dict[str, float]:
        runs = read_results(ROOT / "results" / "language.json")
        (run,) = [r for r in runs if (r.report.preset, r.report.seed) == (preset, 0)]
        return min((point for point in run.curve if "rho" in point), key=lambda point: point["rho"])

    return lambda: found()["rho"], lambda: found()["step"]


MAPS = ("maps-attention", "annealed", "maps-gated", "maps-every4")
"""Refinements of maps to the writers."""


def first_evaluation(preset: str) -> tuple[Value, Value]:
    """The perplexity of a run at its first evaluation, and the step."""

    def found() -> dict[str, float]:
        (run,) = [r for r in read_results(ROOT / "results" / "language.json") if r.report.preset == preset]
        return next(point for point in run.curve if "val_ppl" in point)

    return lambda: found()["val_ppl"], lambda: found()["step"]


def jump(preset: str) -> tuple[Value, Value]:
    """The steps of the two evaluations between which the perplexity of a run rises the most."""

    def found() -> tuple[float, float]:
        (run,) = [r for r in read_results(ROOT / "results" / "language.json") if r.report.preset == preset]
        points = [(p["step"], p["val_nll"]) for p in run.curve if "val_nll" in p]
        (before, _), (after, _) = max(pairwise(points), key=lambda pair: pair[1][1] - pair[0][1])
        return before, after

    return (lambda: found()[0]), (lambda: found()[1])


def ladder_mib(variant: str) -> Value:
    return lambda: recorded("language_cost", "ladder-memory-16", f"mib/{variant}")


def image_mib(variant: str) -> Value:
    """Peak of a compiled step on CIFAR-10."""
    return lambda: recorded("images_memory", "cifar10-compiled", f"mib/{variant}")


def top1(preset: str) -> Value:
    """Accuracy with seed 0, the only one that all of these presets were run with."""
    return lambda: by_seed("images", preset, "accuracy")[0]


def accuracies(preset: str, count: int) -> tuple[Value, ...]:
    """Accuracy with each seed."""
    return tuple(lambda i=i: by_seed("images", preset, "accuracy")[i] for i in range(count))  # type: ignore[misc]


def spread(preset: str) -> float:
    """By how many points the accuracies of seeds differ."""
    found = by_seed("images", preset, "accuracy")
    return max(found) - min(found)


def paired(first: str, second: str) -> Value:
    """The p-value of the paired t-test between the accuracies of two presets."""
    return lambda: float(ttest_rel(*(by_seed("images", preset, "accuracy") for preset in (first, second))).pvalue)


def welch(preset: str, mean: float, deviation: float, seeds: int) -> Value:
    """The p-value of Welch's t-test between our accuracies and the paper's."""

    def found() -> float:
        ours = by_seed("images", preset, "accuracy")
        own = fmean(ours), stdev(ours), len(ours)
        return float(ttest_ind_from_stats(*own, mean, deviation, seeds, equal_var=False).pvalue)

    return found


def mean_top1(preset: str) -> Value:
    """Mean accuracy over the seeds that were run."""
    return lambda: fmean(by_seed("images", preset, "accuracy"))


def best_top1(*presets: str) -> Value:
    """The best accuracy of presets with seed 0."""
    return lambda: max(by_seed("images", preset, "accuracy")[0] for preset in presets)


def toy(classes: int, metric: str) -> Value:
    return lambda: recorded("toy_variance", f"ce-c{classes}", metric)


def share(preset: str) -> Value:
    return lambda: recorded("language_energy", preset, "trunk_share")


def paper_share() -> float:
    return next(iter(paper("language_energy", "init", "trunk_share")))


def mib(variant: str, preset: str = "compiled-memory") -> float:
    return recorded("language_cost", preset, f"mib/{variant}")


def eager_ratio(K: int) -> Value:
    return lambda: recorded("language_cost", "eager", f"ratio/split_fg-k{K}-chunk1")


def layer_mib(variant: str) -> Value:
    """What one more layer costs, between the deepest two trunks."""
    return lambda: (mib(variant, "depth-64") - mib(variant, "depth-32")) / 32


LEANEST = "split_fg-k4-chunk1-block20-lean"


LEAN = "split_fg-k4-chunk1-block22-lean"


def step_ratio(case: str, K: int) -> Value:
    def value() -> float:
        (found,) = [c for c in bench()["step"] if c["case"].startswith(case)]
        return found["ratio_to_backprop"][f"split_fg_k{K}"]

    return value


def bench_feedback(case: str) -> tuple[Value, Value, Value, Value]:
    """Time of a step and memory of an estimate over backprop's, backprop's memory, and that with the closed head."""

    def of(part: str) -> dict[str, Any]:
        return next(c for c in bench()[part] if c["case"].startswith(case))

    def held(name: str) -> float:
        return of("feedback")["peak_mib"][name]

    return (
        lambda: of("step")["ratio_to_backprop"]["learned"],
        lambda: held("learned") / held("backprop"),
        lambda: held("backprop"),
        lambda: held("backprop_closed_head") / held("backprop"),
    )


def bench_ratio(part: str, metric: str, name: str, base: str) -> Value:
    return lambda: bench()[part][metric][name] / bench()[part][metric][base]


def steps_of(preset: str) -> Value:
    return lambda: next(r.steps for r in reports("language") if r.preset == preset)
