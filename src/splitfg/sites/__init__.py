"""Places inside a trunk: taps, recorded passes, layers that know their own gradient, and closed-form pullbacks."""

from splitfg.sites._activities import Activities, ActivityTrunk
from splitfg.sites._attention import (
    AttentionLayer,
    attention_above_blocks,
    attention_above_writers,
    attention_layers,
)
from splitfg.sites._block_path import BlockPath, BlockTrunk, PathBlock, find_blocks
from splitfg.sites._blocks import (
    BlockInput,
    Further,
    block_inputs,
    block_params,
    block_points,
    block_states,
    entries,
    pulled_names,
    run_block,
    top_shape,
)
from splitfg.sites._explained import activity_problems
from splitfg.sites._layers import (
    LocalLayer,
    added_gradient,
    convolution_geometry,
    has_layer_gradients,
    is_linear,
    layer_gradients,
    under,
)
from splitfg.sites._lean_tape import record_lean_tape
from splitfg.sites._lookups import TableRows, looks_up_few, lookup_gradient
from splitfg.sites._nested import leaves
from splitfg.sites._path import ResidualPath, ResidualTrunk
from splitfg.sites._pullback import ClosedForm, has_pull_back, pull_back
from splitfg.sites._pulls import Pulled, Puller, pull_block, pull_with
from splitfg.sites._record_tape import record_tape
from splitfg.sites._recorder import Calls, Recorder, Recording, TapPoints, record, record_run
from splitfg.sites._rule_table import Rule
from splitfg.sites._rules import register_rule, rule_for
from splitfg.sites._skips import SkipBlock, skip_back, skip_problems
from splitfg.sites._stream_values import stream_after_writers
from splitfg.sites._tape import Alter, Operation, Tape, TapedTrunk, layer_operations
from splitfg.sites._tape_parts import first_samples, hollow
from splitfg.sites._taps import Arguments, each_row, shifted, tapped
from splitfg.sites._validate import validate_activities, validate_path
from splitfg.sites._validate_blocks import validate_blocks

__all__ = [
    "Activities",
    "ActivityTrunk",
    "Alter",
    "Arguments",
    "AttentionLayer",
    "BlockInput",
    "BlockPath",
    "BlockTrunk",
    "Calls",
    "ClosedForm",
    "Further",
    "LocalLayer",
    "Operation",
    "PathBlock",
    "Pulled",
    "Puller",
    "Recorder",
    "Recording",
    "ResidualPath",
    "ResidualTrunk",
    "Rule",
    "SkipBlock",
    "TableRows",
    "TapPoints",
    "Tape",
    "TapedTrunk",
    "activity_problems",
    "added_gradient",
    "attention_above_blocks",
    "attention_above_writers",
    "attention_layers",
    "block_inputs",
    "block_params",
    "block_points",
    "block_states",
    "convolution_geometry",
    "each_row",
    "entries",
    "find_blocks",
    "first_samples",
    "has_layer_gradients",
    "has_pull_back",
    "hollow",
    "is_linear",
    "layer_gradients",
    "layer_operations",
    "leaves",
    "looks_up_few",
    "lookup_gradient",
    "pull_back",
    "pull_block",
    "pull_with",
    "pulled_names",
    "record",
    "record_lean_tape",
    "record_run",
    "record_tape",
    "register_rule",
    "rule_for",
    "run_block",
    "shifted",
    "skip_back",
    "skip_problems",
    "stream_after_writers",
    "tapped",
    "top_shape",
    "under",
    "validate_activities",
    "validate_blocks",
    "validate_path",
]
