"""Predicts the inside of a compiled function: kernels, their order and its memory, as torch's Inductor makes them."""
