"""The library never imports the laboratory, and no package imports another one's private modules."""

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src"
FILES = sorted(SOURCES.glob("splitfg*/**/*.py"))


def imported(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] in ("splitfg", "splitfg_lab")]


def package(path: Path) -> str:
    return ".".join(path.parent.relative_to(SOURCES).parts)


@pytest.mark.parametrize("path", [p for p in FILES if p.is_relative_to(SOURCES / "splitfg")], ids=str)
def test_the_library_does_not_import_the_laboratory(path):
    assert not [name for name in imported(path) if name.startswith("splitfg_lab")]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_private_modules_stay_in_their_package(path):
    own = package(path)
    strangers = []
    for name in imported(path):
        parts = name.split(".")
        private = next((i for i, part in enumerate(parts) if part.startswith("_") and part != "__version__"), None)
        if private is not None and ".".join(parts[:private]) != own and not own.startswith(".".join(parts[:private])):
            strangers.append(name)
    assert not strangers
