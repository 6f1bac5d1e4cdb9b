"""Runs compiled steps on a mesh (`fz.compile`), and measures, profiles and logs them.

The files follow the life of a step. A call checks the state and moves the batch to the device, then
finds or makes the program for this kind of batch: it is lowered (`compiler/`), compared among the
ranks, and its subgraphs are compiled (`build/`). Executing a program means running the Python code
that `fzero show` prints.

| file | what it does |
|---|---|
| `compile.py` | `fz.compile`: makes a compiled step for a mesh |
| `compiled_base.py` | what compiled training steps and evaluations have in common |
| `compiled_step.py` | `CompiledStep`: creates or restores a state and trains it, batch by batch |
| `compiled_eval.py` | `CompiledEval`: runs a forward-only step |
| `resharding.py` | `fz.reshard`: lays out a live state for another step, without writing a file |
| `step_resolution.py` | resolves what a step leaves open, such as offloading or pipeline stages, from its parameters |
| `state_validation.py` | checks the state and the batch before the first step, and that replicas are equal |
| `batch_transfer.py` | moves a batch to the device of the mesh |
| `program_cache.py` | distinguishes kinds of batches, and keeps the programs used last (at most 16) |
| `read_values.py` | checks that the values a step's functions read have not changed since the trace |
| `retrace.py` | traces a step again, at its second call and before its state is saved, and compares |
| `program_build.py` | traces, lowers and builds the program for a new kind of batch |
| `program_agreement.py` | checks that all ranks have made the same program before it first runs |
| `build/` | compiles the subgraphs of a program |
| `program_buffers.py` | makes the tensors of a program's buffers, in the arena or allocated separately |
| `execute.py` | turns a program's source into a Python function and runs it |
| `cuda_graphs.py` | captures the run of a program as a CUDA graph and replays it |
| `compress_formats.py` | records in the state the formats that `compress("auto")` has chosen |
| `metrics_watch.py` | watches metrics for NaN, a minimal loss scale, and values that should agree |
| `error_translation.py` | explains PyTorch's errors for full memory and for indices out of range |
| `out_of_memory.py` | adds to an out-of-memory error the planned peak and the transforms that lower it |
| `op_hooks.py` | calls functions before and after each op of a running program |
| `op_timers.py` | times every op of a run, and measures the most memory alive |
| `step_profile.py` | takes a few training steps and returns the profile of the fastest |
| `training_log.py` | `fz.log`: shows and records the progress of a training loop |
| `calibrate.py` | `fzero calibrate`: measures this machine and stores its rates |
| `probes.py` | the measurements of `calibrate`, each of which runs what a program runs |
"""
