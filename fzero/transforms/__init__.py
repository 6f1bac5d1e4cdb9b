"""Transforms: Step -> Step. Each file is one transform: what it promises, its rewrite, its errors."""
