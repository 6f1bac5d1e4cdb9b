"""Lowers a step to a finished program: traces it, runs the passes and selects the fastest that fits.

`lower.py` is the entry point and needs no devices. The step is traced once to the *base program*,
the unsharded step of one process. The passes, in the one ordered list of `passes.py`, rewrite it
into a finished program. A pass that belongs to one transform lives in `transforms/`; the passes in
this folder serve all of them. If a step leaves options open, `search.py` compares finished programs
by their plans, within the memory budgets. The selected program is verified. This folder imports
nothing from `state/` or `runtime/`.

| file | what it does |
|---|---|
| `lower.py` | `fz.lower`: from a step, a mesh and abstract tensors to a finished program and its plan |
| `lowered.py` | the result of lowering: programs, plan, and tree structures of arguments and results |
| `input_specs.py` | lists the parameters of a step on a mesh, each with its layout and memory tier |
| `state_layouts.py` | the same for the rest of the state: optimizer state, compute copies, gradients on disk |
| `abstract_values.py` | makes trees of tensors that have shapes and dtypes only, and the specs of a batch |
| `combined_transforms.py` | combines the transforms of a step: its dtypes, parallel axes and memory tiers |
| `state_slots.py` | lists what transforms keep in the state besides parameters and optimizer state |
| `state_budget.py` | checks, before anything is traced, whether the state alone fits the memory budgets |
| `training_spec.py` | data types: what a training step is made of, and what tracing its loss has found |
| `traced_step.py` | traces a training step, and the extra tensors that open options may need |
| `base_program.py` | makes the base program from the recorded loss, gradients and optimizer |
| `backward_seed.py` | seeds the backward with loss scale / count: gradients of the global mean, scaled for fp16 |
| `bitcast_check.py` | rejects casts and compression of parameters whose raw bits the step reads |
| `update_graph.py` | records what follows the backward: means, unscaling, gradient norm, optimizer and metrics |
| `passes.py` | the list of all passes, in order, and why each is needed |
| `pass_options.py` | decides when each pass runs, and with which options |
| `options.py` | lists the options that a step leaves open |
| `pass_invariants.py` | rules that programs must satisfy before or after certain passes |
| `pass_cache.py` | runs the passes, and shares their results among options that agree |
| `fuse_last_block.py` | merges the last block's forward and backward into one subgraph |
| `hoist_updates.py` | moves each optimizer update to right after the backward that makes its gradients |
| `overlap.py` | decides when each transfer starts and where its wait goes; shares gathers |
| `name_collisions.py` | renames subgraphs that have the same name as a value |
| `buffer_allocation.py` | gives every transfer buffer an offset in the arena, according to live ranges |
| `arena.py` | collects the allocations of one arena and assigns their offsets |
| `packing.py` | packs buffers with known live ranges into a small arena |
| `separate_allocation.py` | chooses the buffers that are better allocated separately than in the arena |
| `out_variants.py` | makes variants of subgraphs that write results into given buffers |
| `batched_ops.py` | merges adjacent casts and additions into one kernel launch on a GPU |
| `device_waits.py` | marks the copies to the host that only the device, not the host thread, has to wait for |
| `candidate_programs.py` | traces a step, and makes a finished program for each combination of options |
| `search.py` | searches for the options whose program is fastest within the memory budgets |
| `program_selection.py` | selects the program of a step; if none fits, the error says what would |
| `budget_report.py` | memory budgets, the decisions that they forced, and the error if nothing fits |
| `advice.py` | finds transforms that would lower the peak memory, each with the new peak |
| `alternatives.py` | plans a step with other transforms and on other devices, for `fzero plan --html` |
| `cost_bounds.py` | bounds memory and time of a state placement from below, without making a program |
| `auto_offload.py` | resolves `offload("auto")`: which tensors are kept in host memory or on disk |
| `auto_tensor_parallel.py` | chooses how `tensor_parallel` without rules shards each matrix |
| `auto_stages.py` | chooses the blocks of each stage of a `pipeline` |
| `auto_compress.py` | chooses the formats of `compress("auto")` for each mesh axis |
| `auto_mesh.py` | `fz.choose_mesh`: plans a step on several meshes and sorts them by time |
| `mesh_candidates.py` | lists the meshes of a number of devices, and the transforms for the axes of each |
"""
