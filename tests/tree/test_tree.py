"""Flattening, names and paths of trees."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero import tree
from fzero.errors import FzeroValueError


class Moments(NamedTuple):
    mu: Any
    nu: Any


@dataclasses.dataclass
class Linear:
    w: Any
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Model:
    layers: Any
    head: Any
    num_calls: int = dataclasses.field(default=0, init=False)


PARAMS = {"layers": [Linear(1), Linear(2, b=3)], "a": (4, None, Moments(mu=5, nu={"x": 6})), 0: 7}


def _trees(leaves: st.SearchStrategy) -> st.SearchStrategy:
    def containers(children: st.SearchStrategy) -> st.SearchStrategy:
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(st.text("abc_", min_size=1, max_size=3), children, max_size=3),
            st.builds(Moments, children, children),
            st.builds(Linear, children, children),
            st.builds(Model, children, children),
            st.none(),
        )

    return st.recursive(leaves, containers, max_leaves=12)


@given(_trees(st.integers()))
def test_unflatten_inverts_flatten(t):
    leaves, spec = tree.flatten(t)
    back = tree.unflatten(spec, leaves)
    assert back == t and type(back) is type(t)
    assert all(isinstance(leaf, int) for leaf in leaves), "no container is left among the leaves"
    assert tree.structure(back) == spec


@given(_trees(st.integers()))
def test_one_path_and_one_name_for_every_leaf(t):
    leaves, paths = tree.leaves(t), tree.paths(t, "t")
    assert len(set(paths)) == len(leaves) == len(set(tree.names(t)))
    assert [eval(path, {"t": t}) for path in paths] == leaves, "a path is the expression that finds the leaf"


@given(_trees(st.integers()))
def test_map_with_path_sees_what_paths_says(t):
    pairs = tree.leaves(tree.map_with_path(lambda path, leaf: (path, leaf), t, root="t"))
    assert pairs == [x for pair in zip(tree.paths(t, "t"), tree.leaves(t), strict=True) for x in pair]


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(), min_size=2), st.randoms())
def test_the_order_of_insertion_does_not_matter(items, random):
    shuffled = list(items.items())
    random.shuffle(shuffled)
    assert tree.leaves(dict(shuffled)) == tree.leaves(items) == [items[key] for key in sorted(items)]
    assert tree.structure(dict(shuffled)) == tree.structure(items)


def test_paths_and_names():
    assert dict(zip(tree.paths(PARAMS, "params"), tree.leaves(PARAMS), strict=True)) == {
        "params['layers'][0].w": 1,
        "params['layers'][1].w": 2,
        "params['layers'][1].b": 3,
        "params['a'][0]": 4,
        "params['a'][2].mu": 5,
        "params['a'][2].nu['x']": 6,
        "params[0]": 7,
    }
    assert dict(zip(tree.names(PARAMS), tree.leaves(PARAMS), strict=True)) == {
        "layers.0.w": 1,
        "layers.1.w": 2,
        "layers.1.b": 3,
        "a.0": 4,
        "a.2.mu": 5,
        "a.2.nu.x": 6,
        "0": 7,
    }


def test_a_bare_leaf_is_named_by_the_root():
    assert tree.paths(torch.ones(2), "x") == ["x"]
    assert tree.names(torch.ones(2)) == [""]


def test_map_keeps_the_structure():
    doubled = tree.map(lambda x: 2 * x, PARAMS)
    assert tree.structure(doubled) == tree.structure(PARAMS)
    assert tree.leaves(doubled) == [2 * x for x in tree.leaves(PARAMS)]
    assert tree.map(lambda x, y: x - y, doubled, PARAMS) == PARAMS


def test_an_ordered_dict_keeps_its_order():
    assert tree.leaves(OrderedDict(b=1, a=2)) == [1, 2]


def test_a_dataclass_field_outside_of_init_is_not_a_leaf():
    model = Model([1], 2)
    object.__setattr__(model, "num_calls", 9)
    leaves, spec = tree.flatten(model)
    assert leaves == [1, 2]
    assert tree.unflatten(spec, leaves).num_calls == 0


def test_a_dataclass_met_first_inside_another_is_a_container_at_once():
    @dataclasses.dataclass
    class Inner:
        x: Any

    @dataclasses.dataclass
    class Outer:
        inner: Any

    assert tree.leaves([Outer(Inner(1)), 2]) == [1, 2]
    assert tree.paths(Outer(Inner(1)), "o") == ["o.inner.x"]


def test_a_dataclass_itself_is_a_leaf():
    assert tree.leaves([Linear, 1]) == [Linear, 1]


def raising(*args):
    raise ValueError("of its own")


@pytest.mark.parametrize(
    "other", [{"a": 1, "c": 2}, {"a": 1}, {"a": 1, "b": 2, "c": 3}, [1, 2]], ids=["names", "fewer", "more", "kind"]
)
@pytest.mark.parametrize("function", [tree.map, tree.map_with_path])
def test_trees_of_different_structure_do_not_map_together(function, other):
    with pytest.raises(FzeroValueError, match=r"fzero.tree.map.*: the trees differ in structure\n(.*\n)+Fix: "):
        function(lambda *args: args, {"a": 1, "b": 2}, other)
    with pytest.raises(ValueError, match="of its own"):
        function(raising, {"a": 1, "b": 2})


def test_select_puts_none_for_what_is_not_kept():
    biases = tree.select(lambda path, leaf: path.endswith(".b"), PARAMS, root="params")
    assert tree.leaves(biases) == [3]
    assert biases["layers"] == [Linear(None), Linear(None, 3)]


def test_describe():
    assert tree.describe(torch.zeros(3, 4, dtype=torch.bfloat16)) == "bfloat16[3, 4]"
    assert tree.describe(torch.tensor(1)) == "int64[]"
    assert tree.describe(3.0) == "float"


@dataclasses.dataclass
class Slotted:
    __slots__ = ("w",)
    w: Any


class Custom:
    def __init__(self, *items: Any):
        self.items = list(items)


optree.register_pytree_node(Custom, lambda x: (x.items, None), lambda _, items: Custom(*items), namespace="fzero")


def _swap(d: dict) -> None:
    """The same values in the same order under other keys."""
    a, b = d.pop("a"), d.pop("b")
    d.update(b=a, a=b)


CHANGES = {
    "an item of a list": ([1, [2, 3]], lambda t: t[1].__setitem__(0, 9)),
    "one more in a list": ([1, [2, 3]], lambda t: t[1].append(4)),
    "one fewer, at the end": ([1, [2, 3]], lambda t: t[1].pop()),
    "a value of a dict": ({"a": {"b": 1}}, lambda t: t["a"].update(b=2)),
    "a key of a dict": ({"a": 1}, lambda t: t.update(z=t.pop("a"))),
    "keys of a dict changed places": ({"a": 1, "b": 2}, _swap),
    "one more in a dict": ({"a": 1}, lambda t: t.update(b=None)),
    "an emptied dict": (({"a": 1}, {"b": 2}), lambda t: t[0].clear()),
    "an equal container": ({"a": [1]}, lambda t: t.update(a=[1])),
    "below a tuple": ((1, Moments(mu={"x": 1}, nu=None)), lambda t: t[1].mu.update(x=2)),
    "an ordered dict": (OrderedDict(a=1, b=2), lambda t: t.move_to_end("a")),
    "a deque": ({"a": deque([1, 2])}, lambda t: t["a"].rotate()),
    "a field": ([Linear(1, b=[2])], lambda t: setattr(t[0], "w", 7)),
    "a field that is new": ([Linear(1)], lambda t: setattr(t[0], "b", 7)),
    "a field in a slot": ([Slotted(1)], lambda t: setattr(t[0], "w", 7)),
    "a container of a user's own": ([Custom(1, [2])], lambda t: t[0].items.append(3)),
    "below a container of a user's own": ([Custom(1, [2])], lambda t: t[0].items[1].append(3)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_put_into_a_tree_is_seen(name):
    made, change = CHANGES[name]
    t = copy.deepcopy(made)
    contents = tree.Contents({"before": {"x": 1}}, t, ["after"])
    assert contents.same()
    change(t)
    assert not contents.same()


@given(_trees(st.integers()))
def test_a_tree_that_was_let_be_is_the_same(t):
    assert tree.Contents(t).same() and tree.Contents(t, t).same() and tree.Contents().same()
