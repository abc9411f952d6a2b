"""Write the page on several processes, ``docs/results/ranks.md``, from the records in ``benchmarks``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import replace_page, table
from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
RECORDS = {
    part: DOCS.parent / "benchmarks" / f"{part}.json" for part in ("ranks", "links", "rank_kills", "stages", "hosts")
}
PAGE = DOCS / "results" / "ranks.md"
NAMES = {
    "split_fg": "Split-FG, head averaged",
    "split_fg_local_heads": "Split-FG, local heads",
    "ddp": "Backprop, DDP",
    "ddp_trunk": "Backprop, DDP, trunk only",
}
_COLUMNS = ("step_ms", "cpu_ms", "group_bytes", "wire_bytes")
SHOWN = ("split_fg", "split_fg_local_heads", "ddp")


def write_page(app: Sphinx) -> None:  # noqa: ARG001
    found = {part: json.loads(path.read_text(encoding="utf-8")) for part, path in RECORDS.items() if path.exists()}
    replace_page(PAGE, page(found))


def page(found: dict[str, Any]) -> str:
    """Return the Markdown page, from the records by the names of their files; parts without one are left out."""
    blocks = [
        "---\nhide-toc: true\n---",
        "# Several processes: bytes, time and faults",
        "From `python -m benchmarks.ranks`, `rank_kills`, `stages` and `hosts`, each with `--record`. One thread per"
        " process, gloo. The files of these names in `benchmarks` have all numbers; every file is the record of one"
        " run.",
    ]
    parts = {"ranks": _ranks, "links": _links, "rank_kills": _kills, "stages": _stages, "hosts": _hosts}
    for name, part in parts.items():
        blocks += part(found[name]) if name in found else []
    return "\n\n".join(blocks) + "\n"


def _ranks(found: dict[str, Any]) -> list[str]:
    sizes = found["sizes"]["small8"]
    return [
        f"## GPT small8, K = {found['K']}",
        f"{sizes['trunk']:,} numbers in the trunk, {sizes['head']:,} in the head. Every process has 2 rows of 64"
        " tokens.",
        _scaling(found["scaling"]),
        _made(found["made"]),
        "Bytes are per process and step: as handed to the process group, and as counted by the loopback device of a"
        " network namespace, TCP headers included (- where the machine allowed no namespace).",
        "## Bandwidth, latency and workers, simulated",
        "small8, seconds per step; computation is the CPU time of one process, messages as above, nothing overlaps. The"
        " first number of a cell is for the best of two algorithms, as NCCL chooses among: an all-reduce of M bytes"
        " takes the shorter of a ring, 2 (N - 1) (8 M / N / bandwidth + latency), and recursive doubling, log2 N"
        " (8 M / bandwidth + latency). The second is for gloo: it has the ring alone and waits two latencies a round:"
        " with many workers far apart, rounds cost more than bytes. Local heads: without the exchange of heads,"
        " which sends one head every n steps.",
        *(block for method in SHOWN for block in (f"**{NAMES[method]}**", _simulated(found["simulated"], method))),
    ]


def _links(found: dict[str, Any]) -> list[str]:
    return [
        "## Limited bandwidth, measured",
        "A smaller GPT (4 layers, width 128, 1,000 tokens), two processes that share one medium, limited with `tc tbf`."
        " The model is the unlimited step plus the bytes on the wire at the limit.",
        _limited(found["limited"]),
        *_delayed(found["delayed"]),
        _made(found["made"]),
    ]


def _made(facts: dict[str, Any]) -> str:
    """Return a sentence on the machine of a table."""
    shared = (
        "other jobs shared the machine, so CPU times are steadier than step times"
        if facts["busy"]
        else "every process had a core of its own"
    )
    return (
        f"Measured {facts['date']}, {facts['device']}, {facts['cores']} cores, load {facts['load']:.1f} ({shared}),"
        f" torch {facts['torch']}, revision {str(facts['git'])[:10]}."
    )


def _scaling(cases: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            NAMES[c["method"]],
            c["ranks"],
            *("-" if c[kind] is None else f"{c[kind]:,.0f}" for kind in _COLUMNS),
        )
        for c in cases
    ]
    header = ("method", "processes", "step, ms", "CPU time, ms", "bytes to the group", "bytes on the wire")
    return table(header, rows)


def _limited(cases: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            NAMES[c["method"]],
            c["rate"] or "unlimited",
            f"{c['step_ms']:,.0f}",
            f"{c['model_ms']:,.0f}" if c["rate"] else "",
        )
        for c in cases
    ]
    return table(("method", "rate", "step, ms", "model, ms"), rows)


def _delayed(cases: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (
            c["ranks"],
            f"{c['bandwidth'] / 1e6:,.0f} Mbit/s",
            f"{1e3 * c['latency']:g} ms",
            f"{c['bytes']:,}",
            f"{c['ms']:,.0f}",
            f"{c['model_ms']:,.0f}",
        )
        for c in cases
    ]
    text = (
        "gloo's all-reduce between processes in networks of their own, each with a link to a switch that holds every"
        " packet back (`benchmarks/_switch.py`, TUN devices and real TCP). The model is gloo's ring, 2 (N - 1)"
        " (8 M / N / bandwidth + 2 latencies): a round waits for the receiver's answer. Latencies of 1 ms and below are"
        " no longer than the scheduling of the switch and of processes that share few cores; the model leaves it out."
    )
    header = ("processes", "bandwidth", "latency", "bytes", "measured, ms", "model, ms")
    return ["## Bandwidth and latency, measured", text, table(header, rows)]


def _simulated(cases: Sequence[dict[str, Any]], method: str) -> str:
    latencies = list(dict.fromkeys(c["latency"] for c in cases))
    cells = {
        (c["workers"], c["bandwidth"], c["latency"]): f"{c[method]:,.2f} / {c['gloo'][method]:,.2f}" for c in cases
    }
    places = dict.fromkeys((c["workers"], c["bandwidth"]) for c in cases)
    rows = [(*place, *(cells[*place, latency] for latency in latencies)) for place in places]
    return table(("workers", "bandwidth", *latencies), rows)


def _kills(found: dict[str, Any]) -> list[str]:
    ended = "the log and the parameters of an undisturbed run, bit for bit" if found["same_end"] else "ANOTHER RESULT"
    text = (
        f"{found['kills']} times a random one of {found['ranks']} processes of `{found['preset']}` was killed"
        f" ({found['of_which_hangs']} of these times it was stopped, and hung), under torchrun with restarts. The run"
        f" ended with {ended}. From a kill to the next step: at most {found['longest_pause_s']} s, in the median"
        f" {found['median_pause_s']} s, most of it the start of Python; after a hang at most"
        f" {found['longest_pause_after_hang_s']} s, of which {found['timeout_s']} s are the timeout and 30 s torchrun's"
        " patience with a process that does not end."
    )
    return ["## Kills", text]


def _hosts(found: dict[str, Any]) -> list[str]:
    ended = "the logs and parameters of undisturbed runs, bit for bit" if found["same_end"] else "ANOTHER RESULT"
    text = (
        f"From `python -m benchmarks.hosts --record`, {found['date']}: two hosts divide {found['runs']} runs of"
        " `demo/split_fg` with `--share`. They are namespaces of one machine with host names and process ids of their"
        f" own, one folder, file locks that do nothing, and clocks {found['clock_ahead_s'] / 3600:g} h apart. One host"
        f" is killed inside a run; the other takes the run over after {found['taken_over_s']:.0f} s (leases last"
        f" {found['ttl_s']:.0f} s), from step {found['resumed_from_step']:,} of {found['steps']:,}, and all end with"
        f" {ended}. This was not run on NFS."
    )
    return ["## A host that dies", text]


STAGE_NAMES = {
    "staged": "staged pull",
    "staged_recompute": "staged pull, blocks computed again",
    "gpipe": "backpropagation, GPipe",
    "1f1b": "backpropagation, 1F1B",
}


def _stages(found: dict[str, Any]) -> list[str]:
    blocks = [
        "## Stages",
        "From `python -m benchmarks.stages --record`: a chain of blocks divided between processes, one pull a step,"
        " beside `torch.distributed.pipelining`. First the longest way through a step, in units of a block's forward"
        " pass on one micro-batch, measured with blocks that sleep for a unit (two in reverse); the fastest of"
        f" {found['counted'][0]['steps']} steps, and the formula of `StagedPull`.",
        table(
            ("method", "stages", "micro-batches", "units", "formula"),
            [(*_stage_row(c), f"{c['units']:.1f}", c["formula"]) for c in found["counted"]],
        ),
        _made(found["made"]),
    ]
    if "timed" in found:
        rows = [(*_stage_row(c), f"{c['step_ms']:,.0f}") for c in found["timed"]]
        one = found["timed"][0]
        blocks += [
            f"Blocks that compute: {one['blocks']} a stage, width {one['width']}, {one['rows']} rows. One pull is"
            " biased, backpropagation is not: the table compares times, not what a step is worth.",
            table(("method", "stages", "micro-batches", "step, ms"), rows),
        ]
    return blocks


def _stage_row(case: dict[str, Any]) -> tuple[str, int, int]:
    return STAGE_NAMES[case["method"]], case["stages"], case["micro_batches"]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
