"""Bugs in heads and splits: closed forms, tied tables, shared modules."""

from tools.plant_bugs.bug import Bug

BASIS = "tests/oracle/test_estimators.py::TestFullBasis"
HEADS = "tests/oracle/test_heads.py"

BUGS = (
    Bug(
        "head's bias gradient a mean",
        "heads/_linear.py",
        "delta.sum(dim=0)",
        "delta.mean(dim=0)",
        (f"{HEADS}::test_squared_error_head_is_autograd",),
    ),
    Bug(
        "factored head pulled back from the wrong input",
        "heads/_linear.py",
        "slice(0, weight.shape[0]), pulled, read[i])",
        "slice(0, weight.shape[0]), pulled, read[i].flip(0))",
        (f"{HEADS}::test_squared_error_head_is_autograd",),
    ),
    Bug(
        "smoothing not divided by the classes",
        "heads/_cross_entropy.py",
        "weights * (self.label_smoothing / width)",
        "weights * self.label_smoothing",
        (f"{HEADS}::test_cross_entropy_head_is_autograd",),
    ),
    Bug(
        "softmax over the last block of columns alone",
        "heads/_cross_entropy.py",
        "total if statistics is None else total + statistics[1] * (statistics[0] - peak).exp()",
        "total",
        (f"{HEADS}::test_cross_entropy_head_is_autograd",),
    ),
    Bug(
        "label counted from the block's own first column",
        "heads/_cross_entropy.py",
        "column = labels.label - first",
        "column = labels.label",
        (f"{HEADS}::test_cross_entropy_head_is_autograd",),
    ),
    Bug(
        "tied table left out under INCLUDE",
        "splitting/_parameters.py",
        "[Role.TIED] if self.tied is Tied.INCLUDE else []",
        "[]",
        (f"{BASIS}::test_tied_table",),
    ),
    Bug(
        "tied table's lookup differentiated under EXCLUDE",
        "splitting/_split.py",
        "for name, p in params.items() if name not in excluded",
        "for name, p in params.items()",
        (f"{BASIS}::test_tied_table",),
    ),
    Bug(
        "lookup of a tied table trained against its policy",
        "splitting/_parameters.py",
        "return {name: g for name, g in found.items() if name in wanted}",
        "return found",
        ("tests/oracle/test_feedback.py::test_a_tied_table_is_looked_up_untrained_under_exclude",),
    ),
    Bug(
        "shared modules called as if they were single",
        "calling/_call.py",
        "if not places:",
        "if places is not None:",
        ("tests/oracle/test_shared_modules.py::test_in_compiled_code",),
    ),
    Bug(
        "validated at zeros",
        "splitting/_passes.py",
        "alpha=_initial_size(p))",
        "alpha=0)",
        (
            "tests/contract/test_zero_layers.py",
            "tests/oracle/test_split.py::TestLastLinear::test_zeros_do_not_hide_what_follows",
        ),
    ),
)
