"""Configs: to JSON and back, everything that is wrong in one error, overrides as people type them, differences."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))
from tiny import Adam, Sgd, TinyConfig

from splitfg.runs import ConfigError, differences, from_json, override, to_json


@dataclass(frozen=True)
class Clip:
    norm: float = 1.0


ADAM = Adam()


@dataclass(frozen=True)
class Rich:
    """Every annotation a config may carry."""

    K: int
    rho: float
    name: str = "x"
    flag: bool = False
    act: Literal["relu", "gelu", 3] = "relu"
    clip: Clip | None = None
    optimizer: Adam | Sgd = ADAM
    widths: tuple[int, ...] = ()
    betas: tuple[float, int] = (0.5, 1)
    budget: int | float | str = 0
    extra: dict[str, float] | None = None


def problems_of(data: Any, cls: type = Rich) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        from_json(cls, data)
    for problem in error.value.problems:
        assert problem in str(error.value)
    return error.value.problems


finite = st.floats(allow_nan=False, allow_infinity=False)
configs = st.builds(
    Rich,
    K=st.integers(),
    rho=finite,
    name=st.text(),
    flag=st.booleans(),
    act=st.sampled_from(["relu", "gelu", 3]),
    clip=st.none() | st.builds(Clip, finite),
    optimizer=st.builds(Adam, finite, st.tuples(finite, finite)) | st.builds(Sgd, finite, finite),
    widths=st.lists(st.integers(), max_size=3).map(tuple),
    betas=st.tuples(finite, st.integers()),
    budget=st.integers() | finite | st.text(),
    extra=st.none() | st.dictionaries(st.text(), finite, max_size=2),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(configs)
def test_json_and_back_gives_the_same_config(config: Rich) -> None:
    through_text = json.loads(json.dumps(to_json(config)))
    assert from_json(Rich, through_text) == config


@given(st.dictionaries(st.sampled_from([f.name for f in fields(Rich)]) | st.text(max_size=4), json_values))
def test_any_json_gives_a_config_or_one_config_error(data: dict[str, Any]) -> None:
    try:
        config = from_json(Rich, data)
    except ConfigError:
        return
    assert data.keys() <= to_json(config).keys()


@given(json_values)
def test_anything_but_an_object_is_refused(data: Any) -> None:
    if not isinstance(data, dict):
        problems_of(data)


def test_nested_dataclasses_carry_their_class() -> None:
    assert to_json(Rich(1, 2.0, optimizer=Sgd()))["optimizer"] == {"type": "Sgd", "lr": 0.05, "momentum": 0.9}


def test_all_problems_are_listed_at_once() -> None:
    found = problems_of(
        {
            "K": "four",
            "Rho": 1,
            "flag": 1,
            "act": "tanh",
            "clip": {"nrm": 2},
            "optimizer": {"type": "Adm"},
            "widths": [1, "2", 3.5],
            "betas": [1],
        }
    )
    by_field = {problem.partition(":")[0]: problem for problem in found}
    assert set(by_field) == {
        "K",
        "Rho",
        "rho",
        "flag",
        "act",
        "clip.nrm",
        "optimizer.type",
        "widths[1]",
        "widths[2]",
        "betas",
    }
    assert by_field["K"] == 'K: expected int, got "four"'
    assert "missing, expected float" in by_field["rho"]
    assert "did you mean rho?" in by_field["Rho"] or "allowed: K, rho" in by_field["Rho"]
    assert "did you mean norm?" in by_field["clip.nrm"]
    assert "did you mean Adam?" in by_field["optimizer.type"]
    assert "allowed: Adam, Sgd" in by_field["optimizer.type"]
    assert "'relu' | 'gelu' | 3" in by_field["act"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("K", True), ("K", 1.0), ("rho", True), ("rho", "1"), ("rho", math.inf), ("rho", 10**400), ("act", True)],
)
def test_near_misses_of_a_type_are_refused(field: str, value: Any) -> None:
    assert [p.partition(":")[0] for p in problems_of({"K": 1, "rho": 1.0, field: value})] == [field]


def test_whole_numbers_are_welcome_in_float_fields() -> None:
    config = from_json(Rich, {"K": 1, "rho": 2})
    assert type(config.rho) is float
    assert config.rho == 2.0


def test_what_a_config_refuses_itself_is_listed_with_the_rest() -> None:
    assert problems_of({"steps": 0}, TinyConfig) == ("steps must be positive, got 0",)


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("K=8", "K", 8),
        ("K=10_000", "K", 10_000),
        ("rho = 1e-3", "rho", 1e-3),
        ("name=a=b", "name", "a=b"),
        ("flag=True", "flag", True),
        ("act=gelu", "act", "gelu"),
        ("act=3", "act", 3),
        ("widths=64, 32", "widths", (64, 32)),
        ("widths=[64, 32]", "widths", (64, 32)),
        ("widths=", "widths", ()),
        ("betas=0.5,2", "betas", (0.5, 2)),
        ("clip=none", "clip", None),
        ("clip=Clip", "clip", Clip()),
        ('clip={"norm": 3}', "clip", Clip(3.0)),
        ("optimizer=Sgd", "optimizer", Sgd()),
        ("budget=3", "budget", 3),
        ("budget=0.5", "budget", 0.5),
        ("budget=ten", "budget", "ten"),
        ('extra={"a": 1}', "extra", {"a": 1.0}),
    ],
)
def test_overrides_are_read_by_the_annotation(setting: str, field: str, value: Any) -> None:
    config = Rich(1, 1.0, clip=Clip(9.0), widths=(5,))
    assert override(config, [setting]) == replace(config, **{field: value})


def test_overrides_reach_into_nested_configs_in_order() -> None:
    config = override(Rich(1, 1.0), ["optimizer=Sgd", "optimizer.momentum=0.5", "K=2", "K=3"])
    assert config == Rich(3, 1.0, optimizer=Sgd(momentum=0.5))


def test_all_bad_overrides_are_listed_at_once() -> None:
    settings = ["roh=1", "K=1.5", "optimizer.mom=1", "nonsense", "optimizer=Adma", "K.deeper=1", "flag=maybe"]
    with pytest.raises(ConfigError) as error:
        override(Rich(1, 1.0), settings)
    text = str(error.value)
    assert len(error.value.problems) == len(settings)
    for part in ("did you mean rho?", "K: expected int, got '1.5'", "FIELD=VALUE", "did you mean Adam?", "no fields"):
        assert part in text


def test_differences_are_readable_and_complete() -> None:
    old, new = Rich(1, 1.0, widths=(1, 2)), Rich(2, 1.0, widths=(1, 3), optimizer=Sgd(lr=0.01))
    assert [str(d) for d in differences(old, new)] == [
        "K: 1 -> 2",
        'optimizer.type: "Adam" -> "Sgd"',
        "optimizer.betas: [0.9, 0.99] -> (absent)",
        "widths: [1, 2] -> [1, 3]",
        "optimizer.momentum: (absent) -> 0.9",
    ]
    assert differences(old, old) == ()


def test_an_int_in_a_float_field_is_no_difference() -> None:
    assert differences(Rich(1, 1), Rich(1, 1.0)) == ()


def test_annotations_that_cannot_be_checked_are_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Bad:
        path: Path

    with pytest.raises(TypeError, match="cannot hold Path"):
        from_json(Bad, {"path": "x"})
