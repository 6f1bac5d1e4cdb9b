"""Transforms steps: Step -> Step. Each file is one spec: its arguments, what it promises, its errors. Passes carry it
out."""
