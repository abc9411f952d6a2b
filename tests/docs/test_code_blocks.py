"""The code blocks of the README and of the documentation run, in order, in one namespace a file."""

import gc
import re
from pathlib import Path

import pytest
import torch

from splitfg.recipes import MethodRecipe, recipes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = (DOCS / "_build", DOCS / "results")
PAGES = [ROOT / "README.md", *(p for p in sorted(DOCS.glob("**/*.md")) if not set(p.parents) & set(GENERATED))]
WITH_CODE = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """Each block with as many empty lines before it as make its line numbers the page's."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = set(recipes(MethodRecipe))
    namespace = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for code in blocks(page):
            exec(compile(code, str(page), "exec"), namespace)
    namespace.clear()
    gc.collect()  # recipes register themselves as long as their class lives
    assert set(recipes(MethodRecipe)) == known


def test_pages_have_code():
    with_code = {str(page.relative_to(ROOT)) for page in WITH_CODE}
    assert {"README.md", "docs/tutorial.md", "docs/guides/plugins.md", "docs/theory.md"} <= with_code


def test_blocks_keep_their_line_numbers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "words\n\n```python\nfirst = 1\n```\n\n```console\n$ rm -rf /\n```\n\n```python\nassert first == 2\n```\n"
    )
    first, second = blocks(page)
    namespace = {}
    exec(compile(first, str(page), "exec"), namespace)
    with pytest.raises(AssertionError) as caught:
        exec(compile(second, str(page), "exec"), namespace)
    assert caught.traceback[-1].lineno + 1 == 12
