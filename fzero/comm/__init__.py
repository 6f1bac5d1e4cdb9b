"""Moves bytes: between ranks, and between memory and disk."""
