"""Runs steps: compiled for a mesh, their programs executed on batches."""
