"""Compiled forms of a split's parts, for estimators that declare how they compile."""

from splitfg.compiled._errors import with_explained_errors
from splitfg.compiled._halves import CompiledHalves
from splitfg.compiled._parts import (
    CompiledEngine,
    CompiledTrunk,
    whole,
    with_compiled_head,
    with_compiled_tangents,
    with_compiled_trunk,
)
from splitfg.compiled._pulls import CompiledPuller
from splitfg.compiled._recorder import Compile, CompiledRecorder
from splitfg.compiled._responses import CompiledResponder, Responder
from splitfg.compiled._traces import PassTraces

__all__ = [
    "Compile",
    "CompiledEngine",
    "CompiledHalves",
    "CompiledPuller",
    "CompiledRecorder",
    "CompiledResponder",
    "CompiledTrunk",
    "PassTraces",
    "Responder",
    "whole",
    "with_compiled_head",
    "with_compiled_tangents",
    "with_compiled_trunk",
    "with_explained_errors",
]
