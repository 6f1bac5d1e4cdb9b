"""Answers or refuses what a traced function reads and does beside operations on its arguments.

It imports nothing else of trace/.

| question | file |
|---|---|
| which user's line is this? | `user_lines.py` |
| how is a function refused, by name, and what do PyTorch's errors mean? | `refusals.py` |
| which operations have no line in a program? | `refused_operations.py` |
| which questions about a tensor (value, memory, history, layout, strides) are refused? | `questions.py` |
| which values does a trace know all the same? | `answers.py` |
| is a condition one that only raises? | `conditions.py` |
| how are the tensors of a trace kept out of caches of functions? | `function_caches.py` |
| does code compare exact types? | `exact_types.py` |
| which arguments does an operator write to, whatever its schema says? | `overwrites.py` |
| who writes to the arguments of a plain step, or leaves gradients in them? | `untouched.py` |
| which memory of arguments and of blocks' results must not be read any more? | `argument_memory.py` |
| what does a function read beside its arguments, and what of it has changed? | `settings.py`, by `settings_walk.py` |
| when are two such values equal? | `value_keys.py` |
| what does code name, read and store? | `code.py` |
| which switches of PyTorch decide the operations? | `switches.py`, `deterministic.py` |
"""
