"""Transforms: Step -> Step. Each file is one specification: its arguments, what it promises, its errors. Passes carry
it out."""
