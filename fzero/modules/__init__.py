"""Turns modules of `torch.nn` into pure functions of their tensors (`fz.functionalize`).

The forward runs on a *meta module*, a copy without values that is given its tensors for each call.
New values of buffers become results, and random numbers are drawn from a key. This is a front end:
only the front ends `hf/` and `deepspeed/` import it, and it imports nothing from `ir/`, `compiler/`
or `runtime/`.

| file | what it does |
|---|---|
| `functionalize.py` | `fz.functionalize`: a module as a pytree of tensors, and functions and steps of it |
| `mixture_experts.py` | computes the mixture-of-experts layers of transformers with `fz.experts` |
| `module_preparation.py` | prepares the copy of a module that traces run on |
| `quantized_linear.py` | `fz.quantize_frozen`: linear layers whose frozen weights are stored in 4 or 8 bits |
| `module_mode.py` | runs a call of that copy in training or evaluation mode |
| `meta_module.py` | makes the meta module, and puts the given tensors into it for a call |
| `module_init.py` | initializes the tensors of a module from a key, with the module's own methods |
| `layers.py` | finds repeated submodules and makes each of them a block |
| `batch_binding.py` | maps the entries of a batch to arguments of the forward, and finds entries nobody reads |
| `rng_mode.py` | draws from a key what a module would draw from PyTorch's global generator |
| `batch_dims.py` | infers which dim of a tensor is the batch, so that each sample has its own random numbers |
| `buffers.py` | finds the buffers that a forward overwrites, by reading its code |
| `batch_norms.py` | computes batch norms with `momentum=None` without reading a tensor's value |
| `loss_weighting.py` | weights a model's own loss by its number of targets, so that its mean is exact |
| `chunked_loss.py` | computes a model's own cross entropy in chunks, so that a step never holds all logits |
| `bound_module.py` | lets a user's function call a module's forward on the tensors of a step |
| `captured_tensors.py` | gives such a function the tensors that it reads other than as arguments |
| `transformers_code.py` | lets code of transformers that reads values, or loops over sets, be traced |
| `hook_capture.py` | returns from a block what hooks of transformers collect inside it |
| `module_calls.py` | calls the forward on given tensors, with arguments that are bound from a batch |
| `module_guard.py` | detects changes of the original module since it was functionalized |
"""
