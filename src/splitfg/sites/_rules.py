"""Closed-form pullbacks of torch functions: from δ at an output to δ at the inputs, without a tape of autograd."""

from __future__ import annotations

# imported for the rules that they define
from splitfg.sites import _rules_indexed, _rules_moves, _rules_norms, _rules_pools, _rules_products  # noqa: F401
from splitfg.sites._rule_table import RULES, Rule
from splitfg.sites._rules_elementwise import pull_back_activation
from splitfg.sites._tape import ACTIVATIONS, Operation


def rule_for(operation: Operation) -> Rule | None:
    """Return the rule of a function or an activation module; ``None`` if there is none."""
    if operation.module is None:
        return RULES.get(operation.name)
    return pull_back_activation if type(operation.module) in ACTIVATIONS else None


def register_rule(name: str, rule: Rule) -> None:
    """Add the pullback of a torch function.

    Args:
        name: The function's own name, such as ``"fliplr"`` for :func:`torch.fliplr` and :meth:`torch.Tensor.fliplr`.
        rule: Yields ``(input, δ_input)`` pairs from an :class:`~splitfg.sites.Operation` and δ at its output, one
            for every input that depends on trained parameters.

    Example:
        >>> from splitfg.sites import register_rule
        >>> register_rule("neg", lambda operation, delta: [(operation.args[0], -delta)])
    """
    RULES[name] = rule
