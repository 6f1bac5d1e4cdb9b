"""Traces functions of tensors into graphs of ATen operations. Knows nothing of programs.

The files here make graphs; `reads/` has the answers and refusals for what a function reads and does besides.
"""
