"""Builds callables from recorded graphs, compiled once, cached on disk and shared between ranks."""
