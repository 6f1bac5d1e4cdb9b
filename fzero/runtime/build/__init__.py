"""Compiles the subgraphs of a program: each distinct one once, cached on disk and shared by ranks.

`build.py` is the entry point. A subgraph is looked up in the cache; if it is missing, one rank of
the host compiles it in a worker process, and the other ranks load the result.

| file | what it does |
|---|---|
| `build.py` | makes subgraphs executable, eagerly or compiled with Inductor |
| `calling_convention.py` | adapts a built subgraph to how the program calls it: results, or buffers to write |
| `inductor.py` | compiles subgraphs with Inductor: from the cache, in a worker, or by another rank |
| `warm_up.py` | runs subgraphs eagerly until their compiled versions are ready on all ranks |
| `shared_compilation.py` | divides compilation among the ranks of a host that see the same cache |
| `artifact_cache.py` | caches compiled subgraphs on disk, with digests |
| `tracebacks.py` | keeps the lines of generated code, so that tracebacks show them |

`cpu/` compiles for the CPU, in a separate process.
"""
