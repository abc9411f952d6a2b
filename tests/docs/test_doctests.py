"""Runs the examples in the library's docstrings, each by itself: an example imports everything it uses."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import splitfg

WITH_EXTRAS = ("sklearn",)  # packages that need more than torch
MADE_BY_OTHERS = {"Diagnosis", "HeadGradient", "Role", "Stats", "StepStats"}  # users read these, and make none
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules():
    names = [info.name for info in pkgutil.walk_packages(splitfg.__path__, "splitfg.")]
    return [name for name in names if name.split(".")[1] not in WITH_EXTRAS]


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in modules() for test in finder.find(importlib.import_module(name), name)]
    return [test for test in found if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_example(example):
    example.globs = {"__name__": "__main__"}
    printed = []
    with torch.random.fork_rng(devices=[]):
        failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=printed.append)
    assert not failed, "".join(printed)


def for_users():
    """Public classes and functions that users call: no protocols, abstract bases, errors or results."""
    public = vars(importlib.import_module("splitfg._api")).items()
    called = {n: v for n, v in public if inspect.isclass(v) or inspect.isfunction(v)}
    return sorted(n for n, v in called.items() if n not in MADE_BY_OTHERS and not is_interface(v))


def is_interface(value):
    protocol = getattr(value, "_is_protocol", False)
    return inspect.isabstract(value) or protocol or (inspect.isclass(value) and issubclass(value, Exception))


@pytest.mark.parametrize("name", for_users())
def test_what_users_call_has_an_example(name):
    assert ">>>" in inspect.getdoc(getattr(splitfg, name))
