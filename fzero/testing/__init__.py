"""Checks that a transformed step equals the plain one: for a user's tests, and before a long run."""

from fzero.testing.check import check_equivalent
from fzero.testing.report import Blame, Difference, FirstLine, Report
from fzero.testing.simulate import simulate

__all__ = ["Blame", "Difference", "FirstLine", "Report", "check_equivalent", "simulate"]
