"""Where data lies: the data folder, the cache folder, and what is recognised in them."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from splitfg.errors import DataError
from splitfg_lab.data.specs import DataSet

VARIABLE = "SPLITFG_DATA"


def cache_folder() -> Path:
    """The platform's cache folder: ``~/.cache/splitfg`` on Linux, honouring ``XDG_CACHE_HOME``."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "splitfg"


def data_folder() -> Path:
    """``SPLITFG_DATA`` where it is set, else ``data`` in the cache folder."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else cache_folder() / "data"


@dataclass(frozen=True)
class DataFolder:
    """A data folder and the place where its prepared data goes.

    Raw files are recognised below ``root`` (see ``DataSet.raw``). What is fetched or prepared goes to ``work``: the
    folder itself, or, where that is read-only, a folder of its own in the cache.
    """

    root: Path
    work: Path

    @classmethod
    def at(cls, folder: Path | str | None) -> DataFolder:
        """The data folder at a path, or the default one.

        Raises:
            DataError: A folder was named, and it is not there or not a folder.
        """
        root = data_folder() if folder is None else Path(folder).expanduser()
        named = folder is not None or bool(os.environ.get(VARIABLE))
        if root.exists() and not root.is_dir():
            raise DataError(f"{root} is not a folder", hint=f"set {VARIABLE} to a folder")
        if named and not root.exists():
            raise DataError(f"the data folder {root} does not exist", hint=f"create it, or set {VARIABLE}")
        return cls(root, root if _writable(root) else _stand_in(root))

    def raw(self, data: DataSet, split: str = "") -> list[Path]:
        """The files recognised as a data set (or one of its splits), by the first pattern that finds any.

        Where a pattern finds none, its ending may also be in capitals: ``adult.CSV``.
        """
        for pattern in data.raw:
            for place in (self.root, self.work):
                found = _matching(place, pattern.replace("{split}", split)) if place.is_dir() else []
                if found:
                    return found
        return []

    def prepared(self, data: DataSet, split: str = "") -> Path:
        """Where a prepared data set (or one of its splits) lies or would lie."""
        below = Path("prepared", data.name, split)
        return self.root / below if (self.root / below).is_dir() else self.work / below


def _matching(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern; else those whose endings alone are written otherwise."""
    otherwise = (path for path in folder.glob(_any_case_ending(pattern)) if not path.match(pattern))
    return sorted(folder.glob(pattern)) or sorted(otherwise)


def _any_case_ending(pattern: str) -> str:
    """``a.csv`` as ``a.[cC][sS][vV]``."""
    ending = re.search(r"(\.\w+)*$", pattern)
    assert ending is not None  # it may be empty
    letters = (f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in ending[0])
    return pattern[: ending.start()] + "".join(letters)


def _writable(root: Path) -> bool:
    """Whether to write below a folder. One whose permissions say read-only is left alone, even by root."""
    while not root.exists():
        root = root.parent
    anyone = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    return os.access(root, os.W_OK) and bool(root.stat().st_mode & anyone)


def _stand_in(root: Path) -> Path:
    real = os.path.realpath(root)  # unlike Path.resolve, it lets a link to itself be
    key = hashlib.sha256(real.encode()).hexdigest()[:12]
    return cache_folder() / "read-only" / f"{Path(real).name}-{key}"
