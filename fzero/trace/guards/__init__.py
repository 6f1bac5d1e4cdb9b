"""Answers or rejects what a traced function reads and does besides ops on its arguments.

A program is a function of its arguments only. So each question that a function may ask during a
trace, such as the value of a tensor or of a global variable, is answered if the answer holds in
every run, captured so that a later change is noticed, or rejected with an error that points to the
user's line. This folder imports nothing else from `trace/`.

| file | what it does |
|---|---|
| `user_frames.py` | finds the line of the user's code that is running |
| `rejections.py` | rejects a function with an error about the user's code, and explains PyTorch's errors |
| `unsupported_operations.py` | rejects reads of a value (`.item()`), global random numbers and ops no program has |
| `tensor_queries.py` | rejects printing or pickling a tensor, and questions about its memory, history or layout |
| `known_values.py` | answers questions about values that are known during the trace, such as literals |
| `raise_conditions.py` | recognizes conditions that only decide whether the function raises |
| `exact_types.py` | finds code that compares the exact type of a value, which is different in a trace |
| `function_caches.py` | keeps the tensors of a trace out of caches such as `functools.lru_cache` |
| `overwrites.py` | finds the arguments that an operator overwrites, whatever its schema says |
| `write_guard.py` | rejects writes to the arguments of a plain step, and gradients left in them |
| `argument_memory.py` | tracks writes to arguments and block results, and rejects reads of stale memory |
| `captured_settings.py` | captures the values that a function reads besides its arguments, and finds changes |
| `settings_walk.py` | walks over everything that a function can read, for `captured_settings.py` |
| `value_keys.py` | decides when two such values are equal |
| `bytecode.py` | reads bytecode: which names a function uses, and which it stores to |
| `torch_switches.py` | captures the PyTorch settings that decide which ops run, such as autocast |
| `deterministic_mode.py` | captures PyTorch's setting for deterministic algorithms |
"""
