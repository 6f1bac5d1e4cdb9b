"""Micro-benchmarks of fzero, run by asv: benchmarks/README.md."""
