"""Represents a whole step as a program, a list of lines: its ops, names and text, aliases and live ranges, and the
rules it is verified by."""
