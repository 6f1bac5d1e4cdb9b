"""Transforms steps: each transform maps a step to a step, and says what it changes and promises.

Applying a transform only adds its frozen configuration to the step. A step keeps configurations in
one canonical order, so the order of application does not matter, and a contradiction is an error at
once. A transform's own file has its function, its configuration, its documentation and, if it is
short, the rewrite of programs that carries it out; longer rewrites are in files `*_pass.py`. The list
in `compiler/passes.py` calls the rewrites. Mixed precision and fp8 act earlier, on the functions and
on recorded graphs. This folder imports nothing from `compiler/`.

| file | what it does |
|---|---|
| `transform.py` | the base class `Transform`: configuration, order, conflicts, state and rewrite |
| `transform_state.py` | types for the state that a transform keeps, and for the results it sees of a step |
| `zero.py` | `data_parallel`, and ZeRO: `shard_opt_state`, `shard_grads` and `shard_params` |
| `zero_placement.py` | decides how the parallel transforms of a step together shard each parameter |
| `zero_pass.py` | shards the program over the mesh: gathers parameters and reduces gradients |
| `hierarchical.py` | `hierarchical`: crosses a slow mesh axis once per step, not once per micro-batch |
| `multi_axis_gather.py` | gathers values over several mesh axes, one axis after the other |
| `accumulate.py` | `accumulate`: divides the batch into micro-batches and sums their gradients |
| `remat.py` | `remat`: the policy by which activations are kept or recomputed |
| `joint_split.py` | chooses which activations are kept, by a minimum cut of a block's joint graph |
| `tensor.py` | `tensor_parallel`: shards parameters along a dim, and sends activations instead |
| `sequence.py` | `sequence_parallel`: shards activations by position; attention exchanges heads |
| `expert.py` | `expert_parallel`: shards experts and the batch; ranks exchange tokens |
| `dim_sharding.py` | the configuration that tensor, sequence and expert parallelism share |
| `dim_sharding_pass.py` | makes subgraphs compute on shards along a dim, with collectives between them |
| `pipeline.py` | `pipeline`: divides blocks into stages, which pass on micro-batches |
| `pipeline_schedules.py` | pipeline schedules: 1F1B, interleaved, zero bubble, and a user's own table |
| `split_backward_pass.py` | splits the backward for zero-bubble schedules into input and weight gradients |
| `pipeline_pass.py` | makes the program of each stage: its blocks, in schedule order, with sends and receives |
| `partition_update_pass.py` | partitions the optimizer update: scalars first, then one subgraph per block |
| `round_robin_pass.py` | gives each rank whole matrices to update, instead of gathering all on every rank |
| `speculate_pass.py` | runs updates before the clipping norm is known, and again if the assumption was wrong |
| `offload.py` | `offload`: keeps state or activations in host memory or on disk |
| `offload_analysis.py` | lists the updates, gradients and activations of a program that are off the device |
| `offload_pass.py` | inserts the copies between device, host and disk |
| `compute_copies_pass.py` | gives each offloaded master parameter a copy in the compute dtype |
| `precision.py` | `mixed_precision`: the dtypes of compute, storage and reduction, and whether to scale the loss |
| `automatic_precision.py` | `mixed_precision("auto")`: promotes blocks that overflow or underflow to float32 |
| `precision_statistics.py` | computes statistics of each block's gradients and outputs as part of the step |
| `fp8.py` | `fp8`: selects the parameters whose matrix products are computed in 8 bits |
| `compress.py` | `compress`: sends parameters and gradients in fewer bits |
| `compress_codes.py` | the 8-bit and 4-bit codes, and the functions that encode, add and decode them |
| `compress_pass.py` | rewrites transfers so that they send codes |
| `redundant.py` | `redundant`: sends each rank's shard of the state to another host, for recovery |
"""
