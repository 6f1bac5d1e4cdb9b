"""Traces functions of tensors into graphs of ATen operations. Knows nothing of programs."""
