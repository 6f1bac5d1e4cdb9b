"""Predicts how Inductor compiles a subgraph: its kernels, their order and their memory.

`temporaries.py` builds on the other files, and `plan/cost.py` prices the kernels of `fusion.py`.
The rules repeat those of PyTorch's Inductor, in C++ for CPUs and in Triton for GPUs; without a
compiler every op is a kernel.

| file | what it does |
|---|---|
| `nodes.py` | classifies the nodes of a recorded graph, and sorts them as Inductor does |
| `fusion.py` | predicts which ops are fused into one kernel, and what each kernel reads and writes |
| `reuse.py` | predicts the order of kernels, and which buffers reuse the memory of others |
| `temporaries.py` | predicts the peak memory inside a call, beyond its inputs and outputs |
"""
