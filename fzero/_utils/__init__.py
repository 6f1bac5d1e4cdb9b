"""Provides small helpers that know nothing about training: argument checks, units, files and progress.

Any other folder may import these files; they import only `errors.py` and `tree.py`.
`bounded_json.py`, `path_permissions.py` and `procfs.py` do not import PyTorch, because the process that
supervises a rank (`elastic/supervisor.py`) must stay small.

| file | what it does |
|---|---|
| `arguments.py` | checks the arguments of a function, so that one error lists all problems in the same words |
| `units.py` | parses and prints amounts of memory, rates and durations, such as `"80GB"` |
| `deprecation.py` | keeps the old names of arguments, attributes and flags for one release, with a warning |
| `progress.py` | shows the progress of long operations, such as compiling or loading |
| `bounded_json.py` | reads JSON from other processes and users: limits size and depth, and checks types |
| `path_permissions.py` | finds out which other users could change a path, and whether a folder is writable |
| `procfs.py` | finds out whether a process is alive and on which host it runs, from Linux's `/proc` |
| `host_memory.py` | allocates host memory for state and copies, page-locked if the device is a GPU |
| `cpu_affinity.py` | finds the CPU cores of a rank, and binds a rank to the cores closest to its GPU |
| `out_of_memory_error.py` | defines `OutOfMemory`, which is also PyTorch's out-of-memory error |
"""
