"""Checkpoints without pickle: tensors in a safetensors file, everything else in a JSON file next to it.

``checkpoint.json`` holds the nested state, with references to tensors, and the name and SHA-256 of the tensor file.
Tensor files are named by their content and written first, the JSON file is replaced last, and the checkpoint before it
stays as ``checkpoint.previous.json``: whenever the process dies, one of the two is readable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from splitfg_lab.files import replacing, sync_folder
from splitfg_lab.runs._errors import CheckpointError, RunError
from splitfg_lab.runs._state import StateEncoder, decode_state
from splitfg_lab.runs.storage import read_json, write_atomic, write_json

SCHEMA: Final = 1
CURRENT: Final = "checkpoint.json"
PREVIOUS: Final = "checkpoint.previous.json"


@dataclass(frozen=True)
class Checkpoint:
    """A state read from disk; ``note`` explains why if it is not the newest one."""

    state: dict[str, Any]
    note: str = ""


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state of nested dicts, lists, tuples, numbers, strings, bools, ``None`` and tensors.

    Raises:
        CheckpointError: The state holds values of other types, or the disk is full; the last checkpoint is intact.
    """
    encoder = StateEncoder()
    encoded = encoder.encode(state)
    if encoder.problems:
        raise CheckpointError("checkpoints cannot hold:\n" + "\n".join(f"  {p}" for p in encoder.problems))
    try:
        digest = _write_tensors(folder, encoder.tensors)
        _keep_current_as_previous(folder)
        side = {"schema": SCHEMA, "tensors": _tensor_file(digest), "sha256": digest}
        write_json(folder / CURRENT, side | {"state_sha256": _state_digest(encoded), "state": encoded})
    except (OSError, SafetensorError) as error:
        what = f"cannot write a checkpoint in {folder}: {error}"
        raise CheckpointError(f"{what}. The last one, if any, is intact.") from error
    _remove_unnamed_tensors(folder)


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the newest readable checkpoint of a folder, tensors on the CPU; ``None`` if there is none.

    Raises:
        CheckpointError: There are checkpoints, but all of them are damaged.
    """
    damage: list[str] = []
    for name in (CURRENT, PREVIOUS):
        if not (folder / name).exists():
            continue
        try:
            return Checkpoint(_read(folder, name), "; ".join(damage))
        except RunError as error:
            damage.append(str(error))
    if damage:
        advice = "Delete the folder to start over."
        raise CheckpointError(f"no usable checkpoint in {folder}: {'; '.join(damage)}. {advice}")
    return None


def drop_previous(folder: Path) -> None:
    """Delete the checkpoint before the last one, which a finished run does not need."""
    (folder / PREVIOUS).unlink(missing_ok=True)
    _remove_unnamed_tensors(folder)


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> str:
    """Write the tensor file, named by its content, and return its SHA-256."""
    fresh = folder / "checkpoint.safetensors"
    with replacing(fresh) as temporary:
        save_file(tensors, temporary)
    digest = _file_digest(fresh)
    fresh.replace(folder / _tensor_file(digest))
    sync_folder(folder)
    return digest


def _keep_current_as_previous(folder: Path) -> None:
    """Copy the current checkpoint, unless it is damaged and only the previous one is readable."""
    current = folder / CURRENT
    if current.exists() and _is_intact(folder, CURRENT):
        write_atomic(folder / PREVIOUS, current.read_bytes())


def _is_intact(folder: Path, name: str) -> bool:
    try:
        side = _read_side(folder, name)
        return bool(_file_digest(_tensors_of(folder, side)) == side["sha256"])
    except (RunError, OSError):
        return False


def _remove_unnamed_tensors(folder: Path) -> None:
    named = {_named_tensors(folder / name) for name in (CURRENT, PREVIOUS)}
    for path in folder.glob("checkpoint*.safetensors"):
        if path.name not in named:
            path.unlink()


def _named_tensors(side: Path) -> str | None:
    try:
        return str(read_json(side)["tensors"])
    except (RunError, TypeError, KeyError):
        return None


def _read(folder: Path, name: str) -> dict[str, Any]:
    side = _read_side(folder, name)
    tensors = _read_tensors(_tensors_of(folder, side), side["sha256"])
    try:
        return dict(decode_state(side["state"], tensors))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / name} does not fit its tensors ({error})") from error


def _read_side(folder: Path, name: str) -> dict[str, Any]:
    """Read the JSON file and verify its checksum."""
    side = read_json(folder / name)
    expected = {"schema": int, "tensors": str, "sha256": str, "state_sha256": str, "state": dict}
    if not isinstance(side, dict) or any(not isinstance(side.get(k), t) for k, t in expected.items()):
        raise CheckpointError(f"{folder / name} is not a checkpoint written by splitfg")
    if side["schema"] != SCHEMA:
        raise CheckpointError(f"{folder / name} has schema {side['schema']}; this version reads {SCHEMA}")
    if _state_digest(side["state"]) != side["state_sha256"]:
        raise CheckpointError(f"{folder / name} is damaged")
    return side


def _tensors_of(folder: Path, side: dict[str, Any]) -> Path:
    """Return the tensor file; only the last part of the recorded path counts."""
    return folder / Path(side["tensors"]).name


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        if _file_digest(path) != digest:
            raise CheckpointError(f"{path} is truncated or damaged")
        # cloned, because optimizers update their state in place, and these would be views of the file
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _tensor_file(digest: str) -> str:
    return f"checkpoint-{digest[:12]}.safetensors"


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state_digest(encoded: Any) -> str:
    return hashlib.sha256(json.dumps(encoded).encode()).hexdigest()
