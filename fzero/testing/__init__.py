"""Checks that a transformed step equals the plain one, and that a step is deterministic: for tests, and before a long
run."""

from fzero.testing.check import check_equivalent
from fzero.testing.deterministic import check_deterministic
from fzero.testing.report import Blame, Difference, FirstLine, Report
from fzero.testing.simulate import simulate

__all__ = ["Blame", "Difference", "FirstLine", "Report", "check_deterministic", "check_equivalent", "simulate"]
