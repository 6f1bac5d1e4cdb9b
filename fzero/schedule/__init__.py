"""The order of lines."""
