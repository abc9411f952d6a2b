"""One tuning, from data to a saved file: held-out rows, checkpoints, resuming."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix
from sklearn.model_selection import train_test_split

from splitfg.errors import DataError
from splitfg.onnx import OnnxClassifier, OnnxRegressor, OnnxTrunk, Tuning
from splitfg_lab.runs import RunError
from splitfg_lab.runs.checkpoint import load_checkpoint, save_checkpoint
from splitfg_lab.tuning.data import Examples
from splitfg_lab.tuning.report import TuneReport

Progress = Callable[[Tuning], None]


@dataclass(frozen=True)
class Job:
    """A network to tune, the data, and the files to write.

    Attributes:
        model: The network.
        out: The file to write.
        examples: The data.
        settings: Arguments of ``OnnxClassifier``.
        values: Whether the target is a number instead of a class.
        held_out: Share of rows that the report is measured on.
        seed: Of the held-out rows.
        resume: Whether to go on from the folder of an interrupted job.
    """

    model: Path
    out: Path
    examples: Examples
    settings: Mapping[str, Any]
    values: bool
    held_out: float
    seed: int
    resume: bool

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints, next to the file to write; removed at the end."""
        return self.out.with_name(self.out.name + ".tuning")


def tune(job: Job, progress: Progress) -> TuneReport:
    """Tune, save and measure.

    Raises:
        RunError: If there is nothing to resume, or an interrupted job is in the way.
    """
    start = time.perf_counter()
    train, held = _divided(job)
    kind = OnnxRegressor if job.values else OnnxClassifier
    estimator = kind(job.model, random_state=job.seed, **job.settings)
    tuning = estimator.prepare(dict(train.x), train.y)
    scores, spent = _begin(job, tuning, lambda: _held_score(estimator, tuning, held))
    try:
        while not tuning.done:
            tuning.step()
            progress(tuning)
            if len(tuning.losses) % tuning.settings.evaluate_every == 0:
                _store(job, tuning, scores, spent + time.perf_counter() - start)
    except KeyboardInterrupt:
        _store(job, tuning, scores, spent + time.perf_counter() - start)
        raise
    estimator.end(tuning)
    estimator.save(job.out)
    predicted = estimator.predict(dict(held.x))
    scores["tuned"] = float(estimator.score(dict(held.x), held.y))
    classes = [] if job.values else [str(c) for c in estimator.classes_]
    matrix = (
        np.zeros((0, 0), np.int64) if job.values else confusion_matrix(held.y, predicted, labels=estimator.classes_)
    )
    _remove(job.folder)
    return TuneReport(
        source=str(job.model),
        target=str(job.out),
        method=str(job.settings["method"]),
        score_name="R²" if job.values else "accuracy",
        scores=scores,
        steps=len(tuning.losses),
        rows=(len(train.y), len(held.y)),
        inferences=estimator.inferences_,
        engine_seconds=estimator.engine_seconds_,
        seconds=spent + time.perf_counter() - start,
        classes=classes,
        confusion=matrix,
        curve=tuning.scores,
    )


def _divided(job: Job) -> tuple[Examples, Examples]:
    y = job.examples.y
    rows = np.arange(len(y))
    counts = np.unique(y, return_counts=True)[1] if not job.values else np.array([0])
    if not job.values and counts.max(initial=0) < 2 <= len(y):
        raise DataError(f"every one of the {len(counts)} rows has its own class: choose another target, or --values")
    try:
        by = y if counts.min() > 1 else None
        train, held = train_test_split(rows, test_size=job.held_out, random_state=job.seed, stratify=by)
    except ValueError:  # fewer held-out rows than classes
        train, held = train_test_split(rows, test_size=job.held_out, random_state=job.seed)
    return job.examples.part(train), job.examples.part(held)


def _begin(job: Job, tuning: Tuning, measure: Callable[[], float]) -> tuple[dict[str, float], float]:
    """Start, or resume from a checkpoint; return the scores so far and the seconds spent before."""
    found = load_checkpoint(job.folder) if job.folder.is_dir() else None
    if job.resume and found is None:
        raise RunError(f"nothing to resume: {job.folder} has no checkpoint; leave out --resume")
    if found is None:
        tuning.begin()
        return {"new head alone": measure()}, 0.0
    if not job.resume:
        raise RunError(f"{job.folder} holds an interrupted job: go on with --resume, or delete the folder")
    if found.state["job"] != _digest(job):
        raise RunError(f"{job.folder} belongs to other data or settings: repeat those, or delete the folder")
    tuning.load_state_dict(found.state["tuning"])
    return dict(found.state["scores"]), float(found.state["seconds"])


def _store(job: Job, tuning: Tuning, scores: dict[str, float], seconds: float) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    state = {"job": _digest(job), "tuning": tuning.state_dict(), "scores": scores, "seconds": seconds}
    save_checkpoint(job.folder, state)


def _digest(job: Job) -> str:
    """Identify network, data and settings."""
    found = hashlib.sha256(job.model.read_bytes())
    plain = {name: repr(value) for name, value in job.settings.items()}
    found.update(json.dumps([plain, job.values, job.held_out, job.seed], sort_keys=True).encode())
    for array in (*job.examples.x.values(), job.examples.y.astype(str)):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _held_score(estimator: OnnxClassifier | OnnxRegressor, tuning: Tuning, held: Examples) -> float:
    from splitfg.onnx import inputs_of, predict

    split = tuning.split
    assert isinstance(split.trunk, OnnxTrunk)
    outputs: NDArray[Any] = predict(split, inputs_of(split.trunk, dict(held.x))).numpy()
    if isinstance(estimator, OnnxClassifier):
        return float(np.mean(estimator.classes_[outputs.argmax(1)] == held.y))
    values = outputs[:, 0] * estimator.scale_[1] + estimator.scale_[0]
    return 1 - float(np.square(values - held.y).sum() / np.square(held.y - held.y.mean()).sum())


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def set_threads(threads: int | None) -> None:
    """Limit torch's threads as the engine's."""
    if threads is not None:
        torch.set_num_threads(threads)
