"""A bug to plant: one line of the library, changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "splitfg"


@dataclass(frozen=True)
class Bug:
    """One line, spoilt: ``old`` occurs once in the file and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file in the repository."""
        return PACKAGE / self.file

    def spoilt(self) -> str:
        """The file's text with the bug in it."""
        text = self.path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}, not once")
        return text.replace(self.old, self.new)
