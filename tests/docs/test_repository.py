"""Metadata, links and workflows of the repository agree with each other."""

import re
import runpy
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
problems = runpy.run_path(str(ROOT / "tools" / "check_release.py"))["problems"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GENERATED = (ROOT / "docs" / "_build", ROOT / "docs" / "results")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(p for p in sorted((ROOT / "docs").glob("**/*.md")) if not set(p.parents) & set(GENERATED)),
    ROOT / "docs" / "results" / "index.md",
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page):
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(page):
    wrong = []
    for target in LINK.findall(prose(page)):
        address = urlsplit(target)
        if address.scheme:
            ok = address.scheme == "https" and "." in address.netloc and " " not in target
        else:  # results pages are made when the documentation is built, one for every experiment
            # parts are included by a guide, and their links are relative to it
            path = (ROOT / "docs" / "guides" if page.parent.name == "_parts" else page.parent) / address.path
            sources = (f"results/{path.stem}.json", f"benchmarks/{path.stem}.json", f"docs/_ext/{path.stem}_page.py")
            recorded = any((ROOT / source).exists() for source in sources)
            ok = not address.path or path.exists() or (path.parent.name == "results" and recorded)
        wrong += [] if ok else [target]
    assert not wrong


def test_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    pictures = ("docs/_static/split.svg", "docs/_static/ladder.svg")
    for piece in (*pictures, "## Install", "@unpublished{", "Tian Qin", "Lehigh University"):
        assert piece in text


def test_pictures_are_what_their_script_draws():
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["PICTURES"]
    for name, draw in pictures.items():
        assert (ROOT / "docs" / "_static" / f"{name}.svg").read_text(encoding="utf-8") == draw(), name


def test_citation_names_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Qin", "Huang"]
    assert paper["title"] in (ROOT / "README.md").read_text(encoding="utf-8")
    assert citation["license"] == PROJECT["license"]
    assert "version" not in citation  # pyproject.toml alone has it


def test_version_is_in_one_place():
    version = re.compile(rf"""["'=]{re.escape(PROJECT["version"])}["']""")
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.py")]
    assert not [p for p in sources if version.search(p.read_text(encoding="utf-8"))]


def test_workflow_covers_supported_versions():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["versions"]["strategy"]["matrix"]
    declared = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert matrix["python"] == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"
    (torch,) = [d for d in PROJECT["dependencies"] if d.startswith("torch")]
    extra = {(row["os"], row["torch"]) for row in matrix["include"]}
    assert ("ubuntu-latest", torch.removeprefix("torch>=") + ".0") in extra
    assert ("macos-latest", "newest") in extra


def test_workflow_and_contributing_name_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    texts = [ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run", *(ROOT / ".github").rglob("*.yml"), ROOT / "README.md"]
    named = {name for path in texts for name in re.findall(r"\bmake ([a-z][a-z0-9-]*)", path.read_text("utf-8"))}
    assert named - {"sure", "up"} <= targets


CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n{}## [1.2.3] - 2026-01-31\n\n- A change.\n"


@pytest.mark.parametrize(
    ("tag", "version", "unreleased", "expected"),
    [
        ("v1.2.3", "1.2.3", "", 0),
        ("1.2.3", "1.2.3", "", 1),
        ("v1.2.4", "1.2.4", "", 1),
        ("v1.2.4", "1.2.3", "- Forgotten.\n\n", 2),
    ],
)
def test_release_check(tag, version, unreleased, expected):
    assert len(problems(tag, version, CHANGELOG.format(unreleased))) == expected
