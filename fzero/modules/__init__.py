"""Turns modules of `torch.nn` into functions of their tensors: a front end, which only the front ends `deepspeed/` and
`hf/` know."""
