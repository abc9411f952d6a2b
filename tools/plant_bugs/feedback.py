"""Bugs in feedback: rules of operators, learned maps, the residual path."""

from tools.plant_bugs.bug import Bug

RELAYED = "tests/oracle/test_learned_feedback.py::test_relayed_feedback_becomes_the_gradient"

BUGS = (
    Bug(
        "pullback of a norm without its mean",
        "sites/_pullback.py",
        "    if not _is_rms(module):",
        "    if _is_rms(module) and True:",
        ("tests/oracle/test_feedback.py::test_norms_are_pulled_back_as_autograd_does",),
    ),
    Bug(
        "adapters of an ensemble mixed up",
        "models/tabm.py",
        "adapted, scaled = a * self.r, delta * self.s",
        "adapted, scaled = a, delta * self.s",
        ("tests/contract/test_activity_fg.py::test_layers_of_a_table_know_their_gradients",),
    ),
    Bug(
        "mean Jacobian the wrong way round",
        "feedback/_mean_jacobian.py",
        "return r @ self._map(writer, r, features or r.shape[-1], r.shape[-1]).to(r.dtype).T",
        "return r @ self._map(writer, r, features or r.shape[-1], r.shape[-1]).to(r.dtype)",
        ("tests/oracle/test_feedback.py::TestMeanJacobian",),
    ),
    Bug(
        "ReLU at the top of the stream that lets everything through",
        "sites/_pullback.py",
        "return (u * (x > 0)).to(narrow), {}",
        "return u.to(narrow), {}",
        ("tests/oracle/test_feedback.py::test_norms_are_pulled_back_as_autograd_does",),
    ),
    Bug(
        "norms pulled back in a narrow dtype",
        "numerics.py",
        "return x.to(wide(x.dtype))",
        "return x",
        ("tests/oracle/test_feedback.py::test_narrow_norms_are_as_exact_as_their_dtype",),
    ),
    Bug(
        "a stream whose writes need not add up",
        "sites/_validate.py",
        "if found or not path.strict:",
        "if True:",
        ("tests/contract/test_direct_path.py::TestRefusals",),
    ),
    Bug(
        "maps that do not take off what they predict",
        "feedback/_mean_jacobian.py",
        "rest = response - explained",
        "rest = response",
        ("tests/oracle/test_feedback.py::TestMeanJacobian",),
    ),
    Bug(
        "maps that a single row can overturn",
        "feedback/_mean_jacobian.py",
        "shortened: Tensor = rest * (longest / length).clamp(max=1)",
        "shortened: Tensor = rest",
        ("tests/oracle/test_limited_maps.py",),
    ),
    Bug(
        "learned feedback through a transposed map",
        "feedback/_relay.py",
        "return (delta @ m[0]).sum_to_size(a.shape)",
        "return (delta @ m[0].mT).sum_to_size(a.shape)",
        (f"{RELAYED}[relu-difference]",),
    ),
    Bug(
        "learned feedback past the gate of an activation",
        "sites/_rules_elementwise.py",
        "return [(operation.input, delta * derivative(function, operation.input))]",
        "return [(operation.input, delta)]",
        (f"{RELAYED}[gelu-difference]",),
    ),
    Bug(
        "learned feedback with a stale map",
        "feedback/_route.py",
        "self._maps[name].add_(step)",
        "self._maps[name].add_(0 * step)",
        (f"{RELAYED}[relu-difference]",),
    ),
    Bug(
        "the bias of a layer in its response to noise",
        "feedback/_responses.py",
        "return e, z if operation.module.bias is None else z.sub_(operation.run(torch.zeros_like(e[:1])))",
        "return e, z",
        ("tests/oracle/test_feedback_memory.py::test_a_linear_layer_responds_to_noise_by_its_weight_alone",),
    ),
    Bug(
        "a sweep that frees nothing",
        "feedback/_sweep.py",
        "tape.release(place)",
        "pass",
        ("tests/oracle/test_feedback_memory.py::test_a_sweep_that_consumes_leaves_nothing_behind",),
    ),
    Bug(
        "a tape that drops what a rule reads",
        "sites/_lean_tape.py",
        "return (True, True) if rule is None else READS.get(rule, (True, True))",
        "return (True, True) if rule is None else READS.get(rule, (False, False))",
        ("tests/oracle/test_feedback_memory.py::test_rules_from_outside_may_read_all_values",),
    ),
    Bug(
        "a tape that drops both factors of a product",
        "sites/_lean_tape.py",
        "return sum(depends) == 1 and",
        "return sum(depends) >= 1 and",
        ("tests/oracle/test_feedback_memory.py::test_a_lean_step_is_the_step_on_the_full_tape[scaled]",),
    ),
    Bug(
        "a bias trained with a frozen weight, lost",
        "sites/_record_tape.py",
        "own = bias is None or (id(bias) in self._trained if trains else not self._depends(bias))",
        "own = True",
        ("tests/oracle/test_functional_layers.py::test_maps_learn_to_pass_frozen_attention",),
    ),
)
