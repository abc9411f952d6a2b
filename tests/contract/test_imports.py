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


def room(path: Path) -> str:
    """The package or module of the library that a file belongs to."""
    return path.relative_to(SOURCES / "splitfg").parts[0].removesuffix(".py")


def imported_first(path: Path) -> set[str]:
    """Rooms of the library that a file imports when it is imported itself."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    modules = [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module]
    found = [module.split(".")[1] for module in modules if module.startswith("splitfg.")]
    return {name for name in found if name != room(path)}


def test_packages_of_the_library_do_not_import_each_other_in_circles():
    """Otherwise some orders of importing them fail."""
    needs: dict[str, set[str]] = {}
    for path in FILES:
        if path.is_relative_to(SOURCES / "splitfg") and path.parent != SOURCES / "splitfg":
            needs.setdefault(room(path), set()).update(imported_first(path))
    left = dict(needs)
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"
