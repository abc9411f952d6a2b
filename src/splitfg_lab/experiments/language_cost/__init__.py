"""Time and memory of a training step of GPT small8, against the strongest ordinary alternatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from splitfg.errors import raise_if
from splitfg.recipes.checks import below
from splitfg_lab.experiments.language import Sizes
from splitfg_lab.experiments.spec import Cell, Experiment, Headline, Paper, Preset, Row, Sweep, Table

TANGENTS = (1, 2, 4, 8, 32)
BLOCKS = (20, 22, 23, 25)
LEAN_BLOCKS = (20, 21, 22)
BACKPROPS = {
    "backprop": "Backprop",
    "backprop-chunked": "Backprop, the same chunked head",
    "backprop-checkpointed": "Backprop, activation checkpointing",
    "backprop-both": "Backprop, chunked head and checkpointing",
}
SWEPT = BACKPROPS | {
    "frozen": "Frozen trunk",
    "split_fg-k4-chunk1": "Split-FG, K = 4, one at a time",
    "split_fg-k4-chunk4": "Split-FG, K = 4, all at once",
    "split_fg-k4-chunk1-block22-lean": "Split-FG, K = 4, one at a time, 2^22 logits, lean",
}
LADDER = {
    "backprop": "Backprop",
    "backprop-both": "Backprop, chunked head and checkpointing",
    "frozen": "Frozen trunk",
    "split_fg-k4-chunk4": "Split-FG, K = 4, all at once",
    "direct": "Direct path",
    "maps": "Maps to the writers",
    "pull-identity": "r unchanged, one pull",
    "pull-maps": "Maps, one pull",
    "pull2-maps": "Maps, two pulls",
    "pull-maps-blocks": "Maps between transformer blocks, one pull",
    "pull2-maps-blocks": "Maps between transformer blocks, two pulls",
    "pull4-maps": "Maps, four pulls",
    "learned": "Learned feedback, layer by layer",
    "learned-layers": "Learned feedback, layers measured alone",
    "learned-every4": "Learned feedback, measured every 4 steps",
}
"""Variants of the ladder to backprop."""
LADDER_DEPTHS = (4, 16, 32)
DEPTHS = (4, 8, 16, 32, 64)
LENGTHS = (64, 128, 256, 512, 1024)


def split_fg(K: int, chunk: int, block: int | None = None, *, lean: bool = False) -> str:
    """Return the name of a Split-FG variant: K tangents, ``chunk`` at a time, 2^``block`` logits at a time."""
    return f"split_fg-k{K}-chunk{chunk}" + ("" if block is None else f"-block{block}") + "-lean" * lean


OTHERS = {  # label, the paper's milliseconds and MiB
    "fg-k1-chunk1": ("Forward gradient, K = 1", 63.6, 1038.4),
    "fg-k4-chunk1": ("Forward gradient, K = 4, one at a time", 137.4, 1694.5),
    "fg-k1-chunk1-sgd": ("Forward gradient + SGD, K = 1", 54.6, 913.7),
    "es-k1": ("Antithetic ES, K = 1", 44.1, 764.7),
    "split_fg-k4-chunk1-muon": ("Split-FG + Muon, K = 4, one at a time", 110.0, None),
    "split_fg-k4-chunk1-adamw": ("Split-FG + AdamW, K = 4, one at a time", 141.0, None),
    "split_fg-k4-chunk1-sgd": ("Split-FG + SGD, K = 4, one at a time", 118.0, None),
}

VARIANTS = (
    *BACKPROPS,
    "frozen",
    *dict.fromkeys(split_fg(K, chunk) for K in TANGENTS for chunk in (1, K)),
    *(split_fg(4, chunk, block) for chunk in (1, 4) for block in BLOCKS),
    *(split_fg(4, 1, block, lean=True) for block in LEAN_BLOCKS),
    *OTHERS,
)


@dataclass(frozen=True)
class Cost:
    """Whole training steps (batch lookup, estimate, clipping, Adam) of several methods.

    Attributes:
        measure: ``time``, all in one process, in turns; or ``memory``, each in its own process, since work space that
            one variant leaves behind changes the peak of the next.
        variants: Names of the variants to measure.
        model: Sizes of the GPT.
        batch: Windows per step.
        block: Logits that exist at once, as a power of two, unless the variant sets it.
        step: ``compiled`` and captured in a CUDA graph, ``captured`` alone, or ``eager``.
        blocks: Timed blocks of steps; the variants take turns, and the median block counts.
        steps: Steps in a block.
        matmul: float32 matrix products on a GPU: ``high`` allows TF32.
    """

    measure: Literal["time", "memory"] = "time"
    variants: tuple[str, ...] = VARIANTS
    model: Sizes = field(default_factory=Sizes)
    batch: int = 4
    block: int = 24
    step: Literal["compiled", "captured", "eager"] = "compiled"
    blocks: int = 7
    steps: int = 50
    matmul: Literal["high", "highest"] = "high"

    def __post_init__(self) -> None:
        raise_if(below(1, self, "batch", "blocks", "steps") + below(0, self, "block"))


def _swept(name: str, title: str, model: Sizes) -> Preset:
    return Preset(name, title, Cost("memory", tuple(SWEPT), model, step="eager"))


_ROWS = (  # label, variant, the paper's milliseconds and MiB
    *((label, name, *((41.7, 1237.7) if name == "backprop" else (None, None))) for name, label in BACKPROPS.items()),
    ("Frozen trunk", "frozen", 24.4, 810.6),
    *(
        (f"Split-FG, K = {K}, one at a time", split_fg(K, 1), *_p)
        for K, _p in zip(
            TANGENTS, ((52.0, 811.0), (62.0, 811.0), (134.0, 811.0), (187.0, 811.0), (None, None)), strict=True
        )
    ),
    *((f"Split-FG, K = {K}, all at once", split_fg(K, K), None, None) for K in TANGENTS if K > 1),
    *(
        (f"Split-FG, K = 4, {how}, 2^{b} logits", split_fg(4, chunk, b), None, None)
        for chunk, how in ((1, "one at a time"), (4, "all at once"))
        for b in BLOCKS
    ),
    *(
        (f"Split-FG, K = 4, one at a time, 2^{b} logits, lean", split_fg(4, 1, b, lean=True), None, None)
        for b in LEAN_BLOCKS
    ),
    *((label, name, ms, mib) for name, (label, ms, mib) in OTHERS.items()),
)


def _cells(preset: str, variant: str, ms: float | None, mib: float | None) -> tuple[Cell, ...]:
    # the paper timed eager steps, so only eager ratios are comparable with its own
    ratio = None if ms is None else Paper(round(ms / 41.7, 2))
    captured = () if preset == "eager" else (Cell(preset, f"ratio/{variant}", decimals=2),)
    return (
        Cell(preset, f"ms/{variant}", Paper(ms) if ms is not None and preset == "eager" else None, decimals=3),
        *captured,
        Cell("eager", f"ratio/{variant}", ratio, decimals=2),
        Cell(f"{preset}-memory", f"mib/{variant}", None if mib is None else Paper(mib)),
        Cell(
            f"{preset}-memory", f"saved/{variant}", None if mib is None else Paper(round(100 * (1 - mib / 1237.7), 1))
        ),
    )


_MEMORY = ("Peak, MiB", "Saved against backprop, %")
_COLUMNS = {
    "compiled": ("Step, ms", "Time over backprop's, captured", "Time over backprop's, eager", *_MEMORY),
    "eager": ("Step, ms", "Time over backprop's, eager", *_MEMORY),
}


def _table(preset: str, title: str, note: str) -> Table:
    return Table(
        f"language-cost-{preset}",
        title,
        _COLUMNS[preset],
        tuple(Row(label, _cells(preset, name, ms, mib)) for label, name, ms, mib in _ROWS),
        note=note,
    )


def _sweep(key: str, title: str, metric: str, field: str, sizes: tuple[int, ...]) -> Sweep:
    """Return a figure of a metric of all variants against depth or sequence length."""
    name = {"layers": "depth", "context": "length"}[field]
    return Sweep(
        f"language-{key}",
        title,
        tuple(f"{name}-{n}" for n in sizes),
        f"model.{field}",
        tuple(f"{metric}/{variant}" for variant in SWEPT),
        "peak GPU memory, MiB",
        x_label={"layers": "layers", "context": "tokens in a window"}[field],
        labels=tuple(SWEPT.values()),
    )


_NOTE = (
    "All times of a column come from one process, in turns; every peak comes from its own process."
    " Captured steps are compiled and replayed as a CUDA graph. Peak is torch.cuda.max_memory_allocated of a step,"
    " parameters and optimizer state included. Lean takes the head's gradients after the tangents. The paper timed"
    " eager steps on a laptop GPU, validation included: its ratios, computed here from its times, are shown next to our"
    " eager ratios only."
)


def _ladder_table() -> Table:
    rows = tuple(
        Row(
            label,
            (
                Cell("ladder", f"ms/{name}", decimals=3),
                Cell("ladder", f"ratio/{name}", decimals=2),
                *(Cell(f"ladder-memory-{n}", f"mib/{name}") for n in LADDER_DEPTHS),
            ),
        )
        for name, label in LADDER.items()
    )
    columns = ("Step, ms", "Time over backprop's", *(f"Peak at {n} blocks, MiB" for n in LADDER_DEPTHS))
    title = "The ladder to backprop: step time and peak memory of GPT small8, compiled and captured"
    return Table("language-cost-ladder", title, columns, rows, note=_NOTE, collapse=True)


EXPERIMENT = Experiment(
    name="language_cost",
    title="Step time and peak memory of GPT small8",
    source="Section 4.4, step time and memory of Tables 3, 15 and 16",
    runner="splitfg_lab.experiments.language_cost.run:run",
    presets=(
        Preset("compiled", "Time of all methods, compiled and captured", Cost()),
        Preset("compiled-memory", "Memory of all methods, compiled and captured", Cost("memory")),
        Preset("eager", "Time of all methods, eager", Cost(step="eager", blocks=3, steps=5)),
        Preset("eager-memory", "Memory of all methods, eager", Cost("memory", step="eager")),
        *(_swept(f"depth-{n}", f"Memory at {n} layers", Sizes(layers=n)) for n in DEPTHS),
        Preset("ladder", "Time of the ladder, compiled and captured", Cost(variants=tuple(LADDER))),
        *(
            Preset(
                f"ladder-memory-{n}",
                f"Memory of the ladder at {n} layers, compiled and captured",
                Cost("memory", tuple(LADDER), Sizes(layers=n)),
            )
            for n in LADDER_DEPTHS
        ),
        *(_swept(f"length-{n}", f"Memory at T = {n}", Sizes(context=n)) for n in LENGTHS),
    ),
    tables=(
        _table("compiled", "A training step of GPT small8, compiled and captured", _NOTE),
        _table("eager", "The same, eager, as the paper measured it", _NOTE),
        _ladder_table(),
    ),
    figures=(
        _sweep("memory-depth", "Peak memory of an eager step against depth", "mib", "layers", DEPTHS),
        _sweep("memory-length", "Peak memory of an eager step against sequence length", "mib", "context", LENGTHS),
    ),
    no_checkpoints=("*",),
    smoke=(
        "variants=backprop,backprop-both,frozen,split_fg-k2-chunk1,split_fg-k2-chunk2,fg-k1-chunk1-sgd,es-k1",
        "blocks=1",
        "steps=1",
        "block=5",
        "batch=2",
        "model.layers=1",
        "model.width=8",
        "model.heads=2",
        "model.context=8",
        "model.vocab=64",
    ),
    # other variants of the same run, and the initialisation
    immaterial=("variants", "model.init"),
    headlines=(
        Headline(
            "GPT small8, K = 4: step time over backprop's, captured",
            {
                "Backprop": Cell("ladder", "ratio/backprop"),
                "Frozen trunk": Cell("ladder", "ratio/frozen"),
                "Split-FG": Cell("ladder", f"ratio/{split_fg(4, 4)}"),
                "Beyond the paper": Cell("ladder", "ratio/learned-layers"),
            },
            "lower",
            "learned feedback",
            decimals=2,
        ),
        Headline(
            "GPT small8, K = 4: peak GPU memory of an eager step, MiB",
            {
                "Backprop": Cell("eager-memory", "mib/backprop", Paper(1237.7)),
                "Frozen trunk": Cell("eager-memory", "mib/frozen", Paper(810.6)),
                "Pure FG": Cell("eager-memory", "mib/fg-k4-chunk1", Paper(1694.5)),
                "Split-FG": Cell("eager-memory", f"mib/{split_fg(4, 1)}", Paper(811.0)),
            },
            "lower",
            decimals=0,
        ),
    ),
)
