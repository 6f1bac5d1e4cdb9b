"""Rewrites programs into programs, a pass a file. The one ordered list of them is pipeline.py."""
