"""Turns modules of `torch.nn` into functions of their tensors: a front end, which nothing else of the package knows."""
