"""The program: a whole step as a list of lines; its ops, names and text, what aliases and outlives what, and the rules
it is verified by."""
