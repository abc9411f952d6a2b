"""Fine-tuning of a GPT-2's adapters: memory and time of a step beside backprop's and MeZO's.

    PYTHONPATH=src python -m benchmarks.lora --device cuda --record benchmarks/lora.json
    PYTHONPATH=src python -m benchmarks.lora --device cpu --record benchmarks/lora_cpu.json

Needs transformers, not peft. Weights are random: neither memory nor time depends on them. The frozen base is in
bfloat16, the adapters in float32. Methods run in eager code, and on a GPU some also compiled and captured; on a CPU
with one row of 256 tokens. A second table compares attention as matmul and softmax, which passes with tangents use,
with the fused kernels.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import splitfg
from benchmarks.__main__ import record
from benchmarks._low_rank import gpt2
from benchmarks._measure import LiveBytes
from splitfg.estimators import Estimator

Step = Callable[[], object]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The model, the batch and the effort."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    rank: int = 8
    rows: int = 8
    length: int = 512
    lengths: tuple[int, ...] = (256, 512, 1024)
    repeats: int = 5


ON_A_CPU = Sizes(rows=1, length=256, lengths=(256, 512), repeats=3)
SMALL = Sizes(layers=2, width=32, heads=2, vocabulary=64, rank=2, rows=2, length=16, lengths=(8, 16), repeats=1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to test the command")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    sizes = SMALL if args.smoke else Sizes() if device.type == "cuda" else ON_A_CPU
    found = {"sizes": asdict(sizes), "step": steps(sizes, device), "attention": attention(sizes, device)}
    _print(found)
    if args.record is not None:
        record(args.record, device, found)
        print(f"written: {args.record}")


def steps(sizes: Sizes, device: torch.device) -> dict[str, dict[str, float]]:
    """Measure a training step of every method, each with a model of its own; an entry ``error`` says why one cannot."""
    return {name: _measured(make, sizes, device) for name, make in methods(device).items()}


def attention(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Measure forward passes of the trunk at several lengths, with fused kernels, as matmul and softmax, with tangents.

    The rows of a batch fall as its length grows, so that the number of tokens stays.
    """
    found = []
    tokens = sizes.rows * sizes.length
    for length in sizes.lengths:
        network, batch = _built(sizes, device, max(1, tokens // length), length)
        x, _ = network.unpack(batch)
        passes = {
            "fused": partial(_forward, network, x, fused=True),
            "math": partial(_forward, network, x, fused=False),
            "math, 1 tangent": partial(_pushed, network, x, 1),
            "math, 4 tangents": partial(_pushed, network, x, 4),
        }
        figures = {name: _figures(run, sizes.repeats, device) for name, run in passes.items()}
        found.append({"length": length, "rows": max(1, tokens // length), "passes": figures})
        del network, batch, x, passes
        _free(device)
    return found


def _measured(make: Callable[[splitfg.Split, Batch], Step], sizes: Sizes, device: torch.device) -> dict[str, Any]:
    network, batch = _built(sizes, device, sizes.rows, sizes.length)
    try:
        return _figures(make(network, batch), sizes.repeats, device)
    except splitfg.SplitError as error:
        return {"error": error.problems[0].splitlines()[0]}
    finally:
        del network, batch
        _free(device)


def _built(sizes: Sizes, device: torch.device, rows: int, length: int) -> tuple[splitfg.Split, Batch]:
    shape = {"n_layer": sizes.layers, "n_embd": sizes.width, "n_head": sizes.heads}
    names = {**shape, "vocab_size": sizes.vocabulary, "n_positions": max((*sizes.lengths, length))}
    model = gpt2(names, rank=sizes.rank, alpha=2 * sizes.rank, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, sizes.vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
    return splitfg.split(model), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _learner(estimator: Estimator, network: splitfg.Split, batch: Batch, *, captured: bool = False) -> Step:
    """Return the step of a learner, in eager code, or compiled and replayed by a CUDA graph."""
    optimizer = torch.optim.Adam(_trained(network.model), lr=1e-4)
    eager = splitfg.GradientLearner(network, estimator, optimizer)
    learner = splitfg.CapturedLearner(eager, horizon=1000) if captured else eager
    generator = torch.Generator(batch["input_ids"].device).manual_seed(0)
    return lambda: learner.step(batch, generator=generator)


def _own_loss(network: splitfg.Split, batch: Batch) -> Step:
    """Return a step of backprop as users of transformers write it."""
    model, optimizer = network.model, torch.optim.Adam(_trained(network.model), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def _mezo(network: splitfg.Split, batch: Batch, sigma: float = 1e-3) -> Step:
    """Return a step of MeZO (Malladi et al. 2023): two forward passes, and directions drawn again from a seed.

    Parameters move in place, by sigma v, -2 sigma v and sigma v, and then by -lr d v with the slope d of the loss.
    """
    model, rate, count = network.model, 1e-6, iter(range(10**9))
    trained = _trained(model)

    def move(seed: int, by: float | Tensor) -> None:
        generator = torch.Generator(trained[0].device).manual_seed(seed)
        for p in trained:
            p += by * torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype)

    @torch.no_grad()
    def step() -> None:
        seed = next(count)
        move(seed, sigma)
        after = model(**batch).loss
        move(seed, -2 * sigma)
        slope = (after - model(**batch).loss) / (2 * sigma)
        move(seed, sigma)
        move(seed, -rate * slope)

    return step


METHODS: dict[str, Callable[[splitfg.Split, Batch], Step]] = {
    "backprop": _own_loss,
    "backprop, closed head": partial(_learner, splitfg.Backprop(closed_head=True)),
    "checkpointed backprop, closed head": partial(_learner, splitfg.CheckpointedBackprop(closed_head=True)),
    "MeZO, two passes": _mezo,
    "SplitFG, K=1": partial(_learner, splitfg.SplitFG(K=1, lean=True)),
    "SplitFG, K=4": partial(_learner, splitfg.SplitFG(K=4, lean=True)),
    "SplitFG, K=4, chunk 1": partial(_learner, splitfg.SplitFG(K=4, engine=splitfg.ForwardMode(chunk=1), lean=True)),
    "ActivityFG, K=1": partial(_learner, splitfg.ActivityFG(K=1)),
    "LearnedFeedback": partial(_learner, splitfg.LearnedFeedback()),
}
"""Every method in eager code, by name: from a network and a batch to its training step."""
CAPTURED: dict[str, Callable[[splitfg.Split, Batch], Step]] = {
    f"{name}, captured": partial(METHODS[name], captured=True)
    for name in ("backprop, closed head", "SplitFG, K=1", "SplitFG, K=4")
}
"""Compiled methods that a CUDA graph replays; not for a CPU, where memory of compiled code is not counted."""


def methods(device: torch.device) -> dict[str, Callable[[splitfg.Split, Batch], Step]]:
    """Return the methods that a device can measure."""
    return {**METHODS, **CAPTURED} if device.type == "cuda" else METHODS


@torch.no_grad()
def _forward(network: splitfg.Split, x: Any, *, fused: bool) -> None:
    if fused:
        network.h(x)
        return
    with sdpa_kernel(SDPBackend.MATH):
        network.h(x)


@torch.no_grad()
def _pushed(network: splitfg.Split, x: Any, tangents: int) -> None:
    params = network.trunk_params()
    stacked = {n: torch.ones_like(p).expand(tangents, *p.shape) for n, p in params.items()}
    splitfg.ForwardMode()(network.trunk_function(x), params, stacked)


def _figures(step: Step, repeats: int, device: torch.device) -> dict[str, float]:
    """Median time of a step, the peak of memory within it, and what was allocated before, in MiB."""
    for _ in range(2):  # the first one validates the batch and compiles, the second one captures
        step()
    times = []
    for _ in range(repeats):
        _synchronise(device)
        began = time.perf_counter()
        step()
        _synchronise(device)
        times.append(1e3 * (time.perf_counter() - began))
    return {"ms": statistics.median(times), **_memory(step, device)}


def _memory(step: Step, device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        with LiveBytes() as live:
            step()
        return {"step_mib": live.peak / 2**20}
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    peak = torch.cuda.max_memory_allocated(device)
    return {"step_mib": (peak - held) / 2**20, "held_mib": held / 2**20, "peak_mib": peak / 2**20}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _print(found: dict[str, Any]) -> None:
    for name, figures in found["step"].items():
        print(f"{name:36} {_line(figures)}")
    for row in found["attention"]:
        for name, figures in row["passes"].items():
            print(f"{row['rows']:4} x {row['length']:5}  {name:22} {_line(figures)}")


def _line(figures: dict[str, Any]) -> str:
    return str(figures.get("error") or "  ".join(f"{key} {value:9.1f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
