"""CIFAR archives, python or binary, to plain arrays: ``train_x`` and ``test_x`` (N, 3, 32, 32), labels (N,), uint8."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splitfg.errors import DataError, shorten
from splitfg_lab.data._literal_pickle import Array, read_literals
from splitfg_lab.data._prepared import Built, Meta, Stored, open_array
from splitfg_lab.data._source import Member, members, reading
from splitfg_lab.data._writing import HashingWriter, OnProgress
from splitfg_lab.data.specs import ImageFile, ImageSet

PIXELS = 3 * 32 * 32
Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class _Batch:
    pixels: Bytes
    labels: Bytes
    note: str


def build_images(data: ImageSet, paths: Sequence[Path], folder: Path, progress: OnProgress) -> Built:
    """Write the arrays of an image set into an empty folder.

    Raises:
        DataError: Files are missing, damaged, or not the known ones.
    """
    with members(paths) as found:
        layout, chosen = _choose_layout(data, found, paths)
        stored: dict[str, Stored] = {}
        notes: set[str] = set()
        for split in ("train", "test"):
            files = [file for file in layout if file.split == split]
            batches = (_read(data, file, chosen[file.name], progress) for file in files)
            stored |= _write_split(folder, split, batches, notes)
    counts = {split: stored[f"{split}_y.u8"].shape[0] for split in ("train", "test")}
    used = sorted({chosen[file.name].path for file in layout})
    return Built(stored, counts, "; ".join(sorted(notes)), used)


def _choose_layout(
    data: ImageSet, found: Sequence[Member], paths: Sequence[Path]
) -> tuple[tuple[ImageFile, ...], dict[str, Member]]:
    """The first layout all of whose files are there."""
    named = {member.name: member for member in found}
    problems = []
    for title, layout in (("binary", data.binary), ("python", data.python)):
        missing = [file.name for file in layout if file.name not in named]
        if not missing:
            return layout, named
        problems.append(f"as the {title} version it lacks {shorten(missing)}")
    raise DataError(
        f"{shorten(paths)} does not hold {data.title}",
        problems,
        "give the official archive (.tar.gz) or the folder it unpacks to",
    )


def _read(data: ImageSet, file: ImageFile, member: Member, progress: OnProgress) -> _Batch:
    with reading(member.path), member.open() as stream:
        blob = stream.read()
    progress(file.name, len(blob), len(blob))
    note = _recognise(file, blob)
    pixels, labels = _parse_binary(data, file, blob) if file in data.binary else _parse_python(data, file, blob)
    if len(labels) != file.rows:
        raise DataError(f"{file.name} holds {len(labels):,} images; {file.rows:,} belong there")
    if labels.size and int(labels.max()) >= data.classes:
        raise DataError(f"{file.name} holds the label {labels.max()}; {data.name} has {data.classes} classes")
    return _Batch(pixels, labels, note)


def _recognise(file: ImageFile, blob: bytes) -> str:
    """The note of the known content that this is."""
    for known in file.known:
        algorithm, _, expected = known.digest.partition(":")
        if hashlib.new(algorithm, blob).hexdigest() == expected:
            return known.note
    if file.known:
        raise DataError(
            f"{file.name} is not the official file: its checksum differs from {file.known[0].digest}",
            hint="get the archive again; it is damaged or was changed",
        )
    return ""


def _parse_binary(data: ImageSet, file: ImageFile, blob: bytes) -> tuple[Bytes, Bytes]:
    record = data.label_bytes + PIXELS
    if len(blob) % record:
        raise DataError(f"{file.name} has {len(blob):,} bytes, not a multiple of {record}: it is truncated")
    rows = np.frombuffer(blob, dtype=np.uint8).reshape(-1, record)
    return rows[:, data.label_bytes :], rows[:, data.label_bytes - 1]


def _parse_python(data: ImageSet, file: ImageFile, blob: bytes) -> tuple[Bytes, Bytes]:
    value = read_literals(blob)
    pixels, labels = value.get(b"data"), value.get(data.label_key.encode())
    if not isinstance(pixels, Array) or not isinstance(labels, list):
        raise DataError(f"{file.name} holds no 'data' array and {data.label_key!r} list")
    if pixels.shape != (len(labels), PIXELS):
        raise DataError(f"{file.name} holds pixels of shape {pixels.shape} for {len(labels):,} labels")
    if not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise DataError(f"{file.name} holds labels that are no small integers")
    return np.frombuffer(pixels.data, dtype=np.uint8).reshape(pixels.shape), np.array(labels, dtype=np.uint8)


def _write_split(folder: Path, split: str, batches: Any, notes: set[str]) -> dict[str, Stored]:
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
        f"{split}_x.u8": Stored("uint8", (rows, 3, 32, 32), x.bytes, x.sha256),
        f"{split}_y.u8": Stored("uint8", (rows,), y.bytes, y.sha256),
    }


def recount_images(data: ImageSet, folder: Path, meta: Meta) -> list[str]:
    """What a fresh count of prepared images finds wrong."""
    problems = []
    for split in ("train", "test"):
        labels = open_array(folder, meta, f"{split}_y.u8")
        expected = sum(file.rows for file in data.binary if file.split == split)
        classes = len(np.unique(labels))
        if len(labels) != expected:
            problems.append(f"{split} has {len(labels):,} images; {expected:,} belong there")
        if classes != data.classes or int(labels.max(initial=0)) >= data.classes:
            problems.append(f"{split} has {classes} classes; {data.classes} belong there")
    return problems
