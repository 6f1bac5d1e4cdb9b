"""Passes: each rewrites a program into a program. The one ordered list of them is pipeline.py."""
