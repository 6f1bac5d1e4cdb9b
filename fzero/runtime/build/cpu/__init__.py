"""Compiles subgraphs for the CPU, in a process of its own: docs/internals/cpu-build.md explains why and how.

| file | what it does |
|---|---|
| `compile_worker.py` | compiles in a separate process, and reports when each subgraph is done |
| `graph_pickle.py` | pickles a graph as plain values for the worker process |
| `cpp_kernels.py` | reduces Inductor's code to a function of kernels, whose kernels are compiled together |
"""
