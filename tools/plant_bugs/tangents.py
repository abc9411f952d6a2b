"""Bugs in tangents and engines: draws, chunks, differences."""

from tools.plant_bugs.bug import Bug

GIVEN = "tests/oracle/test_estimator_formulas.py::TestGivenTangents"
BASIS = "tests/oracle/test_estimators.py::TestFullBasis"
CONTRACT = "tests/contract/test_estimator_contract.py"
MEMORY = "tests/contract/test_no_backward.py::TestMemory"
LAWS = "tests/statistical/test_tangent_laws.py"

BUGS = (
    Bug(
        "tangents copied on their way",
        "engines/_forward_mode.py",
        "return forward_jvps(f, params, {name: _with_own_storage(v) for name, v in tangents.items()})",
        "return forward_jvps(f, params, dict(tangents))",
        (f"{MEMORY}::test_tangents_and_sum_are_the_only_vectors_as_long_as_the_trunk",),
    ),
    Bug(
        "tangent reused across k",
        "tangents/_laws.py",
        "            row.normal_(generator=generator)\n        return rows\n",
        "            row.normal_(generator=generator)\n        return rows[:1].repeat(count, 1)\n",
        (f"{CONTRACT}::test_tangents_of_one_estimate_differ",),
    ),
    Bug(
        "tangents from the global generator",
        "tangents/_laws.py",
        "row.normal_(generator=generator)",
        "row.normal_()",
        (f"{CONTRACT}::test_same_generator_same_estimate",),
    ),
    Bug(
        "chunk drawn again from the wrong state",
        "tangents/_source.py",
        "self._generator, self._states[index])",
        "self._generator, self._states[0])",
        (f"{GIVEN}::test_projection_is_least_squares",),
    ),
    Bug(
        "all tangents at once whatever the chunk",
        "tangents/_source.py",
        "self.chunk = min(chunk or count, count)",
        "self.chunk = count",
        (f"{MEMORY}::test_one_tangent_at_a_time_is_flat_in_k",),
    ),
    Bug(
        "orthogonal tangents of length one",
        "tangents/_laws.py",
        "frame * float(layout.total**0.5)",
        "frame",
        (f"{BASIS}::test_split_fg_is_the_gradient[plain]",),
    ),
    Bug(
        "Rademacher tangents of zeros and ones",
        "tangents/_laws.py",
        "return rows.mul_(2).sub_(1)",
        "return rows",
        (f"{LAWS}::TestMoments::test_rademacher_is_signs",),
    ),
    Bug(
        "central difference over half its width",
        "engines/_finite_difference.py",
        "/ (2 * e)",
        "/ e",
        ("tests/oracle/test_engines.py::test_differences_never_differentiate",),
    ),
    Bug(
        "parameters moved in place",
        "engines/_finite_difference.py",
        "name: p + step * tangent[name]",
        "name: p.add_(step * tangent[name])",
        (f"{CONTRACT}::test_is_pure",),
    ),
    Bug(
        "validated in inference mode",
        "splitting/_split.py",
        "with outside_inference_mode(), held, away_from_zero(self.model):",
        "with held, away_from_zero(self.model):",
        ("tests/contract/test_unusual_models.py::test_the_first_batch_is_validated_under_inference_mode",),
    ),
    Bug(
        "other arguments not observed",
        "splitting/_split.py",
        "known, mode = self._passes.observed.traits, (self.training_flags(), form_of(x))",
        "known, mode = self._passes.observed.traits, (self.training_flags(), None)",
        ("tests/contract/test_unusual_models.py::test_other_arguments_may_draw_random_numbers",),
    ),
    Bug(
        "buffers observed one by one",
        "calling/_effects.py",
        "kept = own if updates_statistics(module) else {",
        "kept = {",
        ("tests/oracle/test_forward_state.py::TestState::test_statistics_that_the_same_batch_leaves_as_they_were",),
    ),
)
