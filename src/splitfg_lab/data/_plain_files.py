"""Copies of files with known digests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from splitfg.errors import DataError, shorten
from splitfg_lab.data._prepared import Built, Stored
from splitfg_lab.data._source import Member, members, reading
from splitfg_lab.data._writing import CHUNK, HashingWriter, OnProgress, matches
from splitfg_lab.data.specs import FileSet


def build_files(data: FileSet, paths: Sequence[Path], folder: Path, progress: OnProgress) -> Built:
    """Copy the files of a set into an empty folder.

    Raises:
        DataError: Lists every file that is missing or has another digest.
    """
    stored: dict[str, Stored] = {}
    problems: list[str] = []
    with members(paths) as found:
        named = {member.name: member for member in found}
        for name, digest in data.files:
            if name not in named:
                problems.append(f"{name} is missing")
                continue
            stored[name] = _copy(named[name], folder / name, progress)
            if not matches(folder / name, digest):
                problems.append(f"{name} is damaged or another file: its checksum is not {digest}")
    if problems:
        raise DataError(f"{shorten(paths)} does not hold {data.title}", problems)
    return Built(stored, {"files": len(stored)}, "", [named[name].path for name in stored])


def _copy(member: Member, to: Path, progress: OnProgress) -> Stored:
    with reading(member.path), member.open() as stream, HashingWriter(to) as file:
        while block := stream.read(CHUNK):
            file.write(block)
            progress(member.name, file.bytes, member.size)
    return Stored("bytes", (file.bytes,), file.bytes, file.sha256)
