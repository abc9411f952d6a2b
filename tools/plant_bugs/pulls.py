"""Bugs in pulls: gradients predicted, then pulled back through single blocks."""

from tools.plant_bugs.bug import Bug

PULLS = "tests/oracle/test_pulls.py"

BUGS = (
    Bug(
        "a pull that stops one block early",
        "estimators/_pull_pass.py",
        "deltas = levels[: min(self._pulls, last)]",
        "deltas = levels[: max(1, min(self._pulls, last) - 1)]",
        (f"{PULLS}::TestAsManyPullsAsBlocks::test_are_backprop",),
    ),
    Bug(
        "writers learn from the prediction",
        "estimators/_pull_pass.py",
        "delta = levels[0 if self._own_block else -1]",
        "delta = levels[0]",
        (f"{PULLS}::test_one_pull_is_the_formula",),
    ),
    Bug(
        "own block learns from the sum",
        "estimators/_pull_pass.py",
        "delta = levels[0 if self._own_block else -1]",
        "delta = levels[-1] + 0 * levels[0] if not self._own_block else self._r",
        (f"{PULLS}::test_own_block_takes_the_prediction_for_the_writers_too",),
    ),
    Bug(
        "pulls not added to the stream",
        "estimators/_pull_pass.py",
        "below = [s + c for s, c in zip(levels[1:], shares, strict=True)] if self._path.residual else shares",
        "below = list(shares)",
        (f"{PULLS}::test_one_pull_is_the_formula",),
    ),
    Bug(
        "pooled prediction without its pixels",
        "estimators/_pull_pass.py",
        "return (found / x[0, 0].numel())",
        "return (found / 1)",
        (f"{PULLS}::test_pooled_maps_learn_the_gradient_summed_over_pixels",),
    ),
    Bug(
        "reverse passes inside blocks not counted",
        "estimators/_pull_pass.py",
        "self.reverse_passes += len(deltas) if to_input else 1",
        "self.reverse_passes += 0",
        ("tests/contract/test_parallel_pull.py::test_keeps_to_the_protocol",),
    ),
    Bug(
        "a block's graph kept until the end",
        "sites/_pulls.py",
        "found = _grads(y, wanted, deltas[-1], last=True)",
        "found = _grads(y, wanted, deltas[-1]); trunk.__dict__.setdefault('kept', []).append(y)",
        ("tests/contract/test_parallel_pull.py::test_no_more_is_saved_for_backward_than_one_block_needs",),
    ),
    Bug(
        "compiled blocks share their constants",
        "compiled/_pulls.py",
        "named = dict(zip(every, params, strict=True))",
        "named = {n: trunk.get_parameter(n).detach() for n in every}",
        ("tests/contract/test_parallel_pull.py::test_equal_blocks_share_compiled_code_and_none_of_their_values",),
    ),
)
