"""``python tools/check_release.py v0.1.0``: check that tag, version and changelog name the same release."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, version: str, changelog: str) -> list[str]:
    """List everything that stands between a tag and its release."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, pyproject.toml has version {version}: tag v{version}, or change the version")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`: move Unreleased there")
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)^## ", changelog, re.MULTILINE | re.DOTALL)
    if unreleased and unreleased[1].strip():
        found.append("CHANGELOG.md still has entries under [Unreleased]: move them into the release")
    return found


def main(tag: str) -> int:
    """Print the problems; 1 if there are any."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    found = problems(tag, version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    print("\n".join(found) or f"{tag} can be released")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
