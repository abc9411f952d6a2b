"""The environment of a measurement: versions, revision, device, memory. Imports torch only where needed.

Git supplies the revision if the package runs from a checkout. Elsewhere, as in a copy on a machine without git, set the
environment variable ``SPLITFG_REVISION`` to the commit, followed by ``-dirty`` if files differ from it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from splitfg_lab.runs._errors import RunError

if TYPE_CHECKING:
    import torch

VARIABLE = "SPLITFG_REVISION"
SIDE_BY_SIDE = "SPLITFG_SIDE_BY_SIDE"
_COMMIT = re.compile(r"(?P<commit>[0-9a-f]{7,64})(?P<dirty>-dirty)?")
_PACKAGES = ("splitfg", "torch", "numpy", "safetensors", "pandas", "pyarrow", "scikit-learn", "tiktoken", "onnxruntime")
# The size of cuBLAS's work spaces is part of the peak memory.
_SETTINGS = ("CUBLAS_WORKSPACE_CONFIG",)


def versions() -> dict[str, str]:
    """Return what a result can depend on beside its config: versions, and settings from the environment."""
    found = {"python": platform.python_version()}
    found |= {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Revision:
    """The git revision of the source; ``dirty`` if tracked files differ from it."""

    commit: str
    dirty: bool


def source_revision() -> Revision | None:
    """Return the revision of this package, from git or else from ``SPLITFG_REVISION``; ``None`` if neither has it.

    Raises:
        RunError: Git has no revision and ``SPLITFG_REVISION`` is not a commit.
    """
    return _git_revision() or _stated_revision(os.environ.get(VARIABLE, ""))


def _git_revision() -> Revision | None:
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else Revision(commit, dirty=bool(changes))


def _stated_revision(text: str) -> Revision | None:
    if not text:
        return None
    found = _COMMIT.fullmatch(text)
    if found is None:
        raise RunError(
            f"{VARIABLE} is {text!r}, which is not a commit: set it to the output of `git rev-parse HEAD`, followed by"
            " -dirty if files differ from it, or unset it"
        )
    return Revision(found["commit"], dirty=found["dirty"] is not None)


def side_by_side() -> int | None:
    """Return how many runs share this machine, from ``SPLITFG_SIDE_BY_SIDE``; ``None`` if it is not set.

    ``splitfg run`` sets the variable for its workers. Set it yourself if you start runs in another way.

    Raises:
        RunError: ``SPLITFG_SIDE_BY_SIDE`` is not a positive whole number.
    """
    text = os.environ.get(SIDE_BY_SIDE, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise RunError(f"{SIDE_BY_SIDE} is {text!r}: set it to the number of runs that share this machine, or unset it")
    return int(text)


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is the GPU if there is one.

    Raises:
        RunError: torch does not know the device, or the machine does not have it.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RunError(f"{name!r} is not a device; use auto, cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"--device {name}: torch sees no GPU here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RunError(f"--device {name}: torch sees {count} GPU{'s' * (count != 1)} here, cuda:0 to cuda:{count - 1}")
    return device


def describe_device(device: torch.device) -> str:
    """Return kind and name of a device, as ``cuda: NVIDIA H200`` or ``cpu: AMD EPYC 9654``."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return f"{device.type}: {name}" if name else device.type


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use this many CPU threads within the context; ``None`` changes nothing."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PeakMemory:
    """Peak memory of a run.

    On a GPU this is the memory that torch allocated since the run began. On a CPU it is the resident set of the whole
    process, Python and torch included: compare runs with it, do not count tensors with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind = "GPU memory allocated" if device.type == "cuda" else "resident set of the process"
        if device.type == "cuda":
            import torch

            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(device)

    def mib(self) -> float:
        """Return the peak so far, in MiB."""
        if self._device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self._device) / 2**20
        return _resident_peak_mib()


def _resident_peak_mib() -> float:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
