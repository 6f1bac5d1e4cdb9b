"""Names the values of a program: each name is assigned once, and none shadows another name.

The names are made of the user's own: `layers[3].mlp.up` is a gathered parameter, `d_layers[3].mlp.up` its gradient.
They are used in the printed program, in plans, profiles and errors. In the code that runs, `identifier` of a name
stands for it: `layers_3_mlp_up`. A user may call a parameter `class`, `step` or `0`, and a block `wait`. An identifier
must not be a keyword, and must not shadow an argument, a primitive or a subgraph that a later op calls.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Iterable, Iterator

import torch.fx as fx

from fzero.ir.ops import OPS
from fzero.ir.program import Instruction
from fzero.sharding.layout import COMPUTE

RESERVED = frozenset(
    {
        *keyword.kwlist,
        *("train", "evaluate", "step", "params", "opt_state", "key", "extras", "batch", "micro", "range"),
        *("pool", "apart", "replicas"),
        *(word for row in OPS.values() for word in row.words),
    }
)
"""Names that the text of a program already uses, in addition to those of its ops: keywords, its arguments, and its
primitives.
"""

_NAME = re.compile(r"[A-Za-z_]\w*(\[\d+\])*(\.[A-Za-z_]\w*(\[\d+\])*)*(?<=\w)")
_HEAD = re.compile(r"\w*")
_PATH = re.compile(r"(params|opt_state|extras|batch)(?![^.\[])")
_TARGET_LENGTH = 24  # of the name of a parameter; prefixes and endings such as `d_` and `_shard` are added to it
_OPERATION_LENGTH = 12


class Names:
    """Generates names that are assigned once.

    Args:
        taken: the names of the program's values so far. Those of parameters are paths.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        taken = list(taken)
        self._paths = [path for path in taken if path.startswith("params")]
        self._taken = set(map(identifier, taken))
        self._next: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._stems: dict[str, str] | None = None

    def __call__(self, name: str) -> str:
        """Returns `name` in a form that can be printed, or if that is taken the next free `name_v2`, `name_v3`, …."""
        if not _NAME.fullmatch(name):
            name = "_".join(p for p in "".join(c if c.isascii() and c.isalnum() else "_" for c in name).split("_") if p)
            name = name if name.isidentifier() else f"x_{name}"
        head = _HEAD.match(name)[0]  # type: ignore[index]
        reserved = head in RESERVED or (head in OPS and OPS[head].in_text)
        name = f"{head}_{name[len(head) :]}" if reserved else name
        new, number = name, self._next.get(name, 1)
        while identifier(new) in self._taken:
            number += 1
            new = f"{name}_v{number}"
        self._next[name] = number
        self._taken.add(identifier(new))
        return new

    def numbered(self, name: str) -> str:
        """Returns `name_0`, `name_1`, … on successive calls."""
        number = self._counts[name] = self._counts.get(name, -1) + 1
        return self(f"{name}_{number}")

    def stem(self, name: str) -> str:
        """Returns what the names of values that are made from a value begin with: `layers[3].qkv` for the parameter
        `params['layers'][3]['qkv']`, `mu.layers[3].qkv` for its moment, and otherwise the name itself.
        """
        path = f"params{name.removeprefix(COMPUTE)}" if name.startswith(COMPUTE) else name
        if not (root := _PATH.match(path)):
            return name
        if self._stems is None:
            self._stems = stems(self._paths)
        for at in range(root.end(), len(path) + 1):
            # of the optimizer's state, the part that belongs to a parameter
            if path[at : at + 1] in ("[", ".", "") and (stem := self._stems.get(f"params{path[at:]}")):
                before = [word for word in _words(path[root.end() : at]) if not word.isdigit()]
                before = before or (["opt"] if root[1] == "opt_state" else [])
                return ".".join([*before, stem])
        words = _words(path[root.end() :])
        return _joined(words) if root[1] == "params" else identifier(path)


def identifier(name: str) -> str:
    """Returns the identifier that stands for a name in the code that runs: `layers_3_qkv` for `layers[3].qkv`."""
    return name if name.isidentifier() else "_".join(filter(None, re.split(r"[\W_]+", name)))


def call_name(op: Instruction) -> str:
    """Returns what the names of values inside a call begin with: `layer_3` for call 3 of the block `layer`."""
    return f"{op.block.joint.name}_{op.block.number}" if op.block else op.fn


def operation_name(node: fx.Node) -> str:
    """Returns a short name for the result of an ATen operation: `mm`, `layer_norm`."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    target = getattr(node.target, "overloadpacket", node.target)
    words = getattr(target, "__name__", node.name).strip("_").removeprefix("native_").split("_")
    name = words[0]
    for word in words[1:]:
        if len(name) + len(word) >= _OPERATION_LENGTH:
            break
        name += f"_{word}"
    return name


def stems(paths: Iterable[str]) -> dict[str, str]:
    """Returns a short name for the path of each parameter: `layers[3].q_proj` for
    `params['model']['layers'][3]['self_attn']['q_proj']['weight']`. Parameters that differ only in numbers have names
    that differ only in these.

    A final `weight` and the words before the first numbered one are left out, and further words while the name is
    longer than `_TARGET_LENGTH`, if what is left still tells the parameter from all others.
    """
    words = {path: _words(path.removeprefix("params")) for path in paths}
    patterns = {path: tuple("0" if word.isdigit() else word for word in of) for path, of in words.items()}
    kept = _kept_words(set(patterns.values()))
    return {path: _joined([of[i] for i in kept[patterns[path]]]) for path, of in words.items()}


def _kept_words(patterns: set[tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
    """Returns which words of each pattern its short name keeps."""
    kept: dict[tuple[str, ...], list[int]] = {}
    for pattern in patterns:
        weight = len(pattern) > 1 and pattern[-1] == "weight" and pattern[-2] != "0" and pattern[:-1] not in patterns
        kept[pattern] = list(range(len(pattern) - weight))
    whole = {pattern: [pattern[i] for i in of] for pattern, of in kept.items()}
    for pattern, of in kept.items():
        others = [other for key, other in whole.items() if key != pattern and other[-1:] == whole[pattern][-1:]]
        for i in _droppable(pattern, of):
            first_number = pattern.index("0") if "0" in pattern else -1
            if i > first_number and len(_joined([pattern[j] for j in of])) <= _TARGET_LENGTH:
                break
            rest = [pattern[j] for j in of if j != i]
            if not any(_is_subsequence(rest, other) for other in others):
                of.remove(i)
    return kept


def _droppable(pattern: tuple[str, ...], of: list[int]) -> list[int]:
    """Returns the words that a name can do without: neither numbers, nor what they number, nor the last word."""
    return [i for i in of[:-1] if pattern[i] != "0" and pattern[i + 1] != "0"]


def _is_subsequence(words: list[str], of: list[str]) -> bool:
    rest = iter(of)
    return all(word in rest for word in words)


def _words(path: str) -> list[str]:
    """Returns the keys and numbers of a path, as identifiers and digits."""
    return list(_identifiers(re.findall(r"\w+", path)))


def _identifiers(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        if word.isdigit():
            yield word
            continue
        word = word if word.isidentifier() else "".join(c if c.isascii() and c.isalnum() else "_" for c in word)
        yield f"{word}_" if keyword.iskeyword(word) else word if word.isidentifier() else f"x{word}"


def _joined(words: list[str]) -> str:
    """Returns words as a name: numbers are indices, but for one at the end, after which endings follow."""
    if not words:
        return "leaf"
    first, *rest = words if not words[0].isdigit() else ["p", *words]
    name = first
    for i, word in enumerate(rest):
        name += f".{word}" if not word.isdigit() else f"_{word}" if i == len(rest) - 1 else f"[{word}]"
    return name
