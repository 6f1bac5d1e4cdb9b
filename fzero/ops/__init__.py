"""Defines custom PyTorch operators: each is one node of a recorded graph.

An operator runs eagerly as one function and is expanded into other ops for a compiler. The
random-number operators are in `random.py`. This folder imports only `tree.py`, `errors.py`,
`_compat/` and `_utils/`.

| file | what it does |
|---|---|
| `registration.py` | registers an operator, with its shape inference and its decomposition |
| `experts.py` | `fz.experts`: sends tokens to experts, with or without a capacity, and combines the results |
| `routed_rows.py` | marks where rows are sent to experts and returned, if there is no capacity |
| `row_indices.py` | assigns tokens to the rows of experts, and reads rows by index |
| `grouped_matmul.py` | multiplies each row by the matrix of its own expert |
| `flex_attention.py` | writes `flex_attention` out as operations that have sharding rules |
| `scaled_matmul.py` | multiplies matrices in 8-bit floating point, with power-of-two scales |
| `block_quantization.py` | reduces blocks of 256 elements to one number, such as a scale, and expands it |
| `weight_quantization.py` | `fz.quantize`, `fz.dequantize`: frozen weights in 4 or 8 bits, in bitsandbytes' formats |
| `unsharded_mark.py` | marks tensors that a function reads whole, so that their shards are gathered |
| `index_sums.py` | adds at indices in a fixed order on a CPU, for deterministic embedding gradients |
| `ctc.py` | computes the CTC loss with a result shape that does not depend on values |
| `recurrent.py` | wraps the recurrent layers of oneDNN, cuDNN and MIOpen |
| `mixed_norms.py` | computes norms of float32 inputs with parameters in half precision |
"""
