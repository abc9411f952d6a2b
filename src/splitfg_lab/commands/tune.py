"""``tune`` and ``onnx show``: adapt a network of an ONNX file to your data, without a backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table as Grid

from splitfg_lab.commands.errors import EXIT_STOPPED, UsageError
from splitfg_lab.files import replacing

if TYPE_CHECKING:
    from splitfg.onnx import Adapter, Tuning

onnx_app = typer.Typer(name="onnx", help="Inspect ONNX files.", no_args_is_help=True)

Model = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The network; the command does not change it.")]


def tune(
    model: Model,
    data: Annotated[Path, typer.Option(help="A .parquet or .csv table, an .npz file, or a folder of images.")],
    out: Annotated[Path, typer.Option(help="The ONNX file to write.")],
    target: Annotated[str, typer.Option(help="Target column, or name of the target's array.")] = "",
    method: Annotated[
        str, typer.Option(help="learned_feedback, activity, activity_and_feedback, weights, or head.")
    ] = "learned_feedback",
    values: Annotated[bool, typer.Option("--values", help="The target is a number, not a class.")] = False,
    cut: Annotated[str | None, typer.Option(help="Tensor that the new head reads.")] = None,
    train: Annotated[list[str] | None, typer.Option(help="Weights to train, by name or glob; may be repeated.")] = None,
    adapters: Annotated[str, typer.Option(help="none, scale, or rank:R, for int8 weights.")] = "none",
    steps: Annotated[int, typer.Option(help="Largest number of steps.", min=1)] = 300,
    batch: Annotated[int, typer.Option(help="Rows per step.", min=1)] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate of the head.")] = 1e-3,
    rho: Annotated[float, typer.Option(help="Factor on the trunk's learning rate.")] = 1.0,
    K: Annotated[int, typer.Option("--K", help="Noises a step, for activity and weights.", min=1)] = 8,
    patience: Annotated[int, typer.Option(help="Evaluations without a better score.", min=1)] = 4,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations.", min=1)] = 25,
    held_out: Annotated[float, typer.Option(help="Share of rows for the report.", min=0.01, max=0.9)] = 0.2,
    size: Annotated[str, typer.Option(help="HEIGHTxWIDTH of images.")] = "",
    mean: Annotated[str, typer.Option(help="Subtracted from pixels in [0, 1]; one number, or one per channel.")] = "0",
    std: Annotated[str, typer.Option(help="Pixels are divided by it.")] = "1",
    threads: Annotated[int | None, typer.Option(help="Threads of the engine.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed.", min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted job.")] = False,
    report: Annotated[Path | None, typer.Option(help="HTML report; default: OUT with .html.")] = None,
) -> None:
    """Adapt a network that only runs forward to your data, and save it as a better file."""
    _require_onnx()
    if out.resolve() == model.resolve():
        raise UsageError(f"{out} is the network itself, which is never written to: choose another --out")
    if out.exists() and not out.is_file():
        raise UsageError(f"{out} is a folder or a device: give the name of a file with --out")
    page = report or out.with_suffix(".html")
    for folder in (out.parent, page.parent):
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: create it first")
    from splitfg.onnx import OnnxFile
    from splitfg_lab.tuning.data import Reading, read_examples
    from splitfg_lab.tuning.report import as_html, as_text
    from splitfg_lab.tuning.run import Job, set_threads, tune as run

    pixels, average, deviation, chosen = _all_parsed(
        lambda: _size(size),
        lambda: _numbers("--mean", mean),
        lambda: _numbers("--std", std),
        lambda: _adapters(adapters),
    )
    set_threads(threads)
    opened = OnnxFile(model)
    how = Reading(target, pixels, average, deviation)
    shapes = {name: opened.shapes.get(name, ()) for name in opened.inputs}
    settings = {
        "method": method, "cut": cut, "train": train or None, "adapters": chosen, "steps": steps,
        "batch_size": batch, "learning_rate": lr, "rho": rho, "K": K, "patience": patience,
        "evaluate_every": evaluate_every, "threads": threads,
    }  # fmt: skip
    job = Job(model, out, read_examples(data, shapes, how), settings, values, held_out, seed, resume)
    console = Console(highlight=False)
    try:
        with _Bar(console, steps) as bar:
            done = run(job, bar.show)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Resume with the same command and --resume; the state is in {job.folder}")
        raise typer.Exit(EXIT_STOPPED) from None
    typer.echo(as_text(done))
    with replacing(page) as temporary:
        temporary.write_text(as_html(done), encoding="utf-8")
    typer.echo(f"report: {page}")


@onnx_app.command()
def show(
    file: Model, cut: Annotated[str | None, typer.Option(help="Tensor to cut at instead of the default.")] = None
) -> None:
    """List where a network can be cut and what can be trained."""
    _require_onnx()
    from splitfg.onnx import describe

    found = describe(file, cut)
    console = Console(highlight=False, soft_wrap=True)
    for title, shapes in (("inputs", found.inputs), ("outputs", found.outputs), ("tensors to cut at", found.cuts)):
        grid = Grid(title=title, title_justify="left", box=None, show_header=False)
        for name, shape in shapes.items():
            grid.add_row(name, _shape(shape), "(default cut)" if name == found.cut and shapes is found.cuts else "")
        console.print(grid)
    grid = Grid("weight", "operator", "shape", "numbers", "type", "use", title="weights below the cut", box=None)
    for w in found.weights:
        grid.add_row(w.name, w.operator, _shape(w.shape), f"{w.count:,}", w.dtype, w.use)
    console.print(grid)
    trained = sum(w.count for w in found.weights if w.use == "trained")
    console.print(f"{trained:,} numbers are trained by default")


class _Bar:
    """A progress bar on terminals; a line per evaluation elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._seen = console, 0
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[detail]}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("tuning", total=steps, detail="")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, tuning: Tuning) -> None:
        """Show the state after a step."""
        step, scores = len(tuning.losses), tuning.scores
        detail = f"loss {tuning.losses[-1]:.3f}" + (f", validation {scores[-1]:.3f}" if scores else "")
        self._bar.update(self._task, completed=step, detail=detail)
        if not self._console.is_terminal and step % tuning.settings.evaluate_every == 0:
            self._console.print(f"step {step}/{tuning.settings.steps}: {detail}")


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing: pip install 'splitfg[onnx]'") from error


def _all_parsed(*parsers: Callable[[], Any]) -> list[Any]:
    """Return the values of all options.

    Raises:
        UsageError: Some of them are wrong; the error lists all of these.
    """
    values, problems = [], []
    for parse in parsers:
        try:
            values.append(parse())
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    return values


def _adapters(text: str) -> Adapter | None:
    from splitfg.onnx import LowRank, ScaleAndBias

    if text == "none":
        return None
    if text == "scale":
        return ScaleAndBias()
    kind, _, rank = text.partition(":")
    if kind == "rank" and rank.isdecimal() and int(rank) > 0:
        return LowRank(rank=int(rank))
    raise UsageError(f"--adapters {text!r}: expected none, scale, or rank:R such as rank:4")


def _size(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    height, cross, width = text.partition("x")
    if not cross or not all(side.isdecimal() and int(side) > 0 for side in (height, width)):
        raise UsageError(f"--size {text!r}: expected HEIGHTxWIDTH, such as 48x192")
    return int(height), int(width)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: expected one number, or one per channel, such as 0.5,0.5,0.5") from error
    if not all(math.isfinite(v) for v in found):
        raise UsageError(f"{option} {text!r}: must be finite")
    if option == "--std" and not all(v > 0 for v in found):
        raise UsageError(f"{option} {text!r}: must be positive")
    return found


def _shape(shape: Any) -> str:
    return "(" + ", ".join("free" if d is None else str(d) for d in shape) + ")"
