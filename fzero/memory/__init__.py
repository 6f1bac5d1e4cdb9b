"""Moves tensors between the memory tiers of a rank: device, host and disk.

Copies start, return at once, and are waited for later. `tier_copies.py` is what a running program
calls; it copies through `device_copies.py` and `disk.py`. This folder imports nothing from `ir/`:
the compiler decides where a value is stored and when its memory may be overwritten.

| file | what it does |
|---|---|
| `tier_copies.py` | runs the copies of a program between device, host and disk |
| `device_copies.py` | copies between device and host, on two CUDA streams; on a CPU nothing moves |
| `pinned_staging.py` | copies batches to a GPU through page-locked buffers, so that the host does not wait |
| `disk.py` | stores tensors on disk: allocates, reads and writes them in bounded memory |
| `scratch_files.py` | reads and writes the scratch files of a rank in background threads |
| `scratch_allocation.py` | allocates anonymous scratch files, which the kernel frees when their process ends |
| `simulated_copies.py` | simulates the asynchronous copies of a GPU on a CPU, so that tests notice missing waits |
"""
