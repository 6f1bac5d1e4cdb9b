"""Rewrites programs into programs: a pass a file, and what passes ask. The one ordered list of them is pipeline.py."""
