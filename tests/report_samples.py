"""Made-up experiments and runs for the report's tests: written as raw JSON, independent of the code that reads it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from splitfg_lab.experiments.spec import Cell, Curves, Experiment, Headline, Paper, Preset, Row, Sweep, Table


@dataclass(frozen=True)
class Step:
    lr: float = 3e-3
    rho: float = 1.0


@dataclass(frozen=True)
class Config:
    data: str = "adult"
    method: str = "split_fg"
    K: int = 8
    step: Step = field(default_factory=Step)


def config_json(config: Config, **changes: Any) -> dict[str, Any]:
    """As a run writes it down: nested dataclasses carry their class name."""
    plain = asdict(config) | changes
    plain["step"] = {"type": "Step"} | plain["step"]
    return plain


def report_json(experiment: str, preset: str, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A complete ``report.json``."""
    return {
        "schema": 1,
        "experiment": experiment,
        "preset": preset,
        "seed": seed,
        "status": "done",
        "message": "",
        "metrics": {"accuracy": 80.0},
        "versions": {"python": "3.12.3", "torch": "2.13.0", "numpy": "2.5.0"},
        "git": "a1b2c3d4e5f60718293a4b5c6d7e8f9001122334",
        "git_dirty": False,
        "device": "cuda: NVIDIA H200",
        "threads": 2,
        "side_by_side": 1,
        "started": "2025-03-01T10:00:00+00:00",
        "finished": "2025-03-01T10:05:00+00:00",
        "wall_s": 300.0,
        "steps": 300,
        "step_ms": 4.25,
        "peak_memory_mib": 126.0,
        "memory_kind": "GPU memory allocated",
        "jvps_per_step": 8.0,
        "trunk_backward": 0.0,
        "config": config_json(Config()),
    } | changes


def write_run(
    runs: Path, report: dict[str, Any], curve: list[dict[str, float]] | None = None, *, folder: str = ""
) -> Path:
    """A finished run folder."""
    path = runs / report["experiment"] / (folder or report["preset"]) / f"seed{report['seed']}"
    path.mkdir(parents=True)
    identity = {name: report[name] for name in ("schema", "experiment", "preset", "seed", "config")}
    (path / "config.json").write_text(json.dumps(identity))
    (path / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in curve or []))
    (path / "report.json").write_text(json.dumps(report))
    (path / "DONE").write_text("")
    return path


def write_results(results: Path, experiment: str, runs: list[dict[str, Any]]) -> Path:
    """A recorded results file; each run is a report with its ``curve``."""
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{experiment}.json"
    path.write_text(json.dumps({"schema": 1, "experiment": experiment, "runs": runs}))
    return path


METHODS = {
    "backprop": "Backprop",
    "pure_fg": "Pure FG",
    "es": "ES",
    "ff": "FF",
    "pc": "PC",
    "hopfield": "Hop.",
    "split_fg": "Split-FG",
}
TABULAR = {
    "adult": ("Adult", (84.2, 81.7, 81.8, 81.6, 81.5, 79.1, 82.5)),
    "higgs": ("Higgs Small", (68.8, 59.0, 59.0, 61.7, 61.5, 55.4, 61.9)),
    "otto": ("Otto", (78.3, 62.8, 62.8, 30.8, 68.8, 62.3, 71.7)),
    "covertype": ("Covertype", (71.7, 61.2, 61.2, 35.0, 65.5, 62.1, 66.8)),
}


def tabular() -> Experiment:
    """Data sets by methods: compared within a row."""
    presets = tuple(
        Preset(f"{data}-{method}", f"{name}, {label}", Config(data, method), seeds=(0, 1, 2, 3, 4))
        for data, (name, _) in TABULAR.items()
        for method, label in METHODS.items()
    )
    rows = tuple(
        Row(
            name,
            ("CE", *(Cell(f"{data}-{m}", "accuracy", Paper(v, 0.4)) for m, v in zip(METHODS, values, strict=True))),
        )
        for data, (name, values) in TABULAR.items()
    )
    table = Table(
        "main", "Held-out accuracy (%), five folds", ("Loss", *METHODS.values()), rows, better="higher", best_in="row"
    )
    headline = Headline(
        "Adult, five folds: accuracy, %",
        {
            "Backprop": Cell("adult-backprop", "accuracy"),
            "Split-FG": Cell("adult-split_fg", "accuracy", Paper(82.5, 0.4)),
        },
        "higher",
    )
    waiting = Headline("Covertype: accuracy, %", {"Split-FG": Cell("covertype-split_fg", "accuracy")}, "higher")
    unrun = Table(
        "unrun", "Covertype alone", ("Split-FG",), (Row("Covertype", (Cell("covertype-split_fg", "accuracy"),)),)
    )
    return Experiment(
        "tabular",
        "Tables: seven methods",
        "Table 1, Section 4.2",
        "m:f",
        presets,
        (table, unrun),
        headlines=(headline, waiting),
    )


LANGUAGE = {
    "backprop": ("Same-architecture backprop + Adam", 149.61, 41.7, 1237.7, 1, 0),
    "fg-k4": ("Forward gradient + Adam, K=4, tuned lr", 2884.97, 137.4, 1694.5, 0, 4),
    "frozen": ("Frozen trunk + exact head (K=0)", 667.64, 24.4, 810.6, 0, 0),
    "naive": ("Split-FG + Adam, K=4, naive trunk step (×1)", 1733.36, 137.3, 810.6, 0, 4),
    "rho-0.01": ("Split-FG + Adam, K=4, trunk step ×0.01", 514.9, 133.8, 810.6, 0, 4),
    "rho-0.03": ("Split-FG + Adam, K=4, trunk step ×0.03", 386.70, 133.8, 810.6, 0, 4),
    "rho-0.1": ("Split-FG + Adam, K=4, trunk step ×0.1", 365.0, 133.8, 810.6, 0, 4),
    "rho-0.3": ("Split-FG + Adam, K=4, trunk step ×0.3", 633.1, 133.8, 810.6, 0, 4),
}


def language() -> Experiment:
    """Methods by metrics: compared within a column; curves and a sweep."""
    presets = tuple(
        Preset(name, title, Config("wikitext", name, K=4, step=Step(rho=_rho(name))), seeds=(0,))
        for name, (title, *_) in LANGUAGE.items()
    )
    rows = tuple(
        Row(
            title,
            (
                "119.1M / 1 ep.",
                Cell(name, "val_nll", Paper(math.log(ppl))),
                Cell(name, "val_ppl", Paper(ppl)),
                Cell(name, "step_ms", Paper(ms)),
                Cell(name, "peak_mib", Paper(mib)),
            ),
        )
        for name, (title, ppl, ms, mib, *_) in LANGUAGE.items()
    )
    columns = ("Train exposure", "Val. NLL", "PPL", "Step (ms)", "Peak mem. (MiB)")
    note = "Trained on a Wikipedia stand-in of the same length, evaluated on WikiText-103 validation."
    table = Table("main", "Language: small8 validation results", columns, rows, better="lower", decimals=2, note=note)
    curves = Curves(
        "frozen-control",
        "The trunk must train better than not at all",
        ("backprop", "frozen", "naive", "rho-0.03"),
        "val_ppl",
        log_y=True,
        references=(("paper's frozen control", 667.6),),
    )
    sweep = Sweep(
        "rho",
        "Trunk step scale",
        ("rho-0.01", "rho-0.03", "rho-0.1", "rho-0.3"),
        "step.rho",
        ("val_ppl",),
        y_label="validation perplexity",
    )
    waiting = Curves("k", "Tangent count (nothing run yet)", ("rho-0.3",), "val_ppl")
    return Experiment(
        "language", "Language: GPT small8", "Table 3, Section 4.4", "m:f", presets, (table,), (curves, sweep, waiting)
    )


def _rho(name: str) -> float:
    return float(name.removeprefix("rho-")) if name.startswith("rho-") else 1.0


def sample_experiments() -> tuple[Experiment, ...]:
    """Everything the sample report is made of."""
    return (tabular(), language())


def write_sample(root: Path) -> tuple[Path, Path]:
    """Run folders and results with a bit of everything: ``(runs, results)``."""
    runs, results = root / "runs", root / "results"
    _write_tabular(runs, results)
    _write_language(runs)
    (runs / "language" / "rho-0.3" / "seed0").mkdir(parents=True)
    (runs / "language" / "rho-0.3" / "seed0" / "config.json").write_text("{}")
    broken = runs / "tabular" / "adult-es" / "seed9"
    broken.mkdir(parents=True)
    (broken / "report.json").write_text('{"schema": 1, "experiment": "tabu')
    (broken / "DONE").write_text("")
    return runs, results


def _write_tabular(runs: Path, results: Path) -> None:
    noise = random.Random(0)
    recorded = []
    for data, (_, values) in TABULAR.items():
        if data == "covertype":
            continue
        for method, value in zip(METHODS, values, strict=True):
            for seed in range(3 if method == "pc" else 5):
                accuracy = value + noise.gauss(-0.2, 0.4)
                report = report_json(
                    "tabular",
                    f"{data}-{method}",
                    seed,
                    metrics={"accuracy": accuracy},
                    config=config_json(Config(data, method)),
                    trunk_backward=float(method == "backprop"),
                    jvps_per_step=8.0 if method in ("pure_fg", "es", "split_fg") else 0.0,
                    step_ms=2 + noise.random(),
                )
                if (data, method) == ("otto", "ff"):
                    report |= {"status": "diverged", "message": f"diverged at step {80 + seed}: loss is nan"}
                recorded.append(report | {"curve": []})
    write_results(results, "tabular", recorded)
    changed = report_json(
        "tabular",
        "adult-split_fg",
        0,
        metrics={"accuracy": 83.4},
        config=config_json(Config("adult", "split_fg"), K=64),
    )
    write_run(runs, changed, folder="adult-split_fg+K=64")


def _write_language(runs: Path) -> None:
    noise = random.Random(1)
    for name, (_, ppl, ms, mib, backward, jvps) in LANGUAGE.items():
        if name == "rho-0.3":
            continue
        final = ppl * 1.06
        curve = [
            {
                "step": step,
                "wall_s": step * ms / 1000,
                "val_ppl": final + (50257 - final) * math.exp(-step / 12000) + noise.random() * 0.02 * final,
            }
            for step in range(0, 232589, 4000)
        ]
        report = report_json(
            "language",
            name,
            metrics={"val_ppl": final, "val_nll": math.log(final), "step_ms": ms / 40, "peak_mib": mib * 0.6},
            config=config_json(Config("wikitext", name, K=4, step=Step(rho=_rho(name)))),
            trunk_backward=float(backward),
            jvps_per_step=float(jvps),
            step_ms=ms / 40,
            peak_memory_mib=mib * 0.6,
            steps=232588,
            wall_s=232588 * ms / 40000,
        )
        if name == "naive":
            report |= {"status": "diverged", "message": "diverged at step 60,000: loss is inf"}
            curve = curve[:15]
        write_run(runs, report, curve)
