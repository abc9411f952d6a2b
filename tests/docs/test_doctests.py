"""Runs the examples in the library's docstrings, each by itself: an example imports everything it uses."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import splitfg

ROOMS = (
    "types",
    "errors",
    "theory",
    "diagnosis",
    "splitting",
    "heads",
    "tangents",
    "engines",
    "models",
    "training",
    "learners",
    "recipes",
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules():
    names = [info.name for info in pkgutil.walk_packages(splitfg.__path__, "splitfg.")]
    return [name for name in names if name.split(".")[1] in ROOMS]


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


@pytest.mark.parametrize(
    "name",
    sorted(name for name, value in vars(importlib.import_module("splitfg._api")).items() if inspect.isclass(value)),
)
def test_public_classes_have_a_docstring(name):
    assert inspect.getdoc(getattr(splitfg, name))
