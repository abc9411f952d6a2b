"""The paper's image tables with its numbers, and tables beyond the paper."""

from __future__ import annotations

from splitfg_lab.experiments._titles import METHOD_TITLES
from splitfg_lab.experiments.images._presets import (
    ADAPTIVE,
    APART,
    DECAYED,
    DIRECT_LONGER,
    FEEDBACK,
    LONGER,
    PULLS,
    PULLS_LONGER,
    RHOS,
    SETTINGS,
    TANGENTS,
    ImageSetting,
    adaptive,
    decoupled,
    direct,
    longer,
    screened,
)
from splitfg_lab.experiments.spec import (
    Cell,
    Headline,
    Paired,
    Paper,
    Row,
    Table,
)

_TEST = "Ours: all 10,000 test images, which the paper's backprop, pure FG, ES and Split-FG sample (50 batches of 128)."

MAIN = {
    "cifar10": ((88.2, 0.6), (29.5, 1.9), (29.3, 1.4), (48.8, 0.4), (40.7, 1.1), (10.0, 0.0), (60.5, 1.2)),
    "cifar100": ((65.6, 1.0), (1.2, 0.2), (1.2, 0.1), (6.9, 0.5), (1.0, 0.0), (1.4, 0.3), (35.2, 0.5)),
}
"""The paper's accuracies in %, mean and standard deviation over five seeds, in the order of ``METHOD_TITLES``."""

FROZEN = {"cifar10": (55.2, 60.5), "cifar100": (34.8, 35.2)}
"""The paper's frozen trunk and Split-FG in its control of a single seed."""

_DECAYED_PAPER = {"backprop": Paper(65.6, 1.0), "split_fg": Paper(35.2, 0.5), "frozen": Paper(34.8)}

ABLATION_ROWS = (  # label, preset, estimated parameters, the paper's accuracy
    ("Backprop", "flat-backprop", "nothing", Paper(70.7, 0.3)),
    ("Split-FG, two-layer linear head", "flat-split_fg", "trunk (5,136)", Paper(56.9, 1.2)),
    ("Split-FG, single linear head", "flat-split_fg-single", "trunk (5,136)", Paper(54.4, 1.5)),
    ("Pure FG", "flat-pure_fg", "all (1.05M)", Paper(22.6, 1.4)),
    ("ES", "flat-es", "all (1.05M)", Paper(21.7, 1.9)),
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
    return (
        _main(),
        _ablation(),
        _control(),
        _tests(),
        *(_screening(setting) for setting in SETTINGS),
        _apart(),
        _longer(),
        _decay(),
        _feedback(),
        _adaptive(),
    )


def _top1(preset: str, paper: Paper | None = None) -> Cell:
    return Cell(preset, "accuracy", paper)


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
        f" 3,000 and 3,000 steps, as in the paper. {_TEST}",
    )


def _main_row(setting: ImageSetting) -> Row:
    printed = zip(METHOD_TITLES, MAIN[setting.dataset], strict=True)
    return Row(setting.label, tuple(_top1(f"{setting.dataset}-{name}", Paper(*p)) for name, p in printed))


def _ablation() -> Table:
    return Table(
        "images-ablation",
        "Flat-head estimator ablation: CIFAR-10, 6,000 steps, top-1 accuracy, %",
        ("Estimated", "Top-1", "Trunk moved"),
        tuple(Row(label, (says, _top1(name, paper), _moved(name))) for label, name, says, paper in ABLATION_ROWS),
        "higher",
        note=f"Trunk moved is the distance from its initialisation, in units of the initial norm. {_TEST}",
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
    cells = (_top1(f"{setting.dataset}-frozen", Paper(frozen)), _top1(preset, Paper(ours)), _moved(preset))
    return Row(f"{setting.label} ({'5,136' if setting.light.width == 16 else '75,840'} trunk parameters)", cells)


def _tests() -> Table:
    return Table(
        "images-tests",
        "Leads in points of accuracy: paired t-tests over seeds",
        ("Lead", "The paper"),
        tuple(Row(label, (Paired(ours, other, "accuracy", "higher"), says)) for label, ours, other, says in TEST_ROWS),
        note="Seeds are paired: the same initial trunk, where there is one, and the same batches.",
    )


def _screening(setting: ImageSetting) -> Table:
    rows = [Row(f"K = {K}", tuple(_top1(screened(setting, K, rho)) for rho in RHOS)) for K in TANGENTS[setting.dataset]]
    along = Row("Direct path", tuple(_top1(direct(setting.flat, rho)) for rho in RHOS))
    frozen = Row("Frozen trunk", (_top1(f"{setting.flat}-frozen"), *(None for _ in RHOS[1:])))
    return Table(
        f"images-k-{setting.dataset}",
        f"Tangents and trunk step scale on the flat head: {setting.label}, 6,000 steps, top-1 accuracy, %",
        tuple(f"rho = {rho:g}" for rho in RHOS),
        (*rows, along, frozen),
        "higher",
        best_in="table",
        note="Not in the paper, which has K = 4 and rho = 1. One seed where the ablation has no more. The direct path"
        " trains the stem and the block's last convolution, without tangents.",
    )


def _apart() -> Table:
    return Table(
        "images-clipping",
        "Clipping on the flat head: 6,000 steps, top-1 accuracy, %",
        tuple(f"{setting.label}, {how}" for setting in SETTINGS for how in ("joint", "apart")),
        tuple(
            Row(
                f"K = {K}, rho = {rho:g}",
                tuple(_top1(screened(s, K, rho, apart=apart)) for s in SETTINGS for apart in (False, True)),
            )
            for K, rho in APART
        ),
        note="The paper clips jointly: the trunk's noise then shrinks the head's exact gradient too.",
    )


def _decay() -> Table:
    apart = {"split_fg": "cifar100-split_fg-apart"}
    return Table(
        "images-decay",
        "Weight decay on CIFAR-100: 60 epochs, top-1 accuracy, %",
        ("L2, clipped jointly", "L2, clipped apart", "Decoupled, clipped jointly"),
        tuple(
            Row(
                title[0].upper() + title[1:],
                (
                    _top1(f"cifar100-{name}", _DECAYED_PAPER.get(name)),
                    _top1(apart[name]) if name in apart else None,
                    _top1(decoupled(name), _DECAYED_PAPER.get(name)),
                ),
            )
            for name, title in DECAYED.items()
        ),
        "higher",
        best_in="row",
        note="The paper has Adam and weight decay 5e-4. Joint clipping divides the head's gradient by the norm of"
        " the noisy trunk's; Adam takes that factor out again, but not where L2 decay was added after clipping.",
    )


def _feedback() -> Table:
    full = tuple(_top1(f"{s.dataset}-backprop", Paper(*MAIN[s.dataset][0])) for s in SETTINGS)
    rows = [Row("Backprop", (_top1("flat-backprop", Paper(70.7, 0.3)), _top1("resnet20-backprop"), *full))]
    for name, (title, _) in FEEDBACK.items():
        longer = (_top1("cifar10-learned"), _top1("cifar100-learned")) if name == "learned" else (None, None)
        rows.append(Row(title.capitalize(), (_top1(f"flat-{name}"), _top1(f"resnet20-{name}"), *longer)))
    for name, (title, _) in PULLS.items():
        flat = _top1("flat-pull") if name == "pull" else None
        whole = tuple(_top1(f"{s.dataset}-{name}") if name in PULLS_LONGER else None for s in SETTINGS)
        rows.append(Row(title.capitalize(), (flat, _top1(f"resnet20-{name}"), *whole)))
    rows.append(Row("Split-FG, K = 4", (_top1("flat-split_fg"), _top1("naive-split_fg"), None, None)))
    return Table(
        "images-feedback",
        "Feedback without a backward pass through the trunk: top-1 accuracy, %",
        (
            "Flat head, 6,000 steps",
            "Whole ResNet-20, 6,000 steps",
            "Whole ResNet-20, 60 epochs",
            "CIFAR-100, whole ResNet-18, 60 epochs",
        ),
        tuple(rows),
        "higher",
        best_in="column",
        note="Not in the paper, but for Split-FG and for backprop. Learned feedback takes no derivative of the trunk"
        " and reads no weight backward: maps learn from one more forward pass a step, with noise. Relayed, the feedback"
        " goes from layer to layer; on the direct route every layer gets it straight from the last one. Rows with pulls"
        " run reverse mode inside single blocks, from gradients that maps predict at their outputs. Where skips are"
        " carried, gradients pass from block to block along the skips alone, through ReLU's mask and, where the width"
        " changes, a 1x1 convolution; none passes from one residual branch into another but by pulls.",
    )


def _adaptive() -> Table:
    grids: dict[str, tuple[str | None, ...]] = {
        "split_fg": tuple(screened(SETTINGS[0], 4, rho) for rho in RHOS),
        "k64": tuple(screened(SETTINGS[0], 64, rho) for rho in RHOS),
        "direct": tuple(direct("flat", rho) for rho in RHOS),
        "learned": ("flat-learned", *(None for _ in RHOS[1:])),
    }
    return Table(
        "images-step",
        "The trunk's step by a grid and by a line search: CIFAR-10, flat head, 6,000 steps, top-1 accuracy, %",
        (*(f"rho = {rho:g}" for rho in RHOS), "Line search"),
        tuple(
            Row(
                title[0].upper() + title[1:],
                (*(None if p is None else _top1(p) for p in grids[name]), _top1(adaptive(name))),
            )
            for name, (title, _) in ADAPTIVE.items()
        ),
        "higher",
        best_in="row",
        note="Not in the paper, which leaves an adaptive step to future work. Nothing of the line search was tuned.",
    )


def _longer() -> Table:
    return Table(
        "images-longer",
        "More tangents over 60 epochs, top-1 accuracy, %",
        tuple(setting.label for setting in SETTINGS),
        (
            Row("K = 4, rho = 1", tuple(_top1(f"{s.dataset}-split_fg", Paper(*MAIN[s.dataset][-1])) for s in SETTINGS)),
            *(Row(f"K = {K}, rho = {rho:g}", tuple(_top1(longer(s, K, rho)) for s in SETTINGS)) for K, rho in LONGER),
            *(
                Row(f"Direct path, rho = {rho:g}", tuple(_top1(direct(s.dataset, rho)) for s in SETTINGS))
                for rho in DIRECT_LONGER
            ),
            Row("Frozen trunk", tuple(_top1(f"{s.dataset}-frozen", Paper(FROZEN[s.dataset][0])) for s in SETTINGS)),
        ),
        "higher",
        note="Only the first and the last row are in the paper.",
    )


def headlines() -> tuple[Headline, ...]:
    """Return the rows of the report's summary."""
    return (*(_main_headline(setting) for setting in SETTINGS), _flat_headline(), _whole_headline())


def _main_headline(setting: ImageSetting) -> Headline:
    paper = dict(zip(METHOD_TITLES, (Paper(*pair) for pair in MAIN[setting.dataset]), strict=True))
    cells = {METHOD_TITLES[m]: _top1(f"{setting.dataset}-{m}", paper[m]) for m in ("backprop", "pure_fg", "split_fg")}
    frozen = _top1(f"{setting.dataset}-frozen", Paper(FROZEN[setting.dataset][0]))
    beyond = {"Beyond the paper": _top1(direct(setting.dataset, 1.0))}
    label = f"{setting.label}, 60 epochs, each method on its own network: top-1 accuracy, %"
    return Headline(label, {**cells, "Frozen trunk": frozen, **beyond}, "higher", "direct path, flat head")


def _flat_headline() -> Headline:
    return Headline(
        "CIFAR-10, flat head, 6,000 steps: top-1 accuracy, %",
        {
            "Backprop": _top1("flat-backprop", Paper(70.7, 0.3)),
            "Frozen trunk": _top1("flat-frozen"),
            "Pure FG": _top1("flat-pure_fg", Paper(22.6, 1.4)),
            "Split-FG": _top1("flat-split_fg", Paper(56.9, 1.2)),
            "Beyond the paper": _top1("flat-learned"),
        },
        "higher",
        "learned feedback",
    )


def _whole_headline() -> Headline:
    cells = {"Backprop": "resnet20-backprop", "Split-FG": "naive-split_fg", "Beyond the paper": "resnet20-learned"}
    return Headline(
        "CIFAR-10, whole ResNet-20, 6,000 steps: top-1 accuracy, %",
        {column: _top1(preset) for column, preset in cells.items()},
        "higher",
        "learned feedback",
    )
