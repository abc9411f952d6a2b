"""The ladder to backprop: presets between the frozen trunk and tuned backprop, all with the lookup trained.

Names end in the budget: ``-3``, ``-10`` and ``-30`` percent of an epoch, nothing for the whole epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from splitfg.recipes import (
    ActivityMethod,
    Adam,
    AdamW,
    AlignedRule,
    AnchoredFeedbackMethod,
    AnnealedMapsFeedback,
    AttentionMapsFeedback,
    BackpropMethod,
    DeltaMapRule,
    DirectPathMethod,
    DirectRoute,
    EveryNthFeedback,
    EveryNthRoute,
    FeedbackRecipe,
    FrozenMethod,
    GatedMapsFeedback,
    IdentityFeedback,
    LayerProbe,
    LearnedFeedbackMethod,
    MeanJacobianFeedback,
    MethodRecipe,
    NoiseFeedback,
    ParallelPullMethod,
    RandomFeedback,
    RelayRoute,
    SplitFGMethod,
)
from splitfg_lab.experiments._feedback_methods import LAYERS_ALONE, by_passes, every_nth
from splitfg_lab.experiments._search import FAST
from splitfg_lab.experiments.language._config import EPOCH, TENTH, Language, Sizes
from splitfg_lab.experiments.spec import Preset

LR = 1.5e-3
BUDGETS = {"-3": EPOCH * 3 // 100, "-10": TENTH, "-30": EPOCH * 3 // 10, "": EPOCH}
"""Steps by the last part of a preset's name."""
EPSILONS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
THREE = (0, 1, 2)
SLOW_MAPS = MeanJacobianFeedback(0.045)
"""Maps that follow slowly and with little noise, for trunk steps of rho = 0.1."""
LIMIT = 4.0
"""Limit of the rows that maps learn from, which only outliers reach; of ``maps-limited1`` it is 1."""


@dataclass(frozen=True)
class Rung:
    """A method of the ladder.

    Attributes:
        title: Its name in tables.
        method: Method that trains the trunk, with its settings.
        rhos: Trunk step scales to run; the first is the one of the table.
        waits: The critical path of the trunk's learning in block-times, for a trunk of n blocks: a forward pass
            through one block takes 1, its pull 2.
        eps: Adam's eps.
        every: The step at which maps are measured: every n-th.
        seeds: Seeds of the runs with the 10% budget.
    """

    title: str
    method: MethodRecipe
    rhos: tuple[float, ...]
    waits: str
    eps: float = 1e-6
    every: int = 1
    seeds: tuple[int, ...] = (0,)


def _pull(feedback: FeedbackRecipe, pulls: int = 1, *, group: int = 1) -> ParallelPullMethod:
    return ParallelPullMethod(feedback, pulls, group=group)


def _seldom(n: int) -> Rung:
    method = every_nth(n)
    return Rung(f"Learned feedback, measured every {n} steps", method, (0.3,), "3n; 4n if measured", every=n)


_FALLING = AnnealedMapsFeedback(TENTH, 0.45, 0.1)
_LIMITED_MAPS = DirectPathMethod(MeanJacobianFeedback(limit=LIMIT))
TIED_SHARES = (0.3, 0.1)
"""Parts of the lookup's share that count in the gradient of the tied table, beside the whole."""
_TIGHT_MAPS = DirectPathMethod(MeanJacobianFeedback(limit=1.0))
_SLOW_LIMITED_MAPS = MeanJacobianFeedback(SLOW_MAPS.rate, LIMIT)
_OWN_MAPS = ParallelPullMethod(MeanJacobianFeedback(), own_block=True)
_OWN_GATED = ParallelPullMethod(GatedMapsFeedback(), own_block=True)
_OWN_RANDOM = ParallelPullMethod(RandomFeedback(), own_block=True)
_ALIGNED = by_passes(DirectRoute(AlignedRule()))
_DELTA = by_passes(RelayRoute(DeltaMapRule(0.1)))
_ALONE_4 = LearnedFeedbackMethod(EveryNthRoute(4, RelayRoute(DeltaMapRule(1.0))), LayerProbe())
_MAPS_4 = DirectPathMethod(EveryNthFeedback(4, MeanJacobianFeedback(0.25)))
_SLOW_MAPS_4 = EveryNthFeedback(4, MeanJacobianFeedback(0.075))
_FORWARD, _OWN, _TWO, _MAPS = "n", "n + 2", "n + 4", "2n"

RUNGS: dict[str, Rung] = {
    "noise": Rung("Direct path, r replaced by noise", DirectPathMethod(NoiseFeedback()), (0.03,), _FORWARD),
    "dfa": Rung("Random maps to the writers", DirectPathMethod(RandomFeedback()), (0.03, 0.1), _FORWARD),
    "own-random": Rung("Random maps, reverse mode inside own block", _OWN_RANDOM, (0.03, 0.1), _OWN),
    "direct-eps": Rung("Direct path", DirectPathMethod(), (0.03,), _FORWARD),
    "maps": Rung(
        "Maps to the writers", DirectPathMethod(MeanJacobianFeedback()), (0.03, 0.01, 0.1), _MAPS, 1e-5, seeds=THREE
    ),
    "maps-limited": Rung("Maps to the writers, rows limited", _LIMITED_MAPS, (0.03, 0.1), _MAPS, 1e-5),
    "maps-limited1": Rung("Maps to the writers, rows limited to 1", _TIGHT_MAPS, (0.03, 0.1), _MAPS, 1e-5),
    **{
        f"maps-tied{share:g}": Rung(
            f"Maps to the writers, {share:g} of the lookup's share",
            DirectPathMethod(MeanJacobianFeedback(), tied_share=share),
            (0.03, 0.01),
            _MAPS,
            1e-5,
        )
        for share in TIED_SHARES
    },
    "maps-every4": Rung(
        "Maps to the writers, a JVP every 4 steps", _MAPS_4, (0.03,), "n; 2n if measured", 1e-5, every=4
    ),
    "maps-attention": Rung(
        "Maps along attention to the writers", DirectPathMethod(AttentionMapsFeedback(0.075)), (0.03,), _MAPS, 1e-5
    ),
    "maps-gated": Rung(
        "Maps gated by cluster to the writers", DirectPathMethod(GatedMapsFeedback()), (0.03,), _MAPS, 1e-5
    ),
    "annealed": Rung("Maps with a falling rate to the writers", DirectPathMethod(_FALLING), (0.03, 0.1), _MAPS, 1e-5),
    "own-maps": Rung("Maps, reverse mode inside own block", _OWN_MAPS, (0.03, 0.1), "2n + 2"),
    "own-gated": Rung("Maps gated by cluster, reverse mode inside own block", _OWN_GATED, (0.03,), "2n + 2"),
    "pull-random": Rung("Random maps, one pull", _pull(RandomFeedback()), (0.1,), _OWN),
    "pull-identity": Rung("r unchanged, one pull", _pull(IdentityFeedback()), (0.3, 0.1), _OWN),
    "pull2-identity": Rung("r unchanged, two pulls", _pull(IdentityFeedback(), 2), (0.3, 0.1), _TWO),
    "pull3-identity": Rung("r unchanged, three pulls", _pull(IdentityFeedback(), 3), (0.3,), "n + 6"),
    "pull-maps": Rung("Maps, one pull", _pull(SLOW_MAPS), (0.1, 0.06, 0.3), "2n + 2", seeds=THREE),
    "pull-maps-limited": Rung("Maps, rows limited, one pull", _pull(_SLOW_LIMITED_MAPS), (0.1,), "2n + 2"),
    "pull-gated": Rung("Maps gated by cluster, one pull", _pull(GatedMapsFeedback(0.09)), (0.1,), "2n + 2"),
    "pull-maps-attention": Rung(
        "Maps along attention, one pull", _pull(AttentionMapsFeedback(SLOW_MAPS.rate)), (0.1,), "2n + 2"
    ),
    "pull-fastmaps": Rung("Faster maps, one pull", _pull(MeanJacobianFeedback(0.135)), (0.1, 0.06), "2n + 2"),
    "pull-annealed": Rung("Maps with a falling rate, one pull", _pull(_FALLING), (0.1, 0.3), "2n + 2"),
    "pull2-annealed": Rung("Maps with a falling rate, two pulls", _pull(_FALLING, 2), (0.1, 0.3), "2n + 4"),
    "pull2-maps": Rung("Maps, two pulls", _pull(SLOW_MAPS, 2), (0.1, 0.3), "2n + 4", seeds=THREE),
    "pull2-maps-limited": Rung("Maps, rows limited, two pulls", _pull(_SLOW_LIMITED_MAPS, 2), (0.1,), "2n + 4"),
    "pull2-maps-every4": Rung(
        "Maps, two pulls, a JVP every 4 steps", _pull(_SLOW_MAPS_4, 2), (0.1,), "n + 4; 2n + 4 if measured", every=4
    ),
    "pull-maps-blocks": Rung(
        "Maps between transformer blocks, one pull", _pull(SLOW_MAPS, group=2), (0.1, 0.3), "2n + 4"
    ),
    "pull2-maps-blocks": Rung(
        "Maps between transformer blocks, two pulls", _pull(SLOW_MAPS, 2, group=2), (0.1, 0.3), "2n + 8"
    ),
    "pull-fastmaps-blocks": Rung(
        "Faster maps between transformer blocks, one pull",
        _pull(MeanJacobianFeedback(0.135), group=2),
        (0.1,),
        "2n + 4",
        seeds=THREE,
    ),
    "pull-attention-blocks": Rung(
        "Maps along attention between transformer blocks, one pull",
        _pull(AttentionMapsFeedback(SLOW_MAPS.rate), group=2),
        (0.1,),
        "2n + 4",
    ),
    "pull4-maps": Rung("Maps, four pulls", _pull(SLOW_MAPS, 4), (0.1, 0.3), "2n + 8"),
    "pull8-identity": Rung("Eight pulls: backprop", _pull(IdentityFeedback(), 8), (0.3,), "3n"),
    "grape": Rung("GrAPE's aligned feedback, no anchors", _ALIGNED, (0.03, 0.1), _MAPS),
    **{
        f"grape-anchor{n}": Rung(
            f"GrAPE's aligned feedback, backprop every {n} steps",
            AnchoredFeedbackMethod(n),
            (0.03, 0.1),
            "2n; 3n at anchors",
            every=n,
        )
        for n in (10, 100)
    },
    "learned-direct": Rung("Learned feedback, direct route", by_passes(DirectRoute()), (0.03, 0.1), _MAPS),
    "learned": Rung("Learned feedback, layer by layer", by_passes(), (0.3, 0.1), "4n", seeds=THREE),
    **{f"learned-every{n}": _seldom(n) for n in (2, 4, 8)},
    "learned-layers": Rung("Learned feedback, layers measured alone", LAYERS_ALONE, (0.3, 0.1), "3n", seeds=THREE),
    "learned-layers-every4": Rung(
        "Learned feedback, layers measured alone, every 4 steps", _ALONE_4, (0.3,), "3n", every=4
    ),
    "learned-delta": Rung("Learned feedback, delta rule", _DELTA, (0.3, 0.1), "4n"),
    "tuned": Rung("Backprop, tuned", BackpropMethod(), (0.3, 0.1), "3n", seeds=THREE),
}
"""Methods by the first part of a preset's name, from the frozen trunk to backprop."""

CONTROLS: dict[str, tuple[str, MethodRecipe, float, bool]] = {
    "frozen": ("Frozen trunk", FrozenMethod(), 1.0, False),
    "frozen-apart": ("Frozen trunk, clipped apart", FrozenMethod(), 1.0, True),
    "split_fg": ("Split-FG, K = 4, rho = 0.1", SplitFGMethod(4), 0.1, False),
    "split_fg-apart": ("Split-FG, K = 4, rho = 0.1, clipped apart", SplitFGMethod(4), 0.1, True),
    "learned": ("Learned feedback, rho = 0.3", LAYERS_ALONE, 0.3, False),
    "backprop": ("Backprop, rho = 0.3", BackpropMethod(), 0.3, False),
}
"""Methods of the comparison of Adam's eps: title, method, rho, and whether trunk and head are clipped apart."""
BEST_EPS: dict[str, str] = {
    "frozen": "frozen",
    "split_fg": "split_fg-k4-rho0.1",
    "learned": "learned-layers-rho0.3",
    "backprop": "backprop-eps1e-05",
}
"""Presets of one epoch, most with the eps that is the best at the 10% budget."""
LONGER = (
    "direct-eps",
    "maps",
    "maps-limited",
    "maps-limited1",
    *(f"maps-tied{share:g}" for share in TIED_SHARES),
    "pull-maps",
    "pull-maps-limited",
    "pull2-maps",
    "pull2-maps-limited",
    "pull-maps-blocks",
    "pull2-maps-blocks",
    "pull-fastmaps-blocks",
    "pull4-maps",
    "learned",
    "learned-layers",
    "tuned",
)
"""Methods that run with every budget."""
SIZES = {
    "large": (Sizes(layers=12, width=768, heads=12), 3_000, "12 blocks of width 768"),
    "deep": (Sizes(layers=16), 7_000, "16 blocks"),
}
"""Other sizes of the trunk: sizes, steps and a title, by the first part of a preset's name."""
SIZED = ("maps", "pull-maps", "pull2-maps", "tuned")
SIZED_RHOS = (0.1, 0.03)


def rung(name: str, rho: float | None = None, budget: str = "-10") -> str:
    """Return the name of a preset of the ladder; ``rho`` defaults to the one of the table."""
    return f"{name}-rho{RUNGS[name].rhos[0] if rho is None else rho:g}{budget}"


def sized(size: str, name: str, rho: float = SIZED_RHOS[0]) -> str:
    """Return the name of a preset with another size; ``frozen`` has no rho."""
    return f"{size}-{name}" if name == "frozen" else f"{size}-{name}-rho{rho:g}"


def epsilon(name: str, eps: float) -> str:
    """Return the name of a preset of the comparison of Adam's eps, with the 10% budget."""
    known = {
        ("frozen", 1e-8): "frozen-10",
        ("frozen-apart", 1e-8): "frozen-apart-10",
        ("split_fg", 1e-8): "split_fg-k4-rho0.1-10",
        ("split_fg-apart", 1e-8): "split_fg-k4-rho0.1-apart-10",
        ("backprop", 1e-8): "backprop-adam-lr0.0015-rho0.3-10",
        ("learned", 1e-6): rung("learned-layers"),
        ("backprop", 1e-6): rung("tuned"),
    }
    return known.get((name, eps), f"{name}-eps{eps:g}-10")


ADAPTIVE: dict[str, tuple[str, MethodRecipe, str]] = {
    "split_fg-k4": ("Split-FG, K = 4", SplitFGMethod(4), "exclude"),
    "activity-k8": ("Activity tangents, K = 8", ActivityMethod(K=8), "exclude"),
    **{name: (RUNGS[name].title, RUNGS[name].method, "include") for name in ("maps", "pull-maps", "learned", "tuned")},
}
"""Methods whose trunk step a line search finds."""
GROUPS = ("*attention.qkv*", "*attention.proj*", "*mlp*")
"""Parameters that a line search scales apart; norms and tables are a further group."""
GROUPED = ("pull-maps", "learned", "tuned")


def adaptive(name: str, *, fast: bool = False) -> str:
    """Return the name of a preset with a line search, with the 10% budget."""
    return f"{name}-adaptive{'-fast' * fast}-10"


def grouped(name: str) -> str:
    """Return the name of a preset with a line search for every group of parameters, with the 10% budget."""
    return f"{name}-adaptive-groups-10"


def ladder_presets() -> Iterator[Preset]:
    """Yield all presets of the ladder; earlier presets of the same name come first."""
    for name, found in RUNGS.items():
        for rho in found.rhos:
            for budget in BUDGETS if name in LONGER else ("-10",):
                yield _preset(name, found, rho, budget)
    yield from _sized()
    yield from _epsilons()
    for name, (title, method, tied) in ADAPTIVE.items():
        eps = RUNGS[name].eps if name in RUNGS else 1e-8
        searched = Language(method, Adam(lr=LR, eps=eps), adaptive=True)
        searched = replace(searched, tied="include" if tied == "include" else "exclude")
        yield Preset(adaptive(name), f"{title}, line search, 10% budget", _short(searched, TENTH))
        fast = _short(replace(searched, search=FAST), TENTH)
        yield Preset(adaptive(name, fast=True), f"{title}, fast line search, 10% budget", fast)
        if name in GROUPED:
            apart = replace(searched, adaptive_groups=GROUPS)
            yield Preset(grouped(name), f"{title}, line search by groups, 10% budget", _short(apart, TENTH))
    decayed = replace(_config(RUNGS["tuned"], 0.3), optimizer=AdamW(lr=LR, eps=1e-6))
    yield Preset("tuned-adamw-10", "Backprop, AdamW, eps 1e-06, rho = 0.3, 10% budget", _short(decayed, TENTH))


def _config(found: Rung, rho: float) -> Language:
    return Language(found.method, Adam(lr=LR, eps=found.eps), rho=rho, tied="include")


def _short(config: Language, steps: int) -> Language:
    return replace(config, steps=steps, evaluations=20, checkpoints=1)


def _preset(name: str, found: Rung, rho: float, budget: str) -> Preset:
    share = f", {budget.removeprefix('-')}% budget" if budget else ""
    config = _config(found, rho)
    seeds = found.seeds if budget == "-10" and rho == found.rhos[0] else (0,)
    title = f"{found.title}, rho = {rho:g}{share}"
    return Preset(rung(name, rho, budget), title, _short(config, BUDGETS[budget]) if budget else config, seeds)


def _sized() -> Iterator[Preset]:
    for size, (sizes, steps, title) in SIZES.items():
        frozen = Language(FrozenMethod(), Adam(lr=LR, eps=1e-6), model=sizes)
        yield Preset(sized(size, "frozen"), f"{title}, {steps:,} steps: frozen trunk", _short(frozen, steps))
        for name in SIZED:
            for rho in SIZED_RHOS:
                config = replace(_config(RUNGS[name], rho), model=sizes)
                says = f"{title}, {steps:,} steps: {RUNGS[name].title}, rho = {rho:g}"
                yield Preset(sized(size, name, rho), says, _short(config, steps))


def _epsilons() -> Iterator[Preset]:
    for name, (title, method, rho, apart) in CONTROLS.items():
        # backprop trains the lookup either way
        tied: Literal["include", "exclude"] = "include" if name == "learned" else "exclude"
        for eps in EPSILONS:
            config = Language(method, Adam(lr=LR, eps=eps), rho=rho, clip_apart=apart, tied=tied)
            yield Preset(epsilon(name, eps), f"{title}, eps {eps:g}, 10% budget", _short(config, TENTH))
    best = Language(BackpropMethod(), Adam(lr=LR, eps=1e-5), rho=0.3)
    yield Preset(BEST_EPS["backprop"], "Backprop, rho = 0.3, eps 1e-05", best)
