"""The program: recorded, laid out as lines, verified, printed."""
