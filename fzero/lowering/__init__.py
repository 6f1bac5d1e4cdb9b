"""Lowering: a step on a mesh becomes its base program, and of the programs that passes can make of it one is chosen
that fits."""
