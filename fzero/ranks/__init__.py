"""Lets the ranks of a run tell each other small values: none is run as code, and no rank waits for one that is gone.

| file | has |
|---|---|
| `notes.py` | the values: JSON through the store, signed where a stranger could write, or over the process group |
| `turns.py` | the order: collective actions are numbered, and ranks that do different things are an error on each |
| `agreement.py` | an act on every rank of a mesh, with the result or the error of each, through the store |
| `together.py` | the same for the parts of a checkpoint, through any exchange |
| `rendezvous.py` | the start: ranks meet under a name that no earlier start has used |
"""
