"""Files that are kept byte for byte and known by their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from splitfg.errors import DataError, shorten
from splitfg_lab.data._prepared import Built, Stored
from splitfg_lab.data._source import members, reading
from splitfg_lab.data._writing import HashingWriter, OnProgress
from splitfg_lab.data.specs import FileSet


def build_files(data: FileSet, paths: Sequence[Path], folder: Path, progress: OnProgress) -> Built:
    """Copy the files of a set into an empty folder.

    Raises:
        DataError: Lists every file that is missing or not the known one.
    """
    stored: dict[str, Stored] = {}
    problems: list[str] = []
    with members(paths) as found:
        named = {member.name: member for member in found}
        for name, digest in data.files:
            if name not in named:
                problems.append(f"{name} is missing")
                continue
            with reading(named[name].path), named[name].open() as stream:
                blob = stream.read()
            algorithm, _, expected = digest.partition(":")
            if hashlib.new(algorithm, blob).hexdigest() != expected:
                problems.append(f"{name} is damaged or another file: its {algorithm} is not {expected}")
                continue
            with HashingWriter(folder / name) as file:
                file.write(blob)
            stored[name] = Stored("bytes", (len(blob),), len(blob), file.sha256)
            progress(name, len(blob), len(blob))
    if problems:
        raise DataError(f"{shorten(paths)} does not hold {data.title}", problems)
    return Built(stored, {"files": len(stored)}, "", [named[name].path for name in stored])
