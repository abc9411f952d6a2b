"""The code blocks of the README and of the documentation run, in order, in one namespace a file."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if p.exists()]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """Each block with as many empty lines before it as make its line numbers the page's."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in BLOCK.finditer(text)]


@pytest.mark.skipif(not PAGES, reason="there is no README yet")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for code in blocks(page):
            exec(compile(code, str(page), "exec"), namespace)


def test_readme_has_code():
    page = ROOT / "README.md"
    if not page.exists():
        pytest.skip("there is no README yet")
    assert blocks(page)


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
