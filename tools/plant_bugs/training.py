"""Bugs in training: rho, clipping, captured steps, line search."""

from tools.plant_bugs.bug import Bug

TRAINING = "tests/unit/test_training.py"
SEARCH = "tests/unit/test_line_search.py"

BUGS = (
    Bug(
        "rho forgotten in the update",
        "training/_groups.py",
        '"lr": rho * lr, "rho": rho',
        '"lr": lr, "rho": rho',
        (f"{TRAINING}::TestRho::test_scales_the_update_and_nothing_else",),
    ),
    Bug(
        "clipping that also stretches",
        "training/_grads.py",
        ".clamp(max=1.0)",
        "",
        (f"{TRAINING}::TestClip::test_is_torchs",),
    ),
    Bug(
        "preconditioner without its bound",
        "training/_lagged.py",
        'return inverse.clamp(group["a_min"], group["a_max"])',
        "return inverse",
        ("tests/unit/test_optimizers.py::TestLaggedRMS",),
    ),
    Bug(
        "traced passes that keep a buffer that was replaced",
        "compiled/_recorder.py",
        "dtypes, tuple(map(id, held)))",
        "dtypes)",
        ("tests/unit/test_captured.py::TestTheSameSteps::test_a_replaced_buffer_is_read",),
    ),
    Bug(
        "captured rates deaf to schedulers",
        "training/capture.py",
        "if not self._scheduled:",
        "if self._scheduled:",
        ("tests/unit/test_captured_rates.py",),
    ),
    Bug(
        "line search: the step does not wait",
        "learners/line_search.py",
        "params[n].copy_(before[n])",
        "pass",
        (f"{SEARCH}::test_finds_the_step_that_minimises_a_quadratic",),
    ),
    Bug(
        "line search: curvature of a shortened step",
        "learners/line_search.py",
        '"curvature": slopes.curvature / factor**2}',
        '"curvature": slopes.curvature / factor}',
        (f"{SEARCH}::test_a_schedules_factor_does_not_change_rho",),
    ),
    Bug(
        "line search: looking back, curvature of a shortened step",
        "learners/line_search.py",
        'curvature"], slopes.curvature / factor**2, share)',
        'curvature"], slopes.curvature / factor, share)',
        (f"{SEARCH}::test_a_schedules_factor_does_not_change_rho",),
    ),
    Bug(
        "line search: looking back, groups that do not know of each other",
        "learners/line_search.py",
        'best_scales(state["past descent"], state["past curvature"], least=-1, most=1)',
        '(state["past descent"] / state["past curvature"].diagonal()).clamp(-1, 1)',
        (f"{SEARCH}::TestLookingBack::test_groups_change_together",),
    ),
    Bug(
        "line search: no cap",
        "learners/slopes.py",
        "(rest / own[g]).clamp(least, most)",
        "(rest / own[g]).clamp(least, None)",
        (f"{SEARCH}::test_scales_the_trunk_alone_and_keeps_to_its_cap",),
    ),
    Bug(
        "line search: a step taken twice",
        "learners/line_search.py",
        "step.zero_()",
        "step.add_(0)",
        ("tests/unit/test_line_search_trouble.py",),
    ),
    Bug(
        "a compiled gradient that may be wrong by a third",
        "learners/_agreement.py",
        "allowed = max(tolerance * max(size, least), _ROUNDINGS * rounding[part, name])",
        "allowed = max(10 * tolerance * max(size, least), _ROUNDINGS * rounding[part, name])",
        ("tests/unit/test_agreement.py::test_five_percent_on_any_single_parameter_is_found",),
    ),
)
