"""Download public files into the data folder, resume partial ones, and verify checksums.

This uses our own client (:mod:`splitfg_lab.data._http`) instead of pooch, because pooch cannot resume: it deletes its
temporary file when a download fails. The archives have 160 to 190 MB and CIFAR's server is slow, so a connection lost
near the end would cost many minutes. Pooch would replace the checksum and the progress bar alone, and add requests as
a dependency; several addresses per file, safe redirects and one list of all problems would remain our code.
"""

from __future__ import annotations

import time
import urllib.parse
from pathlib import Path

from splitfg.errors import DataError
from splitfg_lab.data._folder import DataFolder
from splitfg_lab.data._http import TransferError, download
from splitfg_lab.data._writing import OnProgress, matches, silent
from splitfg_lab.data.catalogue import find_dataset
from splitfg_lab.data.specs import DataSet, Download

ATTEMPTS = 4


def fetch(
    data: str | DataSet,
    folder: Path | str | None = None,
    on_progress: OnProgress | None = None,
    *,
    mirror: str | None = None,
    wait: float = 1.0,
) -> list[Path]:
    """Download the public files of a data set into the data folder; keep files that exist.

    An interrupted download leaves a ``.part`` file, and the next call resumes it. A file with a published checksum is
    verified before it gets its name.

    Args:
        data: A name from the catalogue, or your own data set.
        folder: The data folder; ``None`` for the default one.
        on_progress: Called with file name, bytes so far and total bytes.
        mirror: Download every file from this address instead (its name is appended).
        wait: Seconds before the second attempt; doubled for each further one.

    Returns:
        The raw files, ready for :func:`prepare`.

    Raises:
        DataError: Lists the failed files with reasons, and where to copy them by hand.
    """
    entry, place = find_dataset(data), DataFolder.at(folder)
    if not entry.downloads:
        raise DataError(
            f"{entry.name} cannot be fetched", [entry.by_hand or "it has no public address"], _by_hand(entry)
        )
    results = [_fetch_one(file, place, mirror, wait, on_progress or silent) for file in entry.downloads]
    problems = [problem for result in results if isinstance(result, list) for problem in result]
    if problems:
        where = [f"download {Path(d.path).name} by hand to {place.work / d.path}" for d in entry.downloads]
        raise DataError(f"{entry.name} could not be fetched", problems, "\n".join([*where, _by_hand(entry)]))
    return [result for result in results if isinstance(result, Path)]


def _by_hand(data: DataSet) -> str:
    return f"or give files you have: splitfg data prepare {data.name} --from PATH"


def _fetch_one(
    file: Download, place: DataFolder, mirror: str | None, wait: float, progress: OnProgress
) -> Path | list[str]:
    """Return the finished file, or the problem at every address."""
    for present in (place.root / file.path, place.work / file.path):
        if present.exists():
            return _accept_present(present, file)
    target = place.work / file.path
    problems = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for url in file.urls if mirror is None else [_mirrored(file.urls[0], mirror)]:
            problem = _from_address(url, file, target, wait, progress)
            if problem is None:
                return target
            problems.append(problem)
    except OSError as error:
        problems.append(f"cannot write {target}: {error.strerror or error}")
    return problems


def _mirrored(url: str, mirror: str) -> str:
    return mirror.rstrip("/") + "/" + urllib.parse.urlsplit(url).path.rpartition("/")[2]


def _accept_present(target: Path, file: Download) -> Path | list[str]:
    if file.digest is None or matches(target, file.digest):
        return target
    return [f"{target} exists, but its checksum is not {file.digest}: move it away to fetch it again"]


def _from_address(url: str, file: Download, target: Path, wait: float, progress: OnProgress) -> str | None:
    """Try one address; return the problem, or ``None`` if the file is complete."""
    part = target.with_name(target.name + ".part")
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(wait * 2 ** (attempt - 1))
        try:
            _complete(url, file, part, progress)
        except TransferError as error:
            problem = str(error)
            if not error.again:
                break
        else:
            part.replace(target)
            return None
    return problem


def _complete(url: str, file: Download, part: Path, progress: OnProgress) -> None:
    """Download and verify ``part``; delete it if its content is wrong."""
    if file.digest is None:  # without a checksum, never join two transfers
        part.unlink(missing_ok=True)
    resumed = part.exists()
    if not resumed or _wrong_content(url, file, part) is not None:
        download(url, part, progress)
    problem = _wrong_content(url, file, part)
    if problem is not None:
        part.unlink()
        raise TransferError(problem, again=resumed)  # a complete download with wrong content will not get better


def _wrong_content(url: str, file: Download, part: Path) -> str | None:
    if file.digest is not None:
        return None if matches(part, file.digest) else f"{url}: the file's checksum is not {file.digest}"
    blob = part.read_bytes() if file.path.endswith(".parquet") else None
    if blob is not None and not (blob.startswith(b"PAR1") and blob.endswith(b"PAR1")):
        return f"{url}: this is not a parquet file (it begins with {blob[:16]!r})"
    return None
