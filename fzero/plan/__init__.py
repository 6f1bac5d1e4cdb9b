"""Predicts the cost of a program before any device is touched: seconds, bytes on every wire, memory at every line."""
