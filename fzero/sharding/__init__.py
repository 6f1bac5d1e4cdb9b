"""Propagates shardings through recorded graphs: what each rank computes, and with which collectives.

One propagation (`propagation.py`) visits the ops of a graph for one mesh axis and chooses, for each op, the strategy
whose conversions send the fewest bytes. The strategies come from one table of rules, which label the dims of an op's
operands and results, as in einops. Tensor and sequence parallelism are placements of a graph's inputs. Expert
parallelism uses the same rules for two dims at once, and *flat* shards (ZeRO, the sharded optimizer), contiguous pieces
of a flattened tensor, for ops that keep the order of elements. The result is a graph with markers for collectives,
which a pass turns into ops of a program. This folder knows nothing about programs: it imports nothing from `ir/`.

| file | what it does |
|---|---|
| `placements.py` | what each rank along a mesh axis holds of a value |
| `layout.py` | how a tensor is stored: the axes that shard it, its padding, memory tier and dtype |
| `shard_regions.py` | says which elements of a tensor a rank holds, for any combination of shardings |
| `operations.py` | an op as the rules see it, and the strategies by which a rank computes it |
| `factors.py` | describes how an op may be sharded, by labels of its dims |
| `rules.py` | the rules of products, reductions, norms, losses and ops along a dim |
| `view_rules.py` | the rules of views, and of ops that split, slice, join and reorder values |
| `lookup_rules.py` | the rules of embeddings, indexing, gather and scatter |
| `attention_rules.py` | the rules of attention: by samples, by heads, or by position |
| `layer_rules.py` | the rules of convolutions and random draws |
| `expert_rules.py` | the rules of assigning tokens to experts, and of multiplying their rows |
| `user_rules.py` | `fz.sharding_rule`: the rules of users' own operators |
| `bodies.py` | computes ops that read all of a sharded dim, such as softmax, by ops that reduce it |
| `propagation.py` | propagates placements through a graph, for one mesh axis |
| `expert_propagation.py` | the same for an axis that also shards the batch, whose ranks exchange tokens |
| `flat_propagation.py` | propagates flat shards through an optimizer's update, its init, or an init function |
| `update_scalars.py` | distinguishes parameter arithmetic from scalars in a recorded update |
| `shape_constants.py` | replaces ops that read only the shape of a value by constants |
| `sharded_graph.py` | the function of one rank, with the placements of its outputs |
| `graph_writer.py` | writes ops on shards, layout conversions and collective markers into a graph |
| `collective_partitions.py` | partitions a graph at its collectives into subgraphs |
| `matmul_chains.py` | finds chains of matrix products, which tensor parallelism shards together |
"""
