"""The presets of the image experiments.

``cifar10-...`` and ``cifar100-...`` have the full budget of the main table; ``flat-...`` and ``flat100-...`` are the
flat head on CIFAR-10 and CIFAR-100 with the ablation's budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from splitfg.recipes import (
    ActivityMethod,
    Adam,
    AdamL2,
    AdamW,
    BackpropMethod,
    DirectPathMethod,
    DirectRoute,
    EvolutionMethod,
    FixedRule,
    ForwardForwardMethod,
    FrozenMethod,
    HopfieldMethod,
    IdentityFeedback,
    MeanJacobianFeedback,
    MethodRecipe,
    ParallelPullMethod,
    PredictiveCodingMethod,
    PureFGMethod,
    RandomFeedback,
    RelayRoute,
    SplitFGMethod,
)
from splitfg_lab.experiments._feedback_methods import LAYERS_ALONE, by_passes, every_nth
from splitfg_lab.experiments._search import FAST
from splitfg_lab.experiments._titles import METHOD_TITLES
from splitfg_lab.experiments.images._config import ABLATION, FULL, ImageTraining
from splitfg_lab.experiments.images._networks import FLAT18, RESNET18, Backbone, FlatNetwork, PlainMLP
from splitfg_lab.experiments.spec import Preset

FIVE, THREE, TWO = (0, 1, 2, 3, 4), (0, 1, 2), (0, 1)
LONG = {"pure_fg": TWO, "es": TWO, "forward_forward": THREE, "learned": THREE}
"""Seeds of the methods on CIFAR-10 whose runs of the full budget are long; others have five."""
RHOS = (1.0, 0.3, 0.1, 0.03)
TANGENTS = {"cifar10": (1, 4, 16, 64, 256), "cifar100": (4, 16, 64)}
APART = ((4, 1.0), (4, 0.1), (64, 1.0), (64, 0.1))
LONGER = ((64, 1.0), (64, 0.1))
DIRECT_LONGER = (1.0, 0.1)

_METHODS: dict[str, MethodRecipe] = {
    "backprop": BackpropMethod(),
    "pure_fg": PureFGMethod(K=4),
    "es": EvolutionMethod(K=4),
}
FEEDBACK: dict[str, tuple[str, MethodRecipe]] = {
    "learned": ("learned feedback, measured by a second pass", by_passes()),
    "learned-layers": (
        "learned feedback, layers measured alone",
        LAYERS_ALONE,
    ),
    "learned-every4": ("learned feedback, measured by a second pass every 4 steps", every_nth(4)),
    "learned-direct": ("learned feedback, direct route", by_passes(DirectRoute())),
    "dfa": ("direct feedback alignment", by_passes(DirectRoute(FixedRule()))),
    "alignment": ("feedback alignment", by_passes(RelayRoute(FixedRule()))),
}
"""Methods with learned and with random feedback maps, by the last part of a preset's name."""
PULLS: dict[str, tuple[str, MethodRecipe]] = {
    "pull": ("maps, reverse mode inside own block", ParallelPullMethod(MeanJacobianFeedback(0.1))),
    "pull2": ("maps, two pulls", ParallelPullMethod(MeanJacobianFeedback(0.1), pulls=2)),
    "pull3": ("maps, three pulls", ParallelPullMethod(MeanJacobianFeedback(0.1), pulls=3)),
    "pull4": ("maps, four pulls", ParallelPullMethod(MeanJacobianFeedback(0.1), pulls=4)),
    **{
        f"skips{n}": (f"skips carried, {words}", ParallelPullMethod(IdentityFeedback(), pulls=n, skips=True))
        for n, words in ((1, "one pull"), (2, "two pulls"), (3, "three pulls"), (4, "four pulls"))
    },
    "skips3-maps": (
        "skips carried, maps, three pulls",
        ParallelPullMethod(MeanJacobianFeedback(0.1), pulls=3, skips=True),
    ),
    "pull-random": ("random maps, reverse mode inside own block", ParallelPullMethod(RandomFeedback())),
    "pull2-random": ("random maps, two pulls", ParallelPullMethod(RandomFeedback(), pulls=2)),
}
"""Parallel pulls on whole backbones, by the last part of a preset's name; a pull of a chain trains its own block."""
PULLS_LONGER = ("pull", "pull2", "pull3", "skips2", "skips3", "skips4")
"""Parallel pulls that also run with the full budget."""

FLAT_ONLY: dict[str, tuple[str, MethodRecipe]] = {
    "activity": ("activity tangents, K = 8", ActivityMethod(K=8)),
    "maps": ("direct path with learned maps", DirectPathMethod(MeanJacobianFeedback(0.1))),
}
"""Further methods for the flat head of CIFAR-10, by a part of a preset's name."""

ONE_TANGENT: dict[str, MethodRecipe] = {"pure_fg": PureFGMethod(K=1), "es": EvolutionMethod(K=1)}
"""The ablation's baselines with one tangent, as the paper also describes them."""

# Steps of one pass over the training images.
_PASS = -(-50_000 // 128)


@dataclass(frozen=True)
class ImageSetting:
    """The paper's settings for an image set.

    Attributes:
        dataset: Its name.
        label: Its name in tables.
        flat: Prefix of the presets with the ablation's budget.
        backbone: The full network.
        light: The flat head's network.
        optimizer: The optimizer of the gradient methods.
        warmup: Steps of the linear warmup.
        budgets: Steps of the methods that the paper stopped early.
        together: Tangents of the light trunk per chunk: 512 MiB of dh.
    """

    dataset: Literal["cifar10", "cifar100"]
    label: str
    flat: str
    backbone: Backbone
    light: FlatNetwork
    optimizer: Adam | AdamW
    warmup: int
    budgets: dict[str, int]
    together: int

    def training(self, method: MethodRecipe, network: Backbone | FlatNetwork, steps: int = FULL) -> ImageTraining:
        """Return the config of a gradient method, for the full budget or fewer steps of it."""
        # TF32 is too coarse for the difference of two losses
        matmul: Literal["high", "highest"] = "highest" if isinstance(method, EvolutionMethod) else "high"
        config = ImageTraining(self.dataset, method, network, self.optimizer, steps=steps, warmup=self.warmup)
        return replace(config, matmul=matmul)

    def ablation(self, method: MethodRecipe, *, rho: float = 1.0, apart: bool = False) -> ImageTraining:
        """Return the config of a method on the flat-head network, annealed over the ablation's budget."""
        config = self.training(method, self.light, ABLATION)
        return replace(config, horizon=ABLATION, rho=rho, clip_apart=apart, checkpoints=1)

    def split_fg(self, K: int) -> SplitFGMethod:
        """Return Split-FG with K tangents, in chunks that fit."""
        return SplitFGMethod(K, None if self.together >= K else self.together)


CIFAR10 = ImageSetting("cifar10", "CIFAR-10", "flat", Backbone(), FlatNetwork(), Adam(), 200, {}, together=64)
CIFAR100 = ImageSetting(
    "cifar100",
    "CIFAR-100",
    "flat100",
    RESNET18,
    FLAT18,
    AdamW(weight_decay=5e-4),
    300,
    {"pure_fg": 2000, "es": 400, "forward_forward": 3000, "predictive_coding": 3000},
    together=16,
)
SETTINGS = (CIFAR10, CIFAR100)


def screened(setting: ImageSetting, K: int, rho: float, *, apart: bool = False) -> str:
    """Return the name of a Split-FG preset with the ablation's budget."""
    if (setting, K, rho, apart) == (CIFAR10, 4, 1.0, False):
        return "flat-split_fg"
    return f"{setting.flat}-k{K}-rho{rho:g}{'-apart' * apart}"


def longer(setting: ImageSetting, K: int, rho: float) -> str:
    """Return the name of a Split-FG preset with the full budget and another K or rho than the paper's."""
    return f"{setting.dataset}-k{K}-rho{rho:g}"


def direct(start: str, rho: float) -> str:
    """Return the name of a direct-path preset; ``start`` is the data set, or ``flat`` for the ablation's budget."""
    return f"{start}-direct-rho{rho:g}"


def flat_only(name: str, rho: float) -> str:
    """Return the name of a preset of :data:`FLAT_ONLY`."""
    return f"flat-{name}-rho{rho:g}"


def l2(name: str, *, clipped: bool = True) -> str:
    """Return the name of a preset of CIFAR-100 with L2 decay in the gradient instead of AdamW's."""
    return f"cifar100-{name}-l2{'' if clipped else '-unclipped'}"


def presets() -> tuple[Preset, ...]:
    """Return all presets, each name once."""
    made = [p for s in SETTINGS for p in _main(s)] + [*_ablation()]
    made += [p for s in SETTINGS for p in (*_screening(s), *_longer(s))]
    made += [*_feedback(), *_decay(), *_adaptive()]
    return tuple({p.name: p for p in made}.values())


def _main(setting: ImageSetting) -> Iterator[Preset]:
    for name, method in _METHODS.items():
        config = setting.training(method, setting.backbone, setting.budgets.get(name, FULL))
        yield _full(setting, name, METHOD_TITLES[name], config)
    for name, rule in (
        ("forward_forward", ForwardForwardMethod()),
        ("predictive_coding", PredictiveCodingMethod(power_iterations=5)),
    ):
        config = ImageTraining(setting.dataset, rule, PlainMLP(), warmup=setting.warmup)
        yield _full(setting, name, METHOD_TITLES[name], replace(config, steps=setting.budgets.get(name, FULL)))
    stored = ImageTraining(setting.dataset, HopfieldMethod(capacity=50_000), setting.backbone, steps=_PASS)
    yield _full(setting, "hopfield", METHOD_TITLES["hopfield"], replace(stored, warmup=setting.warmup))
    yield _full(setting, "split_fg", "Split-FG", setting.training(setting.split_fg(4), setting.light))
    yield _full(setting, "frozen", "frozen trunk, exact head", setting.training(FrozenMethod(), setting.light))


def _full(setting: ImageSetting, name: str, title: str, config: ImageTraining) -> Preset:
    seeds = LONG.get(name, FIVE) if setting is CIFAR10 else THREE
    return Preset(f"{setting.dataset}-{name}", f"{setting.label}: {title}", config, seeds)


def _ablation() -> Iterator[Preset]:
    title = "CIFAR-10, flat head, 6,000 steps"
    for name, method in _METHODS.items():
        yield Preset(f"flat-{name}", f"{title}: {METHOD_TITLES[name]}", CIFAR10.ablation(method), TWO)
    for name, method in ONE_TANGENT.items():
        yield Preset(f"flat-{name}-k1", f"{title}: {METHOD_TITLES[name]}, K = 1", CIFAR10.ablation(method), TWO)
    ours = CIFAR10.ablation(CIFAR10.split_fg(4))
    yield Preset("flat-split_fg", f"{title}: Split-FG", ours, FIVE)
    single = replace(ours, network=replace(CIFAR10.light, inner=None))
    yield Preset("flat-split_fg-single", f"{title}: Split-FG, single linear head", single, FIVE)
    naive = replace(ours, network=CIFAR10.backbone)
    yield Preset("naive-split_fg", "CIFAR-10, ResNet-20, 6,000 steps: Split-FG below its linear head", naive)


def _feedback() -> Iterator[Preset]:
    """Learned feedback on the flat head and on whole backbones, beside random feedback and backprop."""
    for name, (title, method) in FEEDBACK.items():
        flat = CIFAR10.ablation(method)
        yield Preset(f"flat-{name}", f"CIFAR-10, flat head, 6,000 steps: {title}", flat, TWO)
        whole = replace(flat, network=CIFAR10.backbone)
        yield Preset(f"resnet20-{name}", f"CIFAR-10, whole ResNet-20, 6,000 steps: {title}", whole, TWO)
    for name, (title, method) in PULLS.items():
        config = replace(CIFAR10.ablation(method), network=CIFAR10.backbone)
        yield Preset(f"resnet20-{name}", f"CIFAR-10, whole ResNet-20, 6,000 steps: {title}", config, TWO)
    flat = CIFAR10.ablation(PULLS["pull"][1])
    yield Preset("flat-pull", f"CIFAR-10, flat head, 6,000 steps: {PULLS['pull'][0]}", flat, TWO)
    reference = replace(CIFAR10.ablation(BackpropMethod()), network=CIFAR10.backbone)
    yield Preset("resnet20-backprop", "CIFAR-10, whole ResNet-20, 6,000 steps: Backprop", reference, TWO)
    for setting in SETTINGS:
        config = setting.training(LAYERS_ALONE, setting.backbone)
        yield _full(setting, "learned", "learned feedback, whole network", config)
        for name in PULLS_LONGER:
            title, method = PULLS[name]
            config = setting.training(method, setting.backbone)
            yield Preset(f"{setting.dataset}-{name}", f"{setting.label}: {title}, whole network", config, TWO)


DECAYED = {"backprop": "Backprop", "split_fg": "Split-FG", "frozen": "frozen trunk, exact head"}
"""Methods on CIFAR-100 that also run with L2 decay in the gradient."""
_NO_LIMIT = 1e6
"""A clipping bound that no gradient reaches."""


def _decay() -> Iterator[Preset]:
    """CIFAR-100 with the other reading of "weight decay", and with trunk and head clipped apart."""
    known = {p.name: p for p in _main(CIFAR100)}
    for name, title in DECAYED.items():
        config = replace(_training_of(known[f"cifar100-{name}"]), optimizer=AdamL2(weight_decay=5e-4))
        yield _full(CIFAR100, f"{name}-l2", f"{title}, L2 decay", config)
        unclipped = replace(config, max_norm=_NO_LIMIT)
        yield _full(CIFAR100, f"{name}-l2-unclipped", f"{title}, L2 decay, not clipped", unclipped)
        if name == "split_fg":
            apart = replace(config, clip_apart=True)
            yield _full(CIFAR100, "split_fg-l2-apart", "Split-FG, L2 decay, clipped apart", apart)


def _training_of(preset: Preset) -> ImageTraining:
    assert isinstance(preset.config, ImageTraining)
    return preset.config


ADAPTIVE: dict[str, tuple[str, MethodRecipe]] = {
    "split_fg": ("Split-FG, K = 4", SplitFGMethod(4)),
    "k64": ("Split-FG, K = 64", SplitFGMethod(64)),
    "activity": FLAT_ONLY["activity"],
    "direct": ("direct path", DirectPathMethod()),
    "learned": FEEDBACK["learned"],
}
"""Methods whose trunk step a line search finds, by a part of a preset's name."""


def adaptive(name: str, *, fast: bool = False) -> str:
    """Return the name of a preset with a line search."""
    return f"flat-{name}-adaptive{'-fast' * fast}"


def _adaptive() -> Iterator[Preset]:
    for name, (title, method) in ADAPTIVE.items():
        config = replace(CIFAR10.ablation(method), adaptive=True)
        says = f"CIFAR-10, flat head, 6,000 steps: {title}"
        yield Preset(adaptive(name), f"{says}, line search", config)
        yield Preset(adaptive(name, fast=True), f"{says}, fast line search", replace(config, search=FAST))


def _screening(setting: ImageSetting) -> Iterator[Preset]:
    title = f"{setting.label}, flat head, 6,000 steps"
    yield Preset(f"{setting.flat}-frozen", f"{title}: frozen trunk, exact head", setting.ablation(FrozenMethod()))
    grid = [(K, rho, False) for K in TANGENTS[setting.dataset] for rho in RHOS]
    for K, rho, apart in grid + [(K, rho, True) for K, rho in APART]:
        name = screened(setting, K, rho, apart=apart)
        if name != "flat-split_fg":
            says = f"Split-FG, K = {K}, rho = {rho:g}{', clipped apart' * apart}"
            yield Preset(name, f"{title}: {says}", setting.ablation(setting.split_fg(K), rho=rho, apart=apart))
    for rho in RHOS:
        config = setting.ablation(DirectPathMethod(), rho=rho)
        yield Preset(direct(setting.flat, rho), f"{title}: direct path, rho = {rho:g}", config)
        for name, (says, method) in FLAT_ONLY.items() if setting is CIFAR10 else ():
            yield Preset(flat_only(name, rho), f"{title}: {says}, rho = {rho:g}", setting.ablation(method, rho=rho))


def _longer(setting: ImageSetting) -> Iterator[Preset]:
    for K, rho in LONGER:
        config = replace(setting.training(setting.split_fg(K), setting.light), rho=rho)
        yield Preset(longer(setting, K, rho), f"{setting.label}: Split-FG, K = {K}, rho = {rho:g}, 60 epochs", config)
    for rho in DIRECT_LONGER:
        config = replace(setting.training(DirectPathMethod(), setting.light), rho=rho)
        yield Preset(direct(setting.dataset, rho), f"{setting.label}: direct path, rho = {rho:g}, 60 epochs", config)
