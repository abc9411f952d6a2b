"""The contract that every estimator keeps, as a check that you can run on your own."""

from splitfg.testing._contract import check_estimator, example_split

__all__ = ["check_estimator", "example_split"]
