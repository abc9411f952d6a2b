"""The presets of the language experiments; the suffix ``-10`` means a tenth of an epoch, otherwise one epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from splitfg.recipes import (
    SGD,
    ActivityMethod,
    Adam,
    AdamW,
    BackpropMethod,
    ConditionedLaw,
    DirectPathMethod,
    EvolutionMethod,
    FeedbackRecipe,
    FrozenMethod,
    IdentityFeedback,
    MeanJacobianFeedback,
    Muon,
    PureFGMethod,
    RandomFeedback,
    SplitFGMethod,
)
from splitfg_lab.experiments.language._config import (
    TENTH,
    BigramMethod,
    KnnLMMethod,
    Language,
    Sizes,
    UnigramMethod,
)
from splitfg_lab.experiments.language._ladder import ladder_presets
from splitfg_lab.experiments.spec import Preset

LR = 1.5e-3
RHOS = (0.003, 0.01, 0.03, 0.1, 0.3)
TUNED_RHOS = (0.03, 0.1, 0.3)
TANGENTS = (1, 2, 4, 8, 32, 128)
PAPER_TANGENTS = (1, 2, 4, 8)
PURE_FG_RATES = (3e-3, 1.5e-3, 4.5e-4, 1.5e-4, 4.5e-5, 1.5e-5)
BACKPROP_RATES = (5e-4, 1.5e-3, 4.5e-3)
BACKPROP_RHOS = (1.0, 0.3, 0.1)
BACKPROP_OPTIMIZERS = ("adam", "adamw")
VARIED: tuple[tuple[Literal["gpt2", "torch"], bool], ...] = (("gpt2", True), ("torch", False), ("torch", True))
VARIED_RHOS = (0.003, 0.03, 0.1, 0.3)
DIRECT_RHOS = (1.0, 0.3, 0.1, 0.03, 0.01)
OTHER_LOOKUP_RHOS = (0.1, 0.03)
ACTIVITY_RHOS = (0.1, 0.03, 0.01)
DIRECT: dict[str, tuple[str, FeedbackRecipe]] = {
    "direct": ("Direct path", IdentityFeedback()),
    "direct-maps": ("Direct path, mean-Jacobian maps", MeanJacobianFeedback()),
    "direct-random": ("Direct path, random maps (direct feedback alignment)", RandomFeedback()),
}
OPTIMIZERS: dict[str, Muon | AdamW | SGD] = {"muon": Muon(lr=LR), "adamw": AdamW(lr=LR), "sgd": SGD(lr=LR)}
NOISE_CLIP = 1e-4
"""About the norm of the head's gradient after joint clipping with the trunk's noise at K = 4."""
TUNED_BACKPROP = Language(BackpropMethod(), AdamW(lr=LR), rho=0.3)
"""The best of the screening runs so far."""

# Larger chunks are no faster, and a tangent of small8 takes 12 MiB.
_TOGETHER = 32


def split_fg(K: int, rho: float) -> str:
    """Return the name of a Split-FG preset."""
    return f"split_fg-k{K}-rho{rho:g}"


def varied(preset: str, *, init: str, apart: bool) -> str:
    """Return the name of a preset with another initialisation or with trunk and head clipped apart."""
    return f"{preset}{'-torch' * (init == 'torch')}{'-apart' * apart}"


def direct(feedback: str, rho: float) -> str:
    """Return the name of a direct-path preset."""
    return f"{feedback}-rho{rho:g}"


def activity(rho: float) -> str:
    """Return the name of a preset of activity tangents."""
    return f"activity-k8-rho{rho:g}"


def other_lookup(preset: str) -> str:
    """Return the name of a preset with the other policy for the token table as lookup: trained or not."""
    return f"{preset}-other-lookup"


def pure_fg(lr: float) -> str:
    """Return the name of a learning-rate screening preset of the pure forward gradient."""
    return f"fg-adam-k4-lr{lr:g}-10"


def backprop(optimizer: str, lr: float, rho: float) -> str:
    """Return the name of a screening preset of tuned backprop."""
    return f"backprop-{optimizer}-lr{lr:g}-rho{rho:g}-10"


def tenth(preset: str) -> str | None:
    """Return the name of the preset with the 10% budget; ``None`` for references without a budget."""
    return None if preset in COUNTED else _SCREENED.get(preset, f"{preset}-10")


def presets() -> tuple[Preset, ...]:
    """Return all presets, each name once."""
    full = [*_baselines(), *_split_fg(), *_variations(), *_varied(), *_direct()]
    tenths = [_tenth(p) for p in full if tenth(p.name) == f"{p.name}-10"]
    screens = [*_more_tangents(), *_activity(), *_other_lookup(), *_pure_fg_screening(), *_backprop_screening()]
    found: dict[str, Preset] = {}
    for p in [*full, *tenths, *screens, *ladder_presets()]:
        found.setdefault(p.name, p)
    return tuple(found.values())


COUNTED = ("knn_lm", "unigram", "bigram")
_SCREENED = {
    "backprop": backprop("adam", LR, 1.0),
    "backprop-tuned": backprop("adamw", LR, 0.3),
    "fg-adam-k4": pure_fg(4.5e-4),
}


def _method(K: int, *, conditioned: bool = False) -> SplitFGMethod:
    method = SplitFGMethod(K, None if K <= _TOGETHER else _TOGETHER)
    return replace(method, law=ConditionedLaw()) if conditioned else method


def _tenth(preset: Preset) -> Preset:
    config = replace(preset.config, steps=TENTH, evaluations=20, checkpoints=1)
    return Preset(f"{preset.name}-10", f"{preset.title}, 10% budget", config)


def _baselines() -> Iterator[Preset]:
    yield Preset("backprop", "Backprop + Adam", Language(BackpropMethod()))
    yield Preset("backprop-tuned", "Backprop, tuned", TUNED_BACKPROP)
    yield Preset("fg-adam-k1", "Forward gradient + Adam, K = 1", Language(PureFGMethod(K=1)))
    tuned = Language(PureFGMethod(K=4), Adam(lr=4.5e-4))
    yield Preset("fg-adam-k4", "Forward gradient + Adam, K = 4, tuned rate", tuned)
    yield Preset("fg-sgd-k1", "Forward gradient + SGD, K = 1", Language(PureFGMethod(K=1), SGD(lr=5e-4)))
    # TF32 is too coarse for the difference of two losses
    yield Preset("es-adam-k1", "Antithetic ES + Adam, K = 1", Language(EvolutionMethod(K=1), matmul="highest"))
    yield Preset("knn_lm", "Hopfield memory (kNN-LM)", Language(KnnLMMethod(), steps=1))
    yield Preset("unigram", "Unigram", Language(UnigramMethod(), steps=1), counts=True)
    yield Preset("bigram", "Interpolated bigram", Language(BigramMethod(), steps=1), counts=True)
    yield Preset("frozen", "Frozen trunk, exact head", Language(FrozenMethod()))
    yield Preset("frozen-fixed", "Frozen trunk and lookup, exact head", Language(FrozenMethod(), tied="fixed"))
    clipped = Language(FrozenMethod(), max_norm=NOISE_CLIP)
    yield Preset("frozen-clipped", f"Frozen trunk, exact head, clipped to {NOISE_CLIP:g}", clipped)


def _split_fg() -> Iterator[Preset]:
    wanted = [(4, rho) for rho in (*RHOS, 1.0)] + [(K, 0.03) for K in PAPER_TANGENTS] + [(8, 1.0), (8, 0.1)]
    for K, rho in dict.fromkeys(wanted):
        yield Preset(split_fg(K, rho), _title(K, rho), Language(_method(K), rho=rho))


def _variations() -> Iterator[Preset]:
    for name, optimizer in OPTIMIZERS.items():
        yield Preset(f"split_fg-{name}", f"{_title(4, 0.03)}, {name}", Language(_method(4), optimizer, rho=0.03))
    for rho in (1.0, 0.03):
        config = Language(_method(4), rho=rho, light=True)
        yield Preset(f"light-rho{rho:g}", f"Light trunk, {_title(4, rho)}", config)
    for rho in (0.03, 0.1):
        config = Language(_method(4, conditioned=True), rho=rho)
        yield Preset(f"conditioned-rho{rho:g}", f"Conditioned tangents, {_title(4, rho)}", config)


def _more_tangents() -> Iterator[Preset]:
    for K in TANGENTS:
        for rho in TUNED_RHOS:
            yield _tenth(Preset(split_fg(K, rho), _title(K, rho), Language(_method(K), rho=rho)))


def _activity() -> Iterator[Preset]:
    """Yield activity tangents with a score for every sequence, with the 10% budget."""
    for rho in ACTIVITY_RHOS:
        title = f"Activity tangents, K = 8, rho = {rho:g}"
        yield _tenth(Preset(activity(rho), title, Language(ActivityMethod(K=8), rho=rho)))


def _varied() -> Iterator[Preset]:
    """Yield presets with torch's initialisation, and with trunk and head clipped apart."""
    for init, apart in VARIED:
        says = ", torch's linear layers" * (init == "torch") + ", clipped apart" * apart
        frozen = Language(FrozenMethod(), model=Sizes(init=init), clip_apart=apart)
        yield Preset(varied("frozen", init=init, apart=apart), f"Frozen trunk{says}", frozen)
        fixed = replace(frozen, tied="fixed")
        yield Preset(varied("frozen-fixed", init=init, apart=apart), f"Frozen trunk and lookup{says}", fixed)
        for rho in VARIED_RHOS:
            name, config = varied(split_fg(4, rho), init=init, apart=apart), replace(frozen, method=_method(4), rho=rho)
            yield Preset(name, f"{_title(4, rho)}{says}", config)


def _direct() -> Iterator[Preset]:
    """Yield direct-path presets: no tangents, and the token table is trained as lookup too."""
    for name, (title, feedback) in DIRECT.items():
        for rho in DIRECT_RHOS:
            config = Language(DirectPathMethod(feedback), rho=rho, tied="include")
            yield Preset(direct(name, rho), f"{title}, rho = {rho:g}", config)


def _other_lookup() -> Iterator[Preset]:
    """Yield Split-FG that trains the token table as lookup, and direct paths that do not, with the 10% budget."""
    for rho in OTHER_LOOKUP_RHOS:
        trained = Language(_method(4), rho=rho, tied="include")
        yield _tenth(Preset(other_lookup(split_fg(4, rho)), f"{_title(4, rho)}, lookup trained", trained))
        for name, (title, feedback) in DIRECT.items():
            untrained = Language(DirectPathMethod(feedback), rho=rho)
            says = f"{title}, rho = {rho:g}, lookup not trained"
            yield _tenth(Preset(other_lookup(direct(name, rho)), says, untrained))


def _pure_fg_screening() -> Iterator[Preset]:
    for lr in PURE_FG_RATES:
        config = Language(PureFGMethod(K=4), Adam(lr=lr), steps=TENTH, evaluations=20, checkpoints=1)
        yield Preset(pure_fg(lr), f"Forward gradient + Adam, K = 4, rate {lr:g}, 10% budget", config)


def _backprop_screening() -> Iterator[Preset]:
    for name in BACKPROP_OPTIMIZERS:
        for lr in BACKPROP_RATES:
            for rho in BACKPROP_RHOS:
                optimizer = Adam(lr=lr) if name == "adam" else AdamW(lr=lr)
                config = Language(BackpropMethod(), optimizer, rho, TENTH, evaluations=20, checkpoints=1)
                yield Preset(backprop(name, lr, rho), f"Backprop, {name}, rate {lr:g}, rho {rho:g}, 10% budget", config)


def _title(K: int, rho: float) -> str:
    return f"Split-FG, K = {K}, " + ("naive trunk step" if rho == 1 else f"rho = {rho:g}")
