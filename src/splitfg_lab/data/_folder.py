"""The data folder, the cache folder, and the raw files in them."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitfg.errors import DataError
from splitfg_lab.data.specs import DataSet

VARIABLE = "SPLITFG_DATA"


def cache_folder() -> Path:
    """Return the cache folder of this user: ``~/.cache/splitfg`` on Linux, honouring ``XDG_CACHE_HOME``."""
    from platformdirs import user_cache_path

    folder = user_cache_path("splitfg", appauthor=False, opinion=False)
    earlier = _earlier_cache_folder()
    return earlier if earlier.is_dir() and not folder.is_dir() else folder


def _earlier_cache_folder() -> Path:
    """Return the folder that releases before platformdirs used, so that its data is still found.

    Platformdirs honours ``XDG_CACHE_HOME`` on macOS too, and asks Windows instead of reading ``LOCALAPPDATA``.
    """
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "splitfg"


def data_folder() -> Path:
    """Return ``SPLITFG_DATA`` if it is set, else ``data`` in the cache folder."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else cache_folder() / "data"


@dataclass(frozen=True)
class DataFolder:
    """A data folder, and the folder for its downloads and prepared data.

    Attributes:
        root: The data folder, searched for raw files (see ``DataSet.raw``).
        work: Where downloads and prepared data go: ``root`` itself, or a folder in the cache if ``root`` is read-only.
    """

    root: Path
    work: Path

    @classmethod
    def at(cls, folder: Path | str | None) -> DataFolder:
        """Open the data folder at a path, or the default one.

        Raises:
            DataError: The path does not exist or is not a folder.
        """
        root = data_folder() if folder is None else Path(folder).expanduser()
        named = folder is not None or bool(os.environ.get(VARIABLE))
        if root.exists() and not root.is_dir():
            raise DataError(f"{root} is not a folder", hint=f"set {VARIABLE} to a folder")
        if named and not root.exists():
            raise DataError(f"the data folder {root} does not exist", hint=f"create it, or set {VARIABLE}")
        return cls(root, root if _writable(root) else _stand_in(root))

    def raw(self, data: DataSet, split: str = "") -> list[Path]:
        """List the raw files of a data set (or of a split), by the first pattern that matches any.

        If a pattern matches no file, its ending may be in capitals: ``adult.CSV``.
        """
        return self._first([pattern.replace("{split}", split) for pattern in data.raw])

    def unsupported(self, data: DataSet) -> list[Path]:
        """List files of a data set in a format that splitfg does not read."""
        return self._first(data.unsupported.patterns) if data.unsupported else []

    def _first(self, patterns: Sequence[str]) -> list[Path]:
        for pattern in patterns:
            for place in (self.root, self.work):
                found = _matching(place, pattern) if place.is_dir() else []
                if found:
                    return found
        return []

    def prepared(self, data: DataSet, split: str = "") -> Path:
        """Return the folder for a prepared data set (or split), which may not exist yet."""
        below = Path("prepared", data.name, split)
        return self.root / below if (self.root / below).is_dir() else self.work / below


def _matching(folder: Path, pattern: str) -> list[Path]:
    """List the files that match a pattern; if there are none, ignore the case of the ending."""
    otherwise = (path for path in folder.glob(_any_case_ending(pattern)) if not path.match(pattern))
    return sorted(folder.glob(pattern)) or sorted(otherwise)


def _any_case_ending(pattern: str) -> str:
    """Convert ``a.csv`` to ``a.[cC][sS][vV]``."""
    ending = re.search(r"(\.\w+)*$", pattern)
    assert ending is not None  # it may be empty
    letters = (f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in ending[0])
    return pattern[: ending.start()] + "".join(letters)


def _writable(root: Path) -> bool:
    """Return whether to write below a folder: not if its permissions are read-only, even as root."""
    while not root.exists():
        root = root.parent
    anyone = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    return os.access(root, os.W_OK) and bool(root.stat().st_mode & anyone)


def _stand_in(root: Path) -> Path:
    real = os.path.realpath(root)  # unlike Path.resolve, accepts a link to itself
    key = hashlib.sha256(real.encode()).hexdigest()[:12]
    return cache_folder() / "read-only" / f"{Path(real).name}-{key}"
