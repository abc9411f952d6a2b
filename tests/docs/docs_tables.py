"""Values of the tables in notes and on the page of claims."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from docs_networks import (
    MAPS,
    best_top1,
    mean_top1,
    ppl,
    pull_search_behind,
    scales_run,
    searched,
    seeds,
    spread,
    top1,
)
from docs_records import Value, by_seed, paper, recorded, reports, runs_of
from docs_tabular import searches_at_least_as_good, step_result

from splitfg_lab.experiments.language._ladder import EPSILONS, epsilon

FLAT = {
    "Backprop": ("backprop", 70.7),
    "Learned feedback, measured by a second pass": ("learned", None),
    "One pull, reverse mode inside a block only": ("pull", None),
    "Direct path": ("direct-rho1", None),
    "Direct path with learned maps": ("maps-rho1", None),
    **{f"Split-FG, K = {K}": (f"k{K}-rho1", None) for K in (256, 64, 16)},
    "Split-FG, K = 4": ("split_fg", 56.9),
    "Activity tangents, K = 8": ("activity-rho1", None),
    "Split-FG, K = 4, single linear head": ("split_fg-single", 54.4),
    "Frozen trunk": ("frozen", None),
    "Split-FG, K = 1": ("k1-rho1", None),
    "ES": ("es", 21.7),
    "Pure FG": ("pure_fg", 22.6),
    "ES, K = 1": ("es-k1", None),
    "Pure FG, K = 1": ("pure_fg-k1", None),
}
"""The flat head: preset and the paper's number."""
FLAT_RHOS = ("1", "0.3", "0.1", "0.03")
FLAT_SEARCHED = {
    "Split-FG, K = 4": ("split_fg", best_top1("flat-split_fg", *(f"flat-k4-rho{r}" for r in FLAT_RHOS[1:]))),
    "Split-FG, K = 64": ("k64", best_top1(*(f"flat-k64-rho{r}" for r in FLAT_RHOS[:3]))),
    "Direct path": ("direct", best_top1(*(f"flat-direct-rho{r}" for r in FLAT_RHOS))),
    "Learned feedback, measured by a second pass": ("learned", top1("flat-learned")),
    "Activity tangents, K = 8": ("activity", best_top1(*(f"flat-activity-rho{r}" for r in FLAT_RHOS))),
}
"""The line search on the flat head: preset and the best step scale."""


def _flat(name: str, paper: float | None) -> tuple[Value, ...]:
    preset = f"flat-{name}"
    return (partial(_count, "images", preset), mean_top1(preset), *([] if paper is None else [paper]))


def _flat_searched(name: str, best: Value) -> tuple[Value, ...]:
    presets = [p for p in (f"flat-{name}-adaptive", f"flat-{name}-adaptive-fast") if runs_of("images", p)]
    return (*map(top1, presets), best)


def _folds(*methods: str) -> tuple[Value, ...]:
    """Accuracies on Otto, the paper's after each, and the number of folds."""
    found: list[Value] = []
    for preset in (f"otto-{method}" for method in methods):
        found += [partial(recorded, "tabular", preset, "accuracy"), *paper("tabular", preset, "accuracy")]
    return (*found, 5)


def _means(name: str, *presets: str, counts: int, quoted: bool = True) -> tuple[Value, ...]:
    """Means over seeds, the paper's number after each if ``quoted``, then the first counts of seeds."""
    metric, found = {"images": "accuracy", "language": "val_ppl"}[name], list[Value]()
    for preset in presets:
        theirs = sorted(paper(name, preset, metric))[:1] if quoted else []
        found += [partial(_mean, name, preset, metric), *theirs]
    return (*found, *(partial(_count, name, preset) for preset in presets[:counts]))


def _mean(name: str, preset: str, metric: str) -> float:
    return fmean(by_seed(name, preset, metric))


def _count(name: str, preset: str) -> float:
    return len(runs_of(name, preset))


_CIFAR, _GPT = partial(_means, "images"), partial(_means, "language")
_ours = partial(_means, counts=2, quoted=False)


def _searched_means(name: str, seeds_run: int) -> tuple[Value, ...]:
    """Means over the seeds of the line search, for it and for the best step scale, then the seeds and the scales."""
    found = searched(name, seeds_run)
    halves = found[:seeds_run], found[seeds_run:]
    return (*(partial(_fmean, half) for half in halves), seeds_run, partial(scales_run, name))


def _fmean(values: tuple[Value, ...]) -> float:
    return fmean(value() if callable(value) else value for value in values)


def _flat_best(name: str) -> tuple[Value, ...]:
    """Accuracies of the default line search and of the best step scale on the flat head, seed 0."""
    (best,) = (best for preset, best in FLAT_SEARCHED.values() if preset == name)
    return (top1(f"flat-{name}-adaptive"), best)


def _activity_behind() -> float:
    ours, best = _flat_best("activity")
    return best() - ours()  # type: ignore[operator]


def _budgets(preset: str) -> tuple[Value, ...]:
    """Perplexities of all seeds after 3%, 10% and 100% of an epoch, as far as they were run."""
    return tuple(v for budget in ("-3", "-10", "") for v in seeds(f"{preset}{budget}", _count_of(f"{preset}{budget}")))


def _count_of(preset: str) -> int:
    """Seeds of a language preset; 0 for a budget that it does not have."""
    return len({run.seed for run in reports("language") if run.preset == preset})


def _memory(variant: str, paper: float) -> tuple[Value, ...]:
    return (lambda: recorded("language_cost", "eager-memory", f"mib/{variant}"), paper)


TABLES: dict[str, tuple[dict[str, tuple[Value, ...]], ...]] = {
    "docs/claims.md": (
        {
            "On tables, Split-FG lies between pure FG and backprop: Otto, accuracy in %": _folds(
                "pure_fg", "split_fg", "backprop"
            ),
            "CIFAR-10: training the trunk improves on a frozen one": _CIFAR(
                "cifar10-split_fg", "cifar10-frozen", counts=1
            ),
            "CIFAR-100: the same": _CIFAR("cifar100-split_fg", "cifar100-frozen", counts=1),
            "The factored flat head is better than a single layer": _CIFAR(
                "flat-split_fg", "flat-split_fg-single", counts=1
            ),
            "Pure FG and ES fail on the whole ResNet-20": _CIFAR("cifar10-pure_fg", "cifar10-es", counts=2),
            "Forward-Forward and predictive coding are worse than Split-FG on CIFAR-10": _CIFAR(
                "cifar10-forward_forward", "cifar10-predictive_coding", "cifar10-split_fg", counts=3
            ),
            "GPT, one epoch: training the trunk improves on a frozen one (perplexity)": _GPT(
                "split_fg-k4-rho0.1", "frozen", counts=1
            ),
            "GPT: the naive trunk step, rho = 1, is worse than a frozen trunk": _GPT(
                "split_fg-k4-rho1", "frozen", counts=1
            ),
            "GPT: a step needs less memory than backprop's, eager, in MiB": (
                *_memory("split_fg-k4-chunk1", 811),
                *_memory("backprop", 1238),
                1,
            ),
        },
        {
            "Learned feedback equals backprop on tables: Otto, accuracy in %": (
                lambda: recorded("tabular", "otto-learned_layers", "accuracy"),
                lambda: recorded("tabular", "otto-backprop", "accuracy"),
                5,
            ),
            "on a whole ResNet-20, 60 epochs": _ours("images", "cifar10-learned", "cifar10-backprop"),
            "on a whole ResNet-20, 6,000 steps": (
                *_ours("images", "resnet20-learned-layers", "resnet20-backprop"),
                partial(_mean, "images", "resnet20-learned", "accuracy"),
            ),
            "on a whole ResNet-18, CIFAR-100": _ours("images", "cifar100-learned", "cifar100-backprop"),
            "on the GPT, a tenth of an epoch (perplexity)": _ours(
                "language", "learned-layers-rho0.3-10", "tuned-rho0.3-10"
            ),
            "on the GPT, one epoch": _ours("language", "learned-layers-rho0.3", "tuned-rho0.3"),
            "Maps train a GPT forward-only, with no gradient between layers, one epoch": _ours(
                "language", "maps-tied0.1-rho0.03", "tuned-rho0.3"
            ),
            "Four pulls come near backprop on the GPT, one epoch": _ours(
                "language", "pull4-maps-rho0.1", "tuned-rho0.3"
            ),
            "One pull of whole blocks does": _ours("language", "pull-fastmaps-blocks-rho0.1", "tuned-rho0.3"),
            "Two pulls along skips train a whole ResNet-20": _ours("images", "cifar10-skips2", "cifar10-backprop"),
        },
        {
            "on four tables, three methods: Otto, Split-FG": (
                *step_result("otto", "split_fg", "adaptive", "grid"),
                5,
                5,
                searches_at_least_as_good,
                12,
            ),
            "on the GPT, learned feedback (perplexity)": _searched_means("learned", 2),
            "on the GPT, backprop (perplexity)": _searched_means("tuned", 2),
            "on the GPT, Split-FG, K = 4 (perplexity)": (*_searched_means("split_fg-k4", 1), 1),
            "on the GPT, maps to the writers (perplexity)": _searched_means("maps", 1),
            "on the GPT, one pull (perplexity)": (*_searched_means("pull-maps", 3), pull_search_behind),
            "on the flat head, learned feedback": (*_flat_best("learned"), 1, 1, lambda: spread("flat-learned")),
            "on the flat head, direct path": (*_flat_best("direct"), 1, 4, 32, 32),
            "on the flat head, Split-FG, K = 4": (*_flat_best("split_fg"), 1, 4, lambda: spread("flat-split_fg")),
            "on the flat head, activity tangents, K = 8": (*_flat_best("activity"), 1, 4, _activity_behind),
        },
    ),
    "docs/notes/images.md": (
        {label: _flat(*found) for label, found in FLAT.items()},
        {label: _flat_searched(*found) for label, found in FLAT_SEARCHED.items()},
    ),
    "docs/notes/language.md": (
        {
            "Frozen trunk": tuple(ppl(epsilon("frozen", eps)) for eps in EPSILONS),
            "Split-FG, K = 4, rho = 0.1": tuple(ppl(epsilon("split_fg", eps)) for eps in EPSILONS),
            "Learned feedback, rho = 0.3": (*seeds(epsilon("learned", 1e-6), 1), ppl(epsilon("learned", 1e-5))),
            "Backprop, rho = 0.3": tuple(seeds(epsilon("backprop", eps), 1)[0] for eps in EPSILONS),
        },
        {
            "Maps, one pull": _budgets("pull-maps-rho0.1"),
            "Maps, two pulls": _budgets("pull2-maps-rho0.1"),
            "Maps, four pulls": _budgets("pull4-maps-rho0.1"),
            "One pull of whole transformer blocks": _budgets("pull-maps-blocks-rho0.1"),
            "the same, maps along attention": _budgets("pull-attention-blocks-rho0.1"),
            "the same, maps three times faster": _budgets("pull-fastmaps-blocks-rho0.1"),
            "Two pulls of whole transformer blocks": _budgets("pull2-maps-blocks-rho0.1"),
            "Learned feedback, layers measured alone": _budgets("learned-layers-rho0.3"),
            "Learned feedback, measured by a second pass": _budgets("learned-rho0.3"),
            "the same, at every fourth step only": _budgets("learned-every4-rho0.3"),
            "Backprop at eps 1e-6": _budgets("tuned-rho0.3"),
        },
        {
            "Learned feedback": searched("learned", 2),
            "Maps to the writers": searched("maps"),
            "Backprop": searched("tuned", 2),
            "Split-FG, K = 4": searched("split_fg-k4"),
            "Maps, one pull": searched("pull-maps", 3),
        },
        {
            "Maps to the writers": (*seeds("maps-rho0.03-10", 3), *(ppl(f"{name}-rho0.03-10") for name in MAPS)),
            "Maps, one pull": (
                *seeds("pull-maps-rho0.1-10", 3),
                ppl("pull-annealed-rho0.1-10"),
                ppl("pull-gated-rho0.1-10"),
            ),
            "Maps, two pulls": (*seeds("pull2-maps-rho0.1-10", 3), ppl("pull2-maps-every4-rho0.1-10")),
        },
        {
            "Noise of the same size in place of r": (ppl("noise-rho0.03-10"),),
            "Frozen trunk": (ppl("frozen-10"),),
            "Random maps, reverse mode inside blocks": (ppl("own-random-rho0.03-10"),),
            "Activity tangents, K = 8, one score for a whole sequence": (ppl("activity-k8-rho0.01-10"),),
            "Random maps": (ppl("dfa-rho0.03-10"),),
            "GrAPE's aligned feedback, a step of backprop at every tenth": (ppl("grape-anchor10-rho0.03-10"),),
            "GrAPE's aligned feedback, no backprop": (ppl("grape-rho0.03-10"),),
        },
    ),
}
"""The tables of these pages: by row, the values of its numbers in order."""
