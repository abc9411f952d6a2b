"""Configs: to JSON and back, everything that is wrong in one error, overrides as people type them, differences."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))
from tiny import Adam, Sgd, TinyConfig

from splitfg_lab.commands._targets import find_presets
from splitfg_lab.runs import ConfigError, differences, from_json, override, to_json


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
    ("preset", "setting", "problem"),
    [
        ("demo/split_fg", "steps=-5", "steps must be at least 1, got -5"),
        ("demo/split_fg", "batch=0", "batch must be at least 1, got 0"),
        ("demo/split_fg", "rho=0", "rho must be in (0, 1], got 0.0"),
        ("demo/split_fg", "method.K=0", "method: K must be at least 1, got 0"),
        ("demo/split_fg", "method.chunk=0", "method: chunk must be at least 1, got 0"),
        ("demo/split_fg", "optimizer.lr=-1", "optimizer: lr must be at least 0, got -1.0"),
        ("demo/split_fg", "optimizer.betas=0.9,1", "optimizer: betas must be in [0, 1), got (0.9, 1.0)"),
        ("tabular/adult-es", "method.sigma=0", "method: sigma must be positive, got 0.0"),
        ("tabular/adult-hopfield", "method.capacity=0", "method: capacity must be at least 1, got 0"),
        ("tabular/adult-predictive_coding", "method.stiffness=0", "method: stiffness must be positive, got 0.0"),
        ("tabular/adult-forward_forward", "method.label_scale=0", "method: label_scale must be positive, got 0.0"),
        ("tabular/adult-backprop", "network.width=0", "network: width must be at least 1, got 0"),
        ("tabular/adult-backprop", "clip=0", "clip must be positive, got 0.0"),
        ("tabular/adult-backprop", "folds=1", "folds must be at least 2, got 1"),
        ("tabular_future/adult-conditioned", "method.law.beta=1", "method.law: beta must be in [0, 1), got 1.0"),
        ("tabular_memory/adult", "train_fraction=1", "train_fraction must be in (0, 1), got 1.0"),
        ("toy_variance/ce-c50", "draws=1", "draws must be at least 2, got 1"),
        ("images/cifar10-backprop", "warmup=23437", "warmup must be in [0, 23437), the schedule's steps, got 23437"),
        ("images_memory/cifar10", "images=0", "images must be at least 1, got 0"),
        ("language/backprop", "steps=100", "warmup must be in [0, 100), the schedule's steps, got 100"),
        ("language/backprop", "model.heads=3", "model: width 256 is not a multiple of heads 3"),
        ("language/split_fg-muon", "optimizer.momentum=-1", "optimizer: momentum must be at least 0, got -1.0"),
        ("language_cost/eager", "blocks=0", "blocks must be at least 1, got 0"),
        ("language_energy/init", "batches=0", "batches must be at least 1, got 0"),
    ],
)
def test_numbers_that_no_run_could_use_are_refused_by_the_config(preset: str, setting: str, problem: str) -> None:
    ((_, found),) = find_presets([preset])
    with pytest.raises(ConfigError) as error:
        override(found.config, [setting])
    (said,) = error.value.problems
    assert said.startswith(problem)


def test_every_number_that_is_wrong_is_listed() -> None:
    ((_, preset),) = find_presets(["demo/split_fg"])
    with pytest.raises(ConfigError) as error:
        override(preset.config, ["steps=0", "batch=0"])
    assert error.value.problems == ("steps must be at least 1, got 0", "batch must be at least 1, got 0")


def test_references_without_a_schedule_need_no_room_for_a_warmup() -> None:
    for name in ("language/unigram", "language/knn_lm"):
        ((_, preset),) = find_presets([name])
        assert override(preset.config, ["steps=1", "warmup=100"]).steps == 1


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


def test_errors_of_overrides_name_the_field_and_its_class() -> None:
    with pytest.raises(ConfigError) as error:
        override(Rich(1, 1.0, optimizer=Sgd()), ["rho", "optimizer.beta=1"])
    assert "'rho': expected FIELD=VALUE, as in rho=..." in str(error.value)
    assert "optimizer.beta: unknown field of Sgd" in str(error.value)


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
