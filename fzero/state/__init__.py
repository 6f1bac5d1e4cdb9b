"""Manages the state of a run: its leaves initialised, stored on their tiers, assembled, moved and gathered."""
