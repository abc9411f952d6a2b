"""Places inside a trunk: taps, recorded passes, layers that know their own gradient, and closed-form pullbacks."""

from splitfg.sites._activities import Activities, ActivityTrunk
from splitfg.sites._explained import activity_problems
from splitfg.sites._layers import LocalLayer, has_layer_gradients, layer_gradients, under
from splitfg.sites._path import ResidualPath, ResidualTrunk
from splitfg.sites._pullback import ClosedForm, has_pull_back, pull_back
from splitfg.sites._recorder import Calls, Recorder, Recording, TapPoints, record, record_run
from splitfg.sites._rules import Rule, register_rule, rule_for
from splitfg.sites._tape import Alter, Operation, Tape, TapedTrunk, first_samples, layer_operations, record_tape
from splitfg.sites._taps import shifted, tapped
from splitfg.sites._validate import validate_activities, validate_path

__all__ = [
    "Activities",
    "ActivityTrunk",
    "Alter",
    "Calls",
    "ClosedForm",
    "LocalLayer",
    "Operation",
    "Recorder",
    "Recording",
    "ResidualPath",
    "ResidualTrunk",
    "Rule",
    "TapPoints",
    "Tape",
    "TapedTrunk",
    "activity_problems",
    "first_samples",
    "has_layer_gradients",
    "has_pull_back",
    "layer_gradients",
    "layer_operations",
    "pull_back",
    "record",
    "record_run",
    "record_tape",
    "register_rule",
    "rule_for",
    "shifted",
    "tapped",
    "under",
    "validate_activities",
    "validate_path",
]
