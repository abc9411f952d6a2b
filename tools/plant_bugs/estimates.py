"""Bugs in estimators: scores, means over tangents, parts of a batch, predictions."""

from tools.plant_bugs.bug import Bug

GIVEN = "tests/oracle/test_estimator_formulas.py::TestGivenTangents"
BASIS = "tests/oracle/test_estimators.py::TestFullBasis"
PARTS = "tests/oracle/test_estimator_formulas.py::TestParts"

BUGS = (
    Bug(
        "sign of the score",
        "numerics.py",
        "return widened(moves.flatten(1)) @ widened(u.flatten())",
        "return -widened(moves.flatten(1)) @ widened(u.flatten())",
        (f"{GIVEN}::test_mean_of_scores_on_tangents",),
    ),
    Bug(
        "lost 1/K",
        "estimators/_combine.py",
        "mean = self._sum.div_(self._source.count)",
        "mean = self._sum.clone()",
        (f"{GIVEN}::test_mean_of_scores_on_tangents",),
    ),
    Bug(
        "1/K of a chunk",
        "estimators/_combine.py",
        "mean = self._sum.div_(self._source.count)",
        "mean = self._sum.div_(self._source.chunk)",
        ("tests/oracle/test_estimator_formulas.py::TestChunks::test_same_estimate",),
    ),
    Bug(
        "stale u",
        "estimators/_head_pass.py",
        "return self._us[part]",
        "return self._us[0]",
        (f"{PARTS}::test_micro_batches_are_the_whole",),
    ),
    Bug(
        "lean: gradients of the last part only",
        "estimators/_head_pass.py",
        "for h, target in self._waiting if self._split.head_params() else ():",
        "for h, target in self._waiting[-1:] if self._split.head_params() else ():",
        (f"{PARTS}::test_lean_is_the_same",),
    ),
    Bug(
        "precision of conditioned tangents dropped",
        "estimators/_combine.py",
        "return mean if precision is None else mean.mul_(precision)",
        "return mean",
        ("tests/statistical/test_estimates.py::test_conditioned_split_fg",),
    ),
    Bug(
        "prediction not added back",
        "estimators/split_fg.py",
        "return flat if guess is None else flat + guess, torch.cat(scores)",
        "return flat, torch.cat(scores)",
        (f"{GIVEN}::test_prediction_is_a_control_variate",),
    ),
    Bug(
        "prediction not taken off the scores",
        "estimators/split_fg.py",
        "d if guess is None else d - (tangents @ guess).to(d.dtype)",
        "d",
        (f"{BASIS}::test_prediction_is_added_back_exactly",),
    ),
    Bug(
        "each part divided by its own normaliser",
        "estimators/_head_pass.py",
        "part = self._split.head(h, target, self._normaliser)",
        "part = self._split.head(h, target)",
        (f"{PARTS}::test_micro_batches_are_the_whole",),
    ),
    Bug(
        "activities scored by the batch",
        "estimators/activity_fg.py",
        "d = (response * r).flatten(1 + rows).sum(-1) if r.ndim > rows else response * r",
        "d = (response * r).flatten(1).sum(-1).view(-1, *[1] * rows)",
        ("tests/statistical/test_estimates.py::test_activity_tangents",),
    ),
    Bug(
        "activities without 1/K",
        "estimators/activity_fg.py",
        "* e).sum(0) / self.K",
        "* e).sum(0)",
        ("tests/statistical/test_estimates.py::test_activity_tangents",),
    ),
    Bug(
        "settling that diverges with large weights",
        "estimators/predictive_coding.py",
        "if not self.power_iterations or len(layers) == 1:",
        "if True:",
        (
            "tests/oracle/test_learners_predictive_coding.py"
            "::test_power_iterations_keep_the_energy_falling_where_the_fixed_rate_diverges",
        ),
    ),
)
