"""Traces functions of tensors into graphs of ATen ops.

A function runs on fake tensors, and the recorder, below autograd, writes down every op of the
forward and the backward. A call of a block becomes one node; blocks with the same signature are
traced once, as a joint graph of forward and backward. Whatever else the function reads or does is
answered or rejected by `guards/`. This folder knows nothing about meshes and programs: it imports
nothing from `sharding/` or `ir/`.

| file | what it does |
|---|---|
| `graph_capture.py` | records a function as one functional graph; the entry point |
| `recorder.py` | runs a function on fake tensors and writes down every ATen op |
| `meta_cache.py` | caches the shapes, strides and dtypes of results, so that PyTorch infers them once |
| `functionalization.py` | rewrites a recorded graph without in-place ops |
| `cse.py` | merges ops that compute the same value (common subexpression elimination) |
| `block.py` | `fz.block`: marks a function as a unit of gathering, recomputation and compilation |
| `block_calls.py` | records each call of a block as one node, and its backward as another |
| `block_body.py` | runs the function of a block, and checks what enters and leaves it |
| `joint_graph.py` | traces a block once per signature, with forward and backward in one graph |
| `guards/` | answers or rejects what a function reads and does besides ops on its arguments |
| `subgraph.py` | extracts subgraphs, and computes the signatures by which equal ones are recognized |
| `storages.py` | tracks which values of a graph share memory |
| `flops.py` | counts the floating-point operations of a node |
| `device_decompositions.py` | replaces ops that a device lacks, or whose summation order it leaves undefined |
"""
