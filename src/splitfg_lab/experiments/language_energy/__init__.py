"""The gradient's energy in trunk and head, at initialisation and over training."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitfg.errors import raise_if
from splitfg.recipes import BackpropMethod, FrozenMethod, SplitFGMethod
from splitfg.recipes.checks import below
from splitfg_lab.experiments._search import BEFORE
from splitfg_lab.experiments.language import SMOKE, TENTH, Language, Sizes
from splitfg_lab.experiments.spec import Cell, Curves, Experiment, Paper, Preset, Row, Table


@dataclass(frozen=True)
class Energy:
    """Exact gradients of the first training batches, in trunk and head, before and during training.

    Attributes:
        training: The network, the corpus and the training settings.
        batches: Sequential batches to average over.
        trained: Whether to train and to measure at every evaluation.
    """

    training: Language = field(default_factory=lambda: Language(FrozenMethod()))
    batches: int = 16
    trained: bool = False

    def __post_init__(self) -> None:
        raise_if(below(1, self, "batches"))


def _trained(method: SplitFGMethod | BackpropMethod, rho: float) -> Energy:
    training = Language(method, rho=rho, steps=TENTH, evaluations=20, checkpoints=1)
    return Energy(training, trained=True)


_ROWS = (
    ("At initialisation", "init"),
    ("... linear layers as torch begins them", "init-torch"),
    ("After 10% of an epoch, Split-FG", "split_fg"),
    ("... backprop", "backprop"),
)
_PAPER = ("init", "init-torch")
_TORCH = Energy(Language(FrozenMethod(), model=Sizes(init="torch")))

EXPERIMENT = Experiment(
    name="language_energy",
    title="Gradient energy of GPT small8",
    source="Section 2.2 and Appendix G (gradient energy)",
    runner="splitfg_lab.experiments.language_energy.run:run",
    presets=(
        Preset("init", "At initialisation", Energy()),
        Preset("init-torch", "At initialisation, linear layers as torch begins them", _TORCH),
        Preset("split_fg", "Over Split-FG training, K = 4, rho = 0.1", _trained(SplitFGMethod(K=4), 0.1)),
        Preset("backprop", "Over backprop training", _trained(BackpropMethod(), 1.0)),
    ),
    tables=(
        Table(
            "language-energy",
            "Share of the gradient's energy in the trunk, and the variance it saves",
            ("Trunk's share", "Readout role alone", "Per-coordinate reduction", "Total reduction"),
            tuple(
                Row(
                    label,
                    (
                        Cell(name, "trunk_share", Paper(0.74) if name in _PAPER else None),
                        Cell(name, "trunk_share_readout"),
                        Cell(name, "coordinate_reduction", Paper(1.35) if name in _PAPER else None),
                        Cell(name, "total_reduction", Paper(6.8) if name in _PAPER else None),
                    ),
                )
                for label, name in _ROWS
            ),
            decimals=3,
            note="Mean of the ratio over 16 sequential training batches, the tied table counted as the head's, with the"
            " gradient of both its roles or of its readout alone. The shares depend on the initialisation. Ours are"
            " batches of the Wikipedia stand-in for WikiText-103's training split.",
        ),
    ),
    figures=(
        Curves(
            "language-energy",
            "The trunk's share of the gradient's energy over training",
            ("split_fg", "backprop"),
            "trunk_share",
        ),
    ),
    no_checkpoints=("init", "init-torch"),
    smoke=("batches=2", *(f"training.{setting}" for setting in SMOKE)),
    immaterial=("training.block",),
    earlier=(
        ("training.clip_apart", False),
        ("training.adaptive", False),
        ("training.adaptive_groups", []),
        *((f"training.{name}", value) for name, value in BEFORE),
    ),
)
