"""Networks cut at h: splits, cutting a model, black-box trunks, and validation of splits and batches."""

from splitfg.splitting._batches import Batch, parts
from splitfg.splitting._black_box import BlackBoxTrunk, ForwardOnlyTrunk
from splitfg.splitting._from_model import split
from splitfg.splitting._graph import custom_functions
from splitfg.splitting._interface import Interface, arguments
from splitfg.splitting._kernels import tangent_kernels
from splitfg.splitting._lookup_checks import lookup_problems
from splitfg.splitting._norms import TangentNorms, has_reduced_precision
from splitfg.splitting._operators import explained
from splitfg.splitting._replace import names_of, original, replaced, submodule
from splitfg.splitting._reverse_errors import explained_reverse, require_reverse_mode
from splitfg.splitting._roles import Role, Tied
from splitfg.splitting._split import HEAD_TANGENTS, TANGENTS, Split, require_split
from splitfg.splitting._tangent_checks import measured_slope, tangent_problems

__all__ = [
    "HEAD_TANGENTS",
    "TANGENTS",
    "Batch",
    "BlackBoxTrunk",
    "ForwardOnlyTrunk",
    "Interface",
    "Role",
    "Split",
    "TangentNorms",
    "Tied",
    "arguments",
    "custom_functions",
    "explained",
    "explained_reverse",
    "has_reduced_precision",
    "lookup_problems",
    "measured_slope",
    "names_of",
    "original",
    "parts",
    "replaced",
    "require_reverse_mode",
    "require_split",
    "split",
    "submodule",
    "tangent_kernels",
    "tangent_problems",
]
