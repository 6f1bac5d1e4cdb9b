"""Propagates shardings through recorded graphs: what each rank computes, and with which collectives.

There are two kinds of shards. *Flat* shards (ZeRO, the sharded optimizer) are contiguous pieces of
a flattened tensor; `flat_propagation.py` handles them. Shards *along a dim* (tensor and sequence
parallelism) are handled by `dim_propagation.py`, which chooses for each op, among its strategies,
the one whose conversions send the fewest bytes. `expert_propagation.py` handles the experts of
expert parallelism. The result is a graph with markers for collectives, which a pass turns into ops
of a program. This folder knows nothing about programs: it imports nothing from `ir/`.

| file | what it does |
|---|---|
| `placements.py` | what each rank along a mesh axis holds of a value |
| `layout.py` | how a tensor is stored: the axes that shard it, its padding, memory tier and dtype |
| `shard_regions.py` | says which elements of a tensor a rank holds, for any combination of shardings |
| `flat_propagation.py` | propagates flat shards through an optimizer's update, its init, or an init function |
| `update_scalars.py` | distinguishes parameter arithmetic from scalars in a recorded update |
| `dim_propagation.py` | propagates shards along a dim through a graph, for one mesh axis |
| `op_strategies.py` | how to compute pointwise ops, reductions and matrix products on shards |
| `view_strategies.py` | how to view, split, join and rearrange shards |
| `layer_strategies.py` | how to compute attention, norms, lookups, convolutions and random draws on shards |
| `token_index_strategies.py` | how to assign shards of the tokens to experts, and multiply shards of their rows |
| `decompositions.py` | replaces ops that read all of a sharded dim, such as softmax, by ops that reduce it |
| `expert_propagation.py` | makes ranks exchange tokens, so that each multiplies only by its own experts |
| `graph_writer.py` | writes ops on shards, layout conversions and collective markers into a graph |
| `collective_partitions.py` | partitions a graph at its collectives into subgraphs |
| `matmul_chains.py` | finds chains of matrix products, which tensor parallelism shards together |
"""
