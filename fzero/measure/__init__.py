"""Measures rates of a machine, the time of each line of a step, and what binds it."""
