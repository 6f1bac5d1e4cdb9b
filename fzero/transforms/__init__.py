"""Transforms steps: each transform maps a step to a step, and says what it changes and promises.

Applying a transform only adds its frozen configuration to the step. A step keeps configurations in
one canonical order, so the order of application does not matter, and a contradiction is an error at
once. A transform is one file, which reads from top to bottom: its configuration, its function with the
documentation, and the rewrite of programs that carries it out. Rewrites that are a subject of their own
have files `*_pass.py`: `zero_pass.py` serves all four ZeRO transforms and `hierarchical`, `pipeline_pass.py`
the program of a stage, `speculate_pass.py` a decision of the search, and the other two the update of any
step. The list in `compiler/passes.py` calls the rewrites. Mixed precision and fp8 act earlier, on the
functions and on recorded graphs. This folder imports nothing from `compiler/`.

| file | what it does |
|---|---|
| `transform.py` | the base class `Transform`: configuration, order, conflicts, state and rewrite |
| `transform_state.py` | types for the state that a transform keeps, and for the results it sees of a step |
| `zero.py` | `data_parallel`, `shard_opt_state`, `shard_grads` and `shard_params` (ZeRO), and their combination |
| `zero_pass.py` | shards the program over the mesh: gathers parameters and reduces gradients |
| `hierarchical.py` | `hierarchical`: crosses a slow mesh axis once per step, not once per micro-batch |
| `accumulate.py` | `accumulate`: divides the batch into micro-batches and sums their gradients |
| `remat.py` | `remat`: the policy by which activations are kept or recomputed |
| `joint_split.py` | chooses which activations are kept, by a minimum cut of a block's joint graph |
| `tensor.py` | `tensor_parallel`: shards parameters along a dim, and sends activations instead |
| `sequence.py` | `sequence_parallel`: shards activations by position; attention exchanges heads |
| `expert.py` | `expert_parallel`: shards experts and the batch; ranks exchange tokens |
| `dim_sharding.py` | the common part of these three: makes subgraphs compute on shards along a dim |
| `pipeline.py` | `pipeline`: divides blocks into stages, which pass on micro-batches; the schedules |
| `pipeline_pass.py` | makes the program of each stage: its blocks, in schedule order, with sends and receives |
| `partition_update_pass.py` | partitions the optimizer update: scalars first, then one subgraph per block |
| `round_robin_pass.py` | gives each rank whole matrices to update, instead of gathering all on every rank |
| `speculate_pass.py` | runs updates before the clipping norm is known, and again if the assumption was wrong |
| `offload.py` | `offload`: keeps state or activations in host memory or on disk |
| `precision.py` | `mixed_precision`: dtypes of compute, storage and reduction; statistics, and promotion with "auto" |
| `fp8.py` | `fp8`: selects the parameters whose matrix products are computed in 8 bits |
| `compress.py` | `compress`: sends parameters and gradients in fewer bits |
| `redundant.py` | `redundant`: sends each rank's shard of the state to another host, for recovery |
"""
