"""Checkpoints: exactly what was saved comes back, and whatever happens on the way, an older one is still there."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from splitfg_lab.runs import CheckpointError, load_checkpoint, save_checkpoint
from splitfg_lab.runs._state import StateEncoder, decode_state, non_finite


def equal(a: Any, b: Any) -> bool:
    """Same types, same structure, same bits."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or (a != a and b != b)


def bytes_of(t: Tensor) -> bytes:
    return bytes(t.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist())


def make_state(number: float) -> dict[str, Any]:
    return {"x": torch.full((3,), number), "n": number}


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
states = st.dictionaries(
    st.text() | st.integers(),
    st.recursive(
        scalars,
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=10,
    ),
)


@given(states)
def test_any_nested_state_survives_json(state: dict[Any, Any]) -> None:
    encoder = StateEncoder()
    text = json.dumps(encoder.encode(state), allow_nan=False)
    assert not encoder.problems
    assert equal(decode_state(json.loads(text), encoder.tensors), state)


def test_tensors_of_every_kind_survive_the_disk(tmp_path: Path) -> None:
    table = torch.randn(4, 3)
    generator = torch.Generator().manual_seed(3)
    state = {
        "tied": [table, table],
        "views": (table[1:], table.T),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "half": torch.randn(5).bfloat16(),
        "double": torch.tensor(math.pi, dtype=torch.float64),
        "odd": torch.tensor([math.nan, math.inf, -0.0]),
        "empty": torch.empty(0, 7),
        "whole": torch.arange(3),
        "bools": torch.tensor([True, False]),
        "generator": generator.get_state(),
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]},
        "$tensor": "a name that looks like a reference",
    }
    expected = torch.randn(2, generator=generator)
    save_checkpoint(tmp_path, state)
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded.note == ""
    assert equal(loaded.state, {**state, "parameter": state["parameter"].detach()})
    generator.set_state(loaded.state["generator"])
    assert torch.equal(torch.randn(2, generator=generator), expected)


def test_what_was_loaded_is_no_view_of_the_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_state(1.0))
    first = load_checkpoint(tmp_path)
    assert first is not None
    first.state["x"] += 1
    second = load_checkpoint(tmp_path)
    assert second is not None
    assert second.state["x"].tolist() == [1.0] * 3


def test_what_cannot_be_saved_is_listed_at_once(tmp_path: Path) -> None:
    state = {"a": {"b": object()}, "c": [torch.eye(2).to_sparse()], "d": {1.5: 0}, "e": {1, 2}}
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path, state)
    for part in ("a.b: builtins.object", "c[0]: a tensor that is not dense", "d: a key 1.5", "e: builtins.set"):
        assert part in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def test_dying_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die before every single rename, deletion and sync of the third save in turn."""
    moments = 0
    while True:
        folder = tmp_path / str(moments)
        folder.mkdir()
        save_checkpoint(folder, make_state(1.0))
        save_checkpoint(folder, make_state(2.0))
        died = False
        with monkeypatch.context() as patch:
            die_at(patch, moments)
            try:
                save_checkpoint(folder, make_state(3.0))
            except Killed:
                died = True
        loaded = load_checkpoint(folder)
        assert loaded is not None
        assert loaded.note == ""
        assert equal(loaded.state, make_state(loaded.state["n"]))
        assert loaded.state["n"] in ((2.0, 3.0) if died else (3.0,))
        if not died:
            break
        moments += 1
    assert moments >= 8


def die_at(patch: pytest.MonkeyPatch, moment: int) -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls > moment:
            raise Killed

    replace, unlink, fsync = Path.replace, Path.unlink, os.fsync
    patch.setattr(Path, "replace", lambda self, to: (count(), replace(self, to))[1])
    patch.setattr(Path, "unlink", lambda self, missing_ok=False: (count(), unlink(self, missing_ok))[1])
    patch.setattr(os, "fsync", lambda handle: (count(), fsync(handle))[1])


def newest_tensors(folder: Path) -> Path:
    return folder / json.loads((folder / "checkpoint.json").read_text())["tensors"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip_a_bit(path: Path) -> None:
    """Where only a checksum can tell: in the numbers of a tensor file, in a digit of a side file."""
    data = bytearray(path.read_bytes())
    place = len(data) - 2 if path.suffix == ".safetensors" else data.rindex(b"2.0")
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("part", ["tensors", "side file"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: Any, part: str) -> None:
    save_checkpoint(tmp_path, make_state(1.0))
    save_checkpoint(tmp_path, make_state(2.0))
    damage(newest_tensors(tmp_path) if part == "tensors" else tmp_path / "checkpoint.json")
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert equal(loaded.state, make_state(1.0))
    # a side file that is gone is indistinguishable from one that was never replaced
    assert bool(loaded.note) == (damage is not Path.unlink or part == "tensors")


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
@pytest.mark.parametrize("part", ["tensors", "side file"])
def test_a_damaged_checkpoint_never_takes_the_place_of_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, part: str
) -> None:
    save_checkpoint(tmp_path, make_state(1.0))
    save_checkpoint(tmp_path, make_state(2.0))
    damage(newest_tensors(tmp_path) if part == "tensors" else tmp_path / "checkpoint.json")
    for moment in range(20):
        with monkeypatch.context() as patch:
            die_at(patch, moment)
            try:
                save_checkpoint(tmp_path, make_state(3.0))
            except Killed:
                loaded = load_checkpoint(tmp_path)
                assert loaded is not None
                assert loaded.state["n"] in (1.0, 3.0)
            else:
                return
    raise AssertionError("it was never saved")


def test_two_damaged_checkpoints_are_one_clear_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_state(1.0))
    save_checkpoint(tmp_path, make_state(2.0))
    for path in tmp_path.glob("*.safetensors"):
        truncate(path)
    with pytest.raises(CheckpointError, match="no usable checkpoint") as error:
        load_checkpoint(tmp_path)
    assert "Delete the folder" in str(error.value)


def test_a_foreign_or_newer_side_file_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_state(1.0))
    side = json.loads((tmp_path / "checkpoint.json").read_text())
    for content in ({"hello": 1}, [], side | {"schema": 2}):
        (tmp_path / "checkpoint.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path)


def test_a_side_file_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    inside = tmp_path / "run"
    inside.mkdir()
    save_checkpoint(inside, make_state(1.0))
    tensors = newest_tensors(inside)
    side = json.loads((inside / "checkpoint.json").read_text())
    tensors.rename(tmp_path / tensors.name)
    (inside / "checkpoint.json").write_text(json.dumps(side | {"tensors": f"../{tensors.name}"}))
    with pytest.raises(CheckpointError):
        load_checkpoint(inside)


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make_state(1.0))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_checkpoint(tmp_path, make_state(2.0))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_old_tensor_files_are_cleared_away(tmp_path: Path) -> None:
    for number in range(5):
        save_checkpoint(tmp_path, make_state(float(number)))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_non_finite_tensors_are_named() -> None:
    state = {
        "a": {"w": torch.tensor([1.0, math.nan]), "ok": torch.ones(2)},
        "b": [torch.tensor(math.inf), torch.arange(3), torch.empty(0)],
    }
    assert non_finite(state) == {"a.w", "b[0]"}
