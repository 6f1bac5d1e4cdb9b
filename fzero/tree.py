"""Flattens, names and rebuilds pytrees: nested containers of tensors.

Built on optree. Dict keys are sorted, so two dicts with the same items flatten equally in any insertion order; `None`
is an empty node, not a leaf; plain dataclasses are containers and need no registration. A leaf is named by its path,
`params['layers'][3]['qkv']`, in errors and programs, and by its dotted name, `layers.3.qkv`, in checkpoints.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import itertools
import operator
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch

from fzero.errors import FzeroValueError

__all__ = [
    "flatten",
    "unflatten",
    "leaves",
    "structure",
    "map",
    "map_with_path",
    "paths",
    "names",
    "select",
    "describe",
]

Tree = Any
TreeSpec = optree.PyTreeSpec

_NAMESPACE = "fzero"
_registered: set[type] = set()
_leaves: set[type] = set()  # types of leaves that are not dataclasses


def flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """Returns the leaves in a fixed order, and the structure that is needed to rebuild the tree.

    Args:
        tree: any pytree.
        is_leaf: a container for which it returns True is a leaf.

    Example:
        >>> import torch
        >>> found, spec = flatten({"w": torch.ones(2), "b": (torch.zeros(1),)})
        >>> [describe(x) for x in found]
        ['float32[1]', 'float32[2]']
        >>> names(unflatten(spec, found))
        ['b.0', 'w']
    """
    leaves, spec = optree.tree_flatten(tree, is_leaf, namespace=_NAMESPACE)
    if _register(leaves):
        return flatten(tree, is_leaf)
    return leaves, spec


def unflatten(spec: TreeSpec, leaves: Iterable[Any]) -> Tree:
    """Returns the tree with this structure and these leaves, in the order in which `flatten` returns them.

    Raises:
        ValueError: if the number of leaves is not that of the structure.

    Example:
        >>> import torch
        >>> _, spec = flatten({"w": 1, "b": (2,)})
        >>> unflatten(spec, [10, 20])
        {'w': 20, 'b': (10,)}
    """

    return optree.tree_unflatten(spec, leaves)


def leaves(tree: Tree) -> list[Any]:
    """Returns the leaves of a tree, in a fixed order.

    Example:
        >>> leaves({"w": 1, "b": (2, 3)})
        [2, 3, 1]
    """

    return flatten(tree)[0]


def tensors(tree: Tree) -> list[torch.Tensor]:
    """Returns the leaves of a tree that are tensors."""
    return [x for x in leaves(tree) if isinstance(x, torch.Tensor)]


def structure(tree: Tree) -> TreeSpec:
    """Returns the structure of a tree. It is equal for trees that differ only in their leaves.

    Example:
        >>> structure({"w": 1, "b": (2, 3)}) == structure({"w": 4, "b": (5, 6)})
        True
    """

    return flatten(tree)[1]


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """Applies `fn` to the leaves of one tree, or of several trees with the same structure, and returns the tree of the
    results.

    Args:
        fn: a function of one leaf of each tree.
        tree: any pytree.
        *rest: trees with the same structure.
        is_leaf: a container for which it returns True is a leaf.

    Raises:
        FzeroValueError: if the structures differ.

    Example:
        >>> map(lambda x, y: x + y, {"w": 1, "b": (2, 3)}, {"w": 10, "b": (20, 30)})
        {'w': 11, 'b': (22, 33)}
    """
    flat, spec = flatten(tree, is_leaf)
    return unflatten(spec, [fn(*args) for args in zip(flat, *_alike("map", spec, rest), strict=True)])


def map_with_path(fn: Callable[..., Any], tree: Tree, *rest: Tree, root: str = "") -> Tree:
    """Applies `fn(path, leaf, *other_leaves)` to the leaves of one tree, or of several with the same structure.

    Args:
        fn: a function of the path, as in `paths`, and of one leaf of each tree.
        tree: any pytree.
        *rest: trees with the same structure.
        root: the name with which paths begin.

    Raises:
        FzeroValueError: if the structures differ.

    Example:
        >>> map_with_path(lambda path, x: f"{path} = {x}", {"layers": [1, 2]}, root="params")
        {'layers': ["params['layers'][0] = 1", "params['layers'][1] = 2"]}
    """
    flat, spec = flatten(tree)
    return unflatten(
        spec, [fn(*args) for args in zip(paths(tree, root), flat, *_alike("map_with_path", spec, rest), strict=True)]
    )


def _alike(owner: str, spec: TreeSpec, rest: Iterable[Tree]) -> list[list[Any]]:
    """Returns the leaves of trees with one structure. `leaves(r)` would not check that: as many leaves under other
    names are not the same structure.

    Raises:
        FzeroValueError: if a tree has another structure.
    """
    try:
        return [spec.flatten_up_to(r) for r in rest]
    except (ValueError, TypeError) as error:
        raise FzeroValueError(
            f"tree.{owner}",
            "the trees differ in structure",
            [str(error)],
            "give trees with the same containers and keys",
        ) from None


def paths(tree: Tree, root: str = "") -> list[str]:
    """Returns the path of every leaf as Python would write it: `root['layers'][3].weight`.

    Example:
        >>> paths({"layers": [1, 2], "out": 3}, "params")
        ["params['layers'][0]", "params['layers'][1]", "params['out']"]
    """
    return [root + "".join(entry.codify() for entry in accessor) for accessor in _accessors(tree)]


def names(tree: Tree) -> list[str]:
    """Returns the dotted name of every leaf: `layers.3.qkv`.

    Example:
        >>> names({"layers": [1, 2], "out": 3})
        ['layers.0', 'layers.1', 'out']
    """
    return [".".join(_key(entry) for entry in accessor) for accessor in _accessors(tree)]


def with_paths(tree: Tree, root: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves of a tree, each with its path."""
    return list(zip(paths(tree, root), leaves(tree), strict=True))


def with_names(tree: Tree) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree, each with its dotted name."""
    return list(zip(names(tree), leaves(tree), strict=True))


def dotted(path: str) -> str:
    """Returns the dotted name in a path, without its root.

    Example:
        >>> dotted("params['layers'][3].weight"), dotted("params['h.0.out']")
        ('layers.3.weight', 'h.0.out')
    """
    return ".".join(a or b or c for a, b, c in _ENTRY.findall(path))


_ENTRY = re.compile(r"\['([^']*)'\]|\[([^\]]*)\]|\.(\w+)")


def select(keep: Callable[[str, Any], bool], tree: Tree, root: str = "") -> Tree:
    """Returns the tree with `None` in place of every leaf for which `keep(path, leaf)` is false. Paths begin with
    `root`, as in `paths`.

    Example:
        >>> select(lambda path, x: "out" not in path, {"layers": [1, 2], "out": 3})
        {'layers': [1, 2], 'out': None}
    """
    return map_with_path(lambda path, leaf: leaf if keep(path, leaf) else None, tree, root=root)


def describe(leaf: Any) -> str:
    """Returns `float32[3, 4]` for a tensor, and the type's name for anything else.

    Example:
        >>> import torch
        >>> describe(torch.zeros(3, 4)), describe("text")
        ('float32[3, 4]', 'str')
    """
    if isinstance(leaf, torch.Tensor):
        return form(leaf.shape, leaf.dtype)
    return type(leaf).__name__


def form(shape: Iterable[int], dtype: torch.dtype) -> str:
    """Returns a shape and a dtype in the notation of `describe`."""
    return f"{dtype_name(dtype)}[{', '.join(str(n) for n in shape)}]"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `float32`, the name of the dtype as an attribute of torch.

    Example:
        >>> import torch
        >>> dtype_name(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")


def _accessors(tree: Tree) -> list[optree.PyTreeAccessor]:
    flatten(tree)
    return optree.tree_accessors(tree, namespace=_NAMESPACE)


def unnamed(tree: Tree, root: str = "") -> list[str]:
    """Returns the paths of leaves whose keys have no textual form: dictionary keys other than strings and numbers.

    Example:
        >>> unnamed({"w": 1, (0, 1): 2})
        ['[(0, 1)]']
    """
    keys = [[x.entry for x in accessor if isinstance(x, optree.MappingEntry)] for accessor in _accessors(tree)]
    return [
        p
        for p, own in zip(paths(tree, root), keys, strict=True)
        if any(type(k) not in (str, int, bool, type(None)) for k in own)
    ]


class Contents:
    """The contents of a tree's containers, by identity, to detect whether anything has been replaced since. A check
    takes 20 ns per item of a dictionary, a tenth of what flattening the tree would take. Writing into a tree's
    tensors does not change it.
    """

    def __init__(self, *trees: Tree):
        # dictionaries and lists by their keys, each with the values that it held
        self._rows: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        # live views of other mutable containers: keys and values of other kinds of dictionaries
        self._views: list[Iterable[Any]] = []
        # containers that can only be inspected through optree, and what they held
        self._others: list[tuple[Any, list[Any]]] = []
        for node in trees:
            flatten(node)  # registers dataclasses
            self._look(node)
        end = object()  # a container that became shorter or longer moves this object
        self._views.append((end,))
        self._held = [x for view in self._views for x in view]
        self._compared = [(_comparison(keys), rows) for keys, rows in self._rows.items()]

    def same(self) -> bool:
        """Returns whether every container still holds the same objects, under the same keys, in the same order."""
        for same, rows in self._compared:
            if not same(rows):
                return False
        if not all(builtins.map(operator.is_, self._held, itertools.chain.from_iterable(self._views))):
            return False
        return all(
            len(now := _children(x)) == len(held) and all(builtins.map(operator.is_, now, held))
            for x, held in self._others
        )

    def _look(self, node: Tree) -> None:
        """Records the contents of a container, and of the containers inside it."""
        if optree.tree_is_leaf(node, namespace=_NAMESPACE):
            return
        attributes = type(node) in _registered and hasattr(node, "__dict__")
        if type(node) is dict or attributes:
            items = vars(node) if attributes else node
            self._rows.setdefault(tuple(items), []).append((items, *items.values()))
        elif type(node) is list:
            self._rows.setdefault(tuple(range(len(node))), []).append((node, *node))
        elif type(node) in (OrderedDict, defaultdict):
            self._views += [node, node.values()]
        elif type(node) is deque:
            self._views.append(node)
        elif not (node is None or type(node) is tuple or optree.is_namedtuple(node) or optree.is_structseq(node)):
            self._others.append((node, _children(node)))
        for child in _children(node):
            self._look(child)


@functools.lru_cache(maxsize=64)
def _comparison(keys: tuple[Any, ...]) -> Callable[[Any], bool]:
    """Returns a function that checks whether each of some dictionaries or lists has exactly these keys, and under
    them the objects that follow it in its row. The code is generated, because access to an item through an iterator
    takes three times as long.
    """
    key, held = ([f"{name}{i}" for i in range(len(keys))] for name in "kx")
    changed = " or ".join(
        [f"len(items) != {len(keys)}", *(f"items[{k}] is not {x}" for k, x in zip(key, held, strict=True))]
    )
    text = f"""
def same(rows, {", ".join(f"{k}={k}" for k in key)}):
    try:
        for {", ".join(["items", *held])}, in rows:
            if {changed}:
                return False
    except KeyError:
        return False
    return True
"""
    namespace = dict(zip(key, keys, strict=True))
    exec(text, namespace)
    return namespace["same"]


def _children(node: Tree) -> list[Any]:
    return optree.tree_flatten_one_level(node, namespace=_NAMESPACE).children


def _key(entry: Any) -> str:
    if isinstance(entry, (optree.NamedTupleEntry, optree.DataclassEntry)):
        return str(entry.field)
    return str(entry.entry)


def _register(flat: Iterable[Any]) -> bool:
    """Registers the dataclasses found among the leaves as containers. Returns True if there was a new one."""
    met: set[Any] = {type(x) for x in flat} - _leaves
    if not met:
        return False
    found: set[Any] = {cls for cls in met if dataclasses.is_dataclass(cls)} - _registered
    _leaves.update(cls for cls in met if not dataclasses.is_dataclass(cls))
    for cls in found:
        fields = tuple(f.name for f in dataclasses.fields(cls) if f.init)
        optree.register_pytree_node(
            cls,
            lambda x, fields=fields: (tuple(getattr(x, f) for f in fields), None, fields),
            lambda _, children, cls=cls, fields=fields: cls(**dict(zip(fields, children, strict=True))),
            path_entry_type=optree.GetAttrEntry,
            namespace=_NAMESPACE,
        )
        _registered.add(cls)
    return bool(found)


def register(cls: type, parts: Callable[[Any], tuple[tuple[Any, ...], Any]], whole: Callable[[Any, Any], Any]) -> None:
    """Registers a class as a container. `parts(x)` returns its children and everything else that defines it;
    `whole(rest, children)` rebuilds it.
    """
    optree.register_pytree_node(cls, lambda x: (*parts(x), None), whole, namespace=_NAMESPACE)  # type: ignore[arg-type]


def listed(node: Any) -> Any:
    """Returns nested dicts with a list in place of each dict whose keys are 0, 1, 2, ..., as in dotted names."""
    if not isinstance(node, dict):
        return node
    inner = {key: listed(value) for key, value in node.items()}
    numbered = [str(i) for i in range(len(inner))]
    return [inner[key] for key in numbered] if inner and set(inner) == set(numbered) else inner
