"""The paper's image tables with its numbers, and the rows of the report's summary."""

from __future__ import annotations

from splitfg_lab.experiments._titles import ABBREVIATIONS, METHOD_TITLES
from splitfg_lab.experiments.images._beyond_tables import beyond_tables
from splitfg_lab.experiments.images._paper_results import FROZEN, MAIN, top1
from splitfg_lab.experiments.images._presets import SETTINGS, ImageSetting
from splitfg_lab.experiments.spec import Cell, Headline, Paired, Paper, Row, Table

_TEST = "Ours: all 10,000 test images, which the paper's backprop, pure FG, ES and Split-FG sample (50 batches of 128)."

ABLATION_ROWS = (  # label, preset, estimated parameters, the paper's accuracy
    ("Backprop", "flat-backprop", "nothing", Paper(70.7, 0.3)),
    ("Split-FG, two-layer linear head", "flat-split_fg", "trunk (5,136)", Paper(56.9, 1.2)),
    ("Split-FG, single linear head", "flat-split_fg-single", "trunk (5,136)", Paper(54.4, 1.5)),
    ("Pure FG", "flat-pure_fg", "all (1.05M)", Paper(22.6, 1.4)),
    ("Pure FG, K = 1", "flat-pure_fg-k1", "all (1.05M)", None),
    ("ES", "flat-es", "all (1.05M)", Paper(21.7, 1.9)),
    ("ES, K = 1", "flat-es-k1", "all (1.05M)", None),
    ("Frozen trunk, two-layer linear head", "flat-frozen", "nothing", None),
    ("Split-FG on the whole ResNet-20, its linear head", "naive-split_fg", "trunk (271,824)", None),
)

TEST_ROWS = (  # label, preset, against, the paper's result
    ("Two-layer head against single", "flat-split_fg", "flat-split_fg-single", "+2.5, t(4) = 6.93, p < 0.01"),
    ("Split-FG against pure FG, flat head", "flat-split_fg", "flat-pure_fg", "+34"),
    ("Split-FG against backprop, CIFAR-10", "cifar10-split_fg", "cifar10-backprop", "-27.7"),
    ("Split-FG against backprop, CIFAR-100", "cifar100-split_fg", "cifar100-backprop", "-30.4 ± 1.4"),
    (
        "Split-FG against its frozen trunk, CIFAR-10",
        "cifar10-split_fg",
        "cifar10-frozen",
        "60.5, 55.2 (one seed)",
    ),
    (
        "Split-FG against its frozen trunk, CIFAR-100",
        "cifar100-split_fg",
        "cifar100-frozen",
        "35.2, 34.8 (one seed)",
    ),
)


def tables() -> tuple[Table, ...]:
    """Return all tables: main, ablation, control, paired tests, and those beyond the paper."""
    return (_main(), _ablation(), _control(), _tests(), *beyond_tables())


def _moved(preset: str) -> Cell:
    return Cell(preset, "trunk_moved", decimals=2, ranked=False)


def _main() -> Table:
    return Table(
        "images",
        "Image classification: top-1 accuracy, %",
        tuple(METHOD_TITLES.values()),
        tuple(_main_row(setting) for setting in SETTINGS),
        "higher",
        best_in="row",
        note=f"Split-FG is on the light trunk with the flat head, backprop, pure FG and ES on the whole ResNet, so that"
        f" this compares systems, not estimators. On CIFAR-100 pure FG, ES, FF and PC were stopped after 2,000, 400,"
        f" 3,000 and 3,000 steps, as in the paper. {_TEST} {ABBREVIATIONS}",
    )


def _main_row(setting: ImageSetting) -> Row:
    printed = zip(METHOD_TITLES, MAIN[setting.dataset], strict=True)
    return Row(setting.label, tuple(top1(f"{setting.dataset}-{name}", Paper(*p)) for name, p in printed))


def _ablation() -> Table:
    return Table(
        "images-ablation",
        "Flat-head estimator ablation: CIFAR-10, 6,000 steps, top-1 accuracy, %",
        ("Estimated", "Top-1", "Trunk moved"),
        tuple(Row(label, (says, top1(name, paper), _moved(name))) for label, name, says, paper in ABLATION_ROWS),
        "higher",
        note="Trunk moved is the distance from its initialisation, in units of the initial norm. K = 4 where not said"
        f" otherwise; the paper describes pure FG and ES both with one tangent and with four. {_TEST}",
    )


def _control() -> Table:
    return Table(
        "images-control",
        "Frozen-trunk control: 60 epochs, rho = 1, top-1 accuracy, %",
        ("Frozen trunk", "Split-FG", "Trunk moved"),
        tuple(_control_row(setting) for setting in SETTINGS),
        "higher",
        best_in="row",
        note=f"The paper's control is a single seed. {_TEST}",
    )


def _control_row(setting: ImageSetting) -> Row:
    frozen, ours = FROZEN[setting.dataset]
    preset = f"{setting.dataset}-split_fg"
    cells = (top1(f"{setting.dataset}-frozen", Paper(frozen)), top1(preset, Paper(ours)), _moved(preset))
    return Row(f"{setting.label} ({'5,136' if setting.light.width == 16 else '75,840'} trunk parameters)", cells)


def _tests() -> Table:
    return Table(
        "images-tests",
        "Leads in points of accuracy: paired t-tests over seeds",
        ("Lead", "The paper"),
        tuple(Row(label, (Paired(ours, other, "accuracy", "higher"), says)) for label, ours, other, says in TEST_ROWS),
        note="Seeds are paired: the same initial trunk, where there is one, and the same batches.",
    )


def headlines() -> tuple[Headline, ...]:
    """Return the rows of the report's summary."""
    return (*(_main_headline(setting) for setting in SETTINGS), _flat_headline(), _whole_headline())


def _main_headline(setting: ImageSetting) -> Headline:
    paper = dict(zip(METHOD_TITLES, (Paper(*pair) for pair in MAIN[setting.dataset]), strict=True))
    cells = {METHOD_TITLES[m]: top1(f"{setting.dataset}-{m}", paper[m]) for m in ("backprop", "pure_fg", "split_fg")}
    frozen = top1(f"{setting.dataset}-frozen", Paper(FROZEN[setting.dataset][0]))
    beyond = {"Beyond the paper": top1(f"{setting.dataset}-learned")}
    label = f"{setting.label}, 60 epochs, each method on its own network: top-1 accuracy, %"
    return Headline(label, {**cells, "Frozen trunk": frozen, **beyond}, "higher", "learned feedback, whole network")


def _flat_headline() -> Headline:
    return Headline(
        "CIFAR-10, flat head, 6,000 steps: top-1 accuracy, %",
        {
            "Backprop": top1("flat-backprop", Paper(70.7, 0.3)),
            "Frozen trunk": top1("flat-frozen"),
            "Pure FG": top1("flat-pure_fg", Paper(22.6, 1.4)),
            "Split-FG": top1("flat-split_fg", Paper(56.9, 1.2)),
            "Beyond the paper": top1("flat-learned"),
        },
        "higher",
        "learned feedback by a second pass",
    )


def _whole_headline() -> Headline:
    cells = {"Backprop": "resnet20-backprop", "Split-FG": "naive-split_fg", "Beyond the paper": "resnet20-learned"}
    return Headline(
        "CIFAR-10, whole ResNet-20, 6,000 steps: top-1 accuracy, %",
        {column: top1(preset) for column, preset in cells.items()},
        "higher",
        "learned feedback by a second pass",
    )
