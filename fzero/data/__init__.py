"""Makes batches of tokens or arrays as a pure function of (seed, step, rank, size), and reads them ahead in the
background.

A training run has no data state to save: its step says what comes next, on any mesh.
"""

from fzero.data.arrays import ArrayDataset
from fzero.data.read_ahead import ReadAhead, read_ahead
from fzero.data.source import python_source
from fzero.data.tokens import TokenDataset, write_tokens

__all__ = ["TokenDataset", "ArrayDataset", "read_ahead", "ReadAhead", "python_source", "write_tokens"]
