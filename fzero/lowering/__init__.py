"""Lowers a step on a mesh to its base program, and chooses among the programs that passes make of it one that fits."""
