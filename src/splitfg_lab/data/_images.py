"""CIFAR's binary batches to plain arrays: ``train_x`` and ``test_x`` (N, 3, 32, 32), labels (N,), uint8."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from splitfg.errors import DataError, shorten
from splitfg_lab.data._prepared import Built, Meta, Stored, open_array
from splitfg_lab.data._source import Member, members, reading
from splitfg_lab.data._writing import HashingWriter, OnProgress
from splitfg_lab.data.specs import ImageFile, ImageSet

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
MOST_BYTES = 1 << 30
"""Limit for the contents of an archive; CIFAR's have 184 MB."""
Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class _Batch:
    pixels: Bytes
    labels: Bytes
    note: str


def build_images(data: ImageSet, paths: Sequence[Path], folder: Path, progress: OnProgress) -> Built:
    """Write the arrays of an image set into an empty folder.

    Raises:
        DataError: Files are missing, damaged, of the wrong size, or not the official ones.
    """
    with members(paths, most_bytes=MOST_BYTES) as found:
        chosen = _choose(data, found, paths)
        stored: dict[str, Stored] = {}
        notes: set[str] = set()
        for split in ("train", "test"):
            files = [file for file in data.files if file.split == split]
            batches = (_read(data, file, chosen[file.name], progress) for file in files)
            stored |= _write_split(folder, split, batches, notes)
    counts = {split: stored[f"{split}_y.u8"].shape[0] for split in ("train", "test")}
    used = sorted({member.path for member in chosen.values()})
    return Built(stored, counts, "; ".join(sorted(notes)), used)


def _choose(data: ImageSet, found: Sequence[Member], paths: Sequence[Path]) -> dict[str, Member]:
    """Find the member of every file, and validate all sizes before any pixel is read."""
    named = {member.name: member for member in found}
    missing = [file.name for file in data.files if file.name not in named]
    if missing:
        raise _not_this_set(data, missing, sorted(named), paths)
    problems = [problem for file in data.files if (problem := _size_problem(data, file, named[file.name].size))]
    if problems:
        raise DataError(f"{shorten(paths)} does not hold {data.title}", problems, "get the official archive again")
    return {file.name: named[file.name] for file in data.files}


def _not_this_set(data: ImageSet, missing: Sequence[str], names: Sequence[str], paths: Sequence[Path]) -> DataError:
    problems = [f"missing: {shorten(missing)}", f"found instead: {shorten(names) or 'no files'}"]
    hint = "give the official binary archive (.tar.gz), or the folder that it unpacks to"
    if data.unsupported and {Path(file.name).stem for file in data.files} <= set(names):
        problems, hint = [f"it is {data.unsupported.reason}"], f"fetch it: splitfg data fetch {data.name}"
    return DataError(f"{shorten(paths)} does not hold the binary version of {data.title}", problems, hint)


def _size_problem(data: ImageSet, file: ImageFile, size: int) -> str:
    record = data.label_bytes + PIXELS
    needed = file.rows * record
    if size == needed:
        return ""
    problem = f"{file.name} has {size:,} bytes; {file.rows:,} images of 3 x 32 x 32 need {needed:,}"
    if size % record == 0:
        return f"{problem}: it holds {size // record:,} images"
    return f"{problem}: it is {'truncated' if size < needed else 'too large'}, or its images have another size"


def _read(data: ImageSet, file: ImageFile, member: Member, progress: OnProgress) -> _Batch:
    with reading(member.path), member.open() as stream:
        blob = stream.read(member.size)
    progress(file.name, len(blob), len(blob))
    problem = _size_problem(data, file, len(blob))
    if problem:
        raise DataError(problem)
    note = _recognise(file, blob)
    rows = np.frombuffer(blob, dtype=np.uint8).reshape(file.rows, -1)
    labels = rows[:, data.label_bytes - 1]
    if int(labels.max()) >= data.classes:
        raise DataError(
            f"{file.name} has the label {labels.max()} (image {int(labels.argmax()):,}); the {data.classes} classes of "
            f"{data.name} are numbered 0 to {data.classes - 1}"
        )
    return _Batch(rows[:, data.label_bytes :], labels, note)


def _recognise(file: ImageFile, blob: bytes) -> str:
    """Return the note of the known content that ``blob`` is."""
    for known in file.known:
        algorithm, _, expected = known.digest.partition(":")
        if hashlib.new(algorithm, blob).hexdigest() == expected:
            return known.note
    if file.known:
        raise DataError(
            f"{file.name} is not the official file: its checksum differs from {file.known[0].digest}",
            hint="get the archive again: it is damaged, or somebody changed it",
        )
    return ""


def _write_split(folder: Path, split: str, batches: Iterable[_Batch], notes: set[str]) -> dict[str, Stored]:
    labels = []
    with HashingWriter(folder / f"{split}_x.u8") as x:
        for batch in batches:
            x.write(batch.pixels.tobytes())
            labels.append(batch.labels)
            notes |= {batch.note} - {""}
    with HashingWriter(folder / f"{split}_y.u8") as y:
        y.write(np.concatenate(labels).tobytes())
    rows = y.bytes
    return {
        f"{split}_x.u8": Stored("uint8", (rows, *SHAPE), x.bytes, x.sha256),
        f"{split}_y.u8": Stored("uint8", (rows,), y.bytes, y.sha256),
    }


def recount_images(data: ImageSet, folder: Path, meta: Meta) -> list[str]:
    """Count prepared images and classes again, and return every difference from the catalogue."""
    problems = []
    for split in ("train", "test"):
        labels = open_array(folder, meta, f"{split}_y.u8")
        expected = sum(file.rows for file in data.files if file.split == split)
        classes = len(np.unique(labels))
        if len(labels) != expected:
            problems.append(f"{split} has {len(labels):,} images; expected {expected:,}")
        if classes != data.classes or int(labels.max(initial=0)) >= data.classes:
            problems.append(f"{split} has {classes} classes; expected {data.classes}")
    return problems
