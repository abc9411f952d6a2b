"""Write the page on fine-tuning adapters, ``docs/results/adapters.md``, from the records of ``benchmarks.lora``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pages import replace_page, table
from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
RECORDS = ("lora.json", "lora_cpu.json")
PAGE = DOCS / "results" / "adapters.md"


def write_page(app: Sphinx) -> None:  # noqa: ARG001
    replace_page(PAGE, page(records()))


def records() -> list[dict[str, Any]]:
    """Read the records, one for every kind of machine."""
    folder = DOCS.parent / "benchmarks"
    return [json.loads((folder / name).read_text(encoding="utf-8")) for name in RECORDS]


def page(found: Iterable[dict[str, Any]]) -> str:
    """Return the Markdown page of some records."""
    blocks = [
        "---\nhide-toc: true\n---",
        "# Adapters of a GPT-2: time and memory of a step",
        "From `python -m benchmarks.lora --record`. Weights are random, the frozen base is in bfloat16, and the"
        " adapters are in float32. Code is eager where a row does not say otherwise: a GPU then waits for Python."
        " Memory is what a step needs beyond the parameters and the optimizer's state. A step of one method is not"
        " worth that of another: the tables compare costs.",
    ]
    for record in found:
        blocks += _sections(record)
    return "\n\n".join(blocks) + "\n"


def _sections(found: dict[str, Any]) -> list[str]:
    sizes = found["sizes"]
    return [
        f"## {found['device'].partition(': ')[2]}",
        f"{sizes['layers']} blocks of width {sizes['width']}, {sizes['vocabulary']:,} tokens, adapters of rank"
        f" {sizes['rank']}, {sizes['rows']} x {sizes['length']} tokens a step:",
        _steps(found["step"]),
        "Passes with tangents compute attention as matmul and softmax, because the fused kernels have no forward-mode"
        " rule. One forward pass of the trunk:",
        _attention(found["attention"]),
        f"Measured {found['date']}, {found['device']}, {found['threads']} threads, torch {found['torch']}, revision"
        f" {str(found['git'])[:10]}.",
    ]


def _steps(steps: dict[str, dict[str, Any]]) -> str:
    base = steps["backprop"]
    rows = [
        (name, f"{f['ms']:,.0f}", f"{f['ms'] / base['ms']:.2f}", f"{f['step_mib']:,.0f}")
        if "ms" in f
        else (name, f["error"], "", "")
        for name, f in steps.items()
    ]
    return table(("method", "step, ms", "over backprop's", "memory, MiB"), rows)


def _attention(cases: list[dict[str, Any]]) -> str:
    rows = [
        (f"{case['rows']} x {case['length']}", name, f"{f['ms']:,.0f}", f"{f['step_mib']:,.0f}")
        for case in cases
        for name, f in case["passes"].items()
    ]
    return table(("tokens", "attention", "ms", "memory, MiB"), rows, words=2)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
