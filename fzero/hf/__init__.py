"""Joins the library `transformers`: its models, their directories, and generation from a sharded state.

from_pretrained, from_config   a model of the library as functions of its tensors
save_pretrained                a directory that the library's own `from_pretrained` reads
module                         a model of the library with the weights of a state, for `generate()` and evaluation
"""

from typing import NoReturn

from fzero.errors import no_attribute
from fzero.hf.models import Pretrained, from_config, from_pretrained
from fzero.hf.running import module
from fzero.hf.saving import save_pretrained

__all__ = ["Pretrained", "from_config", "from_pretrained", "module", "save_pretrained"]


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
