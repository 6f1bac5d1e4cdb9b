"""The rewrite that spreads a program over the mesh, for every parallel transform: they are one program with more or
fewer leaves sharded.

The batch becomes local to each rank, so gradients and sums become partial, and every partial value gets its reduction.
A sharded parameter is gathered before each line that reads it and dropped after; a sharded gradient leaves as a
reduce_scatter, one for all leaves of a block. The optimizer's update reads and writes shards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from fzero.layout import Leaf
from fzero.precision.fp8_gather import on_shards
from fzero.program.ir import MOVING, WHOLE, Line, Placement, Program, Value, repeats
from fzero.program.lines import Functions
from fzero.program.names import Names, identifier
from fzero.transforms.shard import Zero


def rewrite(program: Program, zero: Zero, whole_grads: bool = False) -> Program:
    """Spreads a base program over the mesh. `whole_grads`: over micro-batches gradients add up whole, whatever the
    stage, and are reduced once a step."""
    return _Rewrite(program, zero, whole_grads).run() if zero.batch_axes else program


class _Rewrite:
    def __init__(self, program: Program, zero: Zero, whole_grads: bool):
        self.program, self.zero, self.whole_grads = program, zero, whole_grads
        self.axes = (zero.axis,) if zero.axis else ()  # the axis that leaves are sharded over
        self.others = tuple(a for a in zero.batch_axes if a not in self.axes)
        self.names, self.values = Names(program.values()), program.values()
        kept = {line.fn for line, _ in program.walk() if line.attrs.get("scales") != "shards"}
        self.functions = Functions({name: f for name, f in program.functions.items() if name in kept})
        self.placement: dict[str, Placement] = {}
        # a sharded parameter, or its cast -> the leaf and the cast
        self.leaf_of: dict[str, tuple[str, Line | None]] = {}
        self.kept: dict[str, str] = {}  # whole copies made once a step
        self.renamed: dict[str, str] = {}  # a partial value -> its reduction
        self.started: dict[str, int] = {}  # transfers of each kind
        self.shared: dict[str, str] = {}  # whole copies that a line and its repetitions for other micro-batches read
        self.by = max((r for r in zero.records), key=lambda r: r.stage).name
        self.local = Placement("local", zero.batch_axes)
        # gradients and sums by the names under which the backward makes them, and what a loop adds them up to
        update = next((x for x in program.lines if x.op == "update"), None)
        self.totals = {x.args[0]: x.out[0].name for x, _ in program.walk() if x.op == "accumulate"}
        summand: dict[str, str] = {total: name for name, total in self.totals.items()}
        self.grads: dict[str, str] = (
            {} if update is None else {str(summand.get(g, g)): leaf for leaf, g in update.attrs["grads"].items()}
        )
        self.added = {a for x in program.lines if x.op == "add" for a in x.args}
        self.of_maxima = {a for x in program.lines if x.op == "add" and x.attrs["op"] == "max" for a in x.args}
        self.sums = [summand.get(s, s) for s in (program.sums if update is None else update.attrs["sums"])]
        self.maxima: list[str] = [] if update is None else [str(summand.get(m, m)) for m in update.attrs["maxima"]]

    def run(self) -> Program:
        inputs = []
        for value in self.program.inputs:
            leaf = self.program.leaves.get(value.name)
            placement = (
                self.local if leaf is None else Placement("shard", leaf.layout.axes) if leaf.layout.axes else WHOLE
            )
            self.placement[value.name] = placement
            inputs.append(replace(value, placement=placement))
            if leaf is not None and leaf.role in ("params", "compute") and leaf.layout.axes:
                self.leaf_of[value.name] = (value.name, None)
        lines = self._lines(self.program.lines)
        outputs = tuple(self.renamed.get(o, o) for o in self.program.outputs)
        return replace(
            self.program, inputs=tuple(inputs), lines=tuple(lines), outputs=outputs, functions=self.functions.by_name
        )

    def _lines(self, lines: Sequence[Line]) -> list[Line]:
        out: list[Line] = []
        awaited = Counter(self._owner(leaf) for leaf in self.grads.values())  # gradients that each block still lacks
        ready: dict[int, list[str]] = defaultdict(list)
        sums: list[str] = []
        scales = [line for line in lines if line.attrs.get("scales") == "shards"]
        for line in lines:
            if (
                line.op == "cast"
                and line.args[0] in self.leaf_of
                and line.out[0].name not in self.sums
                and "micro" not in line.attrs
            ):
                # cast on the shard, where it is gathered
                self.leaf_of[line.out[0].name] = (line.args[0], line)
            elif line.op == "accumulate":
                continue  # placed with the gradient or the sum it adds
            elif line.op == "loop":
                out += self._keep(a for x in line.body for a in x.args)
                out.append(replace(line, body=tuple(self._lines(line.body))))
                out += self._after_loop()
            elif line.op == "update":
                out += self._update(line)
            elif line.attrs.get("scales") == "shards":
                out += self._scales(scales) if line is scales[0] else []
            else:
                if line.attrs.get("of_sums"):
                    # reads what the ranks' sums add up to; any other line reads this rank's own
                    line = line.rename(self.renamed)
                new, gathers = self._reads(line)
                out += [*gathers, self._placed(new)]
                for value in line.out:
                    if value.name in self.grads:
                        owner = self._owner(self.grads[value.name])
                        ready[owner].append(value.name)
                        awaited[owner] -= 1
                        if not awaited[owner]:
                            out += self._reduce_block(ready.pop(owner))
                    if value.name in self.sums:
                        sums.append(value.name)
                        if len(sums) == len(self.sums):
                            out += self._reduce_sums(sums)
                    if value.name in self.maxima:
                        out += self._reduce_sums([value.name], "max")
        return out

    def _param(self, name: str) -> Leaf:
        """The parameter that a value is to be the whole of."""
        return self.program.leaves[self.program.leaves[self.leaf_of[name][0]].master]

    def _owner(self, leaf: str) -> int:
        return self.program.owners.get(leaf, -1)

    # --- reading parameters ---

    def _reads(self, line: Line) -> tuple[Line, list[Line]]:
        """The line with the whole values of the sharded parameters it reads, and the lines that gather them."""
        wanted = [a for a in dict.fromkeys(line.args) if a in self.leaf_of]
        fresh = [a for a in wanted if self.zero.params(self._param(a))]
        lines = self._keep(a for a in wanted if a not in fresh)
        names = {a: self.kept[a] for a in wanted if a not in fresh}
        if repeats(line):
            return line.rename({**names, **{a: self.shared[a] for a in fresh}}), lines
        gathered, more = self._gather(fresh)
        self.shared = gathered or self.shared
        return line.rename({**names, **gathered}), lines + more

    def _scales(self, lines: Sequence[Line]) -> list[Line]:
        """Scales of whole leaves: the largest of all shards', in one reduction."""
        handle, calls, whole = self._handle("reduce"), list[Line](), [v for line in lines for v in line.out]
        for line in lines:
            held = [replace(self.values[a], placement=self.placement[a]).held(self.program.mesh) for a in line.args]
            parts = tuple(
                replace(v, name=self.names(f"{v.name}_shard"), placement=Placement(partial=self.axes, by="max"))
                for v in line.out
            )
            calls.append(
                replace(
                    line,
                    fn=self.functions.add("scales", on_shards(self.program.functions[line.fn].graph, held)),
                    out=parts,
                )
            )
        parts = tuple(v.name for line in calls for v in line.out)
        self.placement.update((v.name, WHOLE) for v in whole)
        start = Line("all_reduce_start", parts, (handle,), attrs={"axes": self.axes, "op": "max"}, by="fp8")
        return [*calls, start, Line("wait", (handle.name,), tuple(whole), by="fp8")]

    def _keep(self, args: Iterable[str]) -> list[Line]:
        """Gathers, once a step, the parameters that stay whole until its end."""
        wanted = [a for a in dict.fromkeys(args) if a in self.leaf_of and a not in self.kept]
        wanted = [a for a in wanted if not self.zero.params(self._param(a))]
        lines: list[Line] = []
        groups: dict[int, list[str]] = defaultdict(list)
        for a in wanted:
            groups[self._owner(self.leaf_of[a][0])].append(a)
        for group in groups.values():
            names, more = self._gather(group)
            self.kept.update(names)
            lines += more
        return lines

    def _gather(self, args: Sequence[str]) -> tuple[dict[str, str], list[Line]]:
        if not args:
            return {}, []
        lines, shards, out = [], [], []
        for a in args:
            path, cast = self.leaf_of[a]
            leaf = self.program.leaves[path]
            if cast is not None:
                value = Value(
                    self.names(f"{identifier(path)}_shard"),
                    leaf.shape,
                    cast.out[0].dtype,
                    Placement("shard", self.axes),
                )
                lines.append(replace(cast, out=(value,)))
                shards.append(value.name)
            else:
                shards.append(path)
            out.append(Value(self.names(identifier(path)), leaf.shape, self.values[a].dtype))
        handle = self._handle("gather")
        lines.append(Line("all_gather_start", tuple(shards), (handle,), attrs={"axes": self.axes}, by=self.by))
        lines.append(Line("wait", (handle.name,), tuple(out), by=self.by))
        for v in out:
            self.placement[v.name] = WHOLE
        return {a: v.name for a, v in zip(args, out, strict=True)}, lines

    def _handle(self, what: str) -> Value:
        number = self.started[what] = self.started.get(what, -1) + 1
        return Value(self.names(f"{what}_{number}"), (), torch.uint8, MOVING)

    # --- gradients and sums ---

    def _placed(self, line: Line) -> Line:
        """The line with the placements of its results: local as soon as it reads anything local."""
        local = line.op in ("part_index", "take_part") or any(self.placement.get(a, WHOLE) != WHOLE for a in line.args)
        out = []
        for value in line.out:
            summand = value.name in self.grads or value.name in (*self.sums, *self.maxima) or value.name in self.added
            by = "max" if value.name in self.maxima or value.name in self.of_maxima else "sum"
            placement = Placement(partial=self.zero.batch_axes, by=by) if summand else self.local if local else WHOLE
            self.placement[value.name] = placement
            out.append(replace(value, placement=placement))
        attrs = {**line.attrs, "axes": self.zero.batch_axes} if line.op == "part_index" else line.attrs
        return replace(line, out=tuple(out), attrs=attrs)

    def _reduce_block(self, names: list[str]) -> list[Line]:
        """The reduction of a block's gradients, right where the last of them is made; in a loop only of those that must
        not pile up whole."""
        leaf = {n: self.program.leaves[self.grads[n]] for n in names}
        if not self.totals:
            scatter = [n for n in names if self.zero.opt_state(leaf[n])]
            return self._reduce_scatter(scatter) + self._all_reduce([n for n in names if n not in scatter])
        scatter = [n for n in names if self.zero.grads(leaf[n]) and not self.whole_grads]
        lines = self._scatter(scatter)
        return lines + [self._accumulate(self.renamed.pop(n, n), self.totals[n]) for n in names]

    def _reduce_sums(self, names: Sequence[str], op: str = "sum") -> list[Line]:
        return (
            [self._accumulate(n, self.totals[n], op) for n in names] if self.totals else self._all_reduce(names, op=op)
        )

    def _accumulate(self, name: str, total: str, op: str = "sum") -> Line:
        self.placement[total] = self.placement[name]
        return Line(
            "accumulate",
            (name,),
            (replace(self.values[total], placement=self.placement[name]),),
            attrs={"op": op},
            by="accumulate",
        )

    def _after_loop(self) -> list[Line]:
        """What is left to reduce of what was added up: of shards over the axes that they are not sharded over, of the
        rest over all. Once a step."""
        groups: dict[int, list[str]] = defaultdict(list)
        for name, path in self.grads.items():
            if self.placement[self.totals[name]].partial:
                groups[self._owner(path)].append(name)
        lines = self._all_reduce([self.totals[s] for s in self.sums]) + self._all_reduce(
            [self.totals[m] for m in self.maxima], op="max"
        )
        for names in groups.values():
            shards = [n for n in names if self.placement[self.totals[n]].axes]
            scatter = [n for n in names if n not in shards and self.zero.opt_state(self.program.leaves[self.grads[n]])]
            lines += self._all_reduce([self.totals[n] for n in shards], self.others)
            lines += self._reduce_scatter([self.totals[n] for n in scatter])
            lines += self._all_reduce([self.totals[n] for n in names if n not in (*shards, *scatter)])
        return lines

    def _reduce_scatter(self, names: list[str]) -> list[Line]:
        """Shards of values, reduced over all axes."""
        lines = self._scatter(names)
        if self.others and names:
            lines += self._all_reduce([self.renamed[n] for n in names], self.others)
            self.renamed.update({n: self.renamed.pop(self.renamed[n]) for n in names})
        return lines

    def _scatter(self, names: list[str]) -> list[Line]:
        """Shards of values, reduced over the axis that they are sharded over."""
        if not names:
            return []
        handle = self._handle("scatter")
        out = [
            replace(self.values[n], name=self.names(f"{n}_shard"), placement=Placement("shard", self.axes, self.others))
            for n in names
        ]
        lines = [
            Line("reduce_scatter_start", tuple(names), (handle,), attrs={"axes": self.axes, "op": "sum"}, by=self.by),
            Line("wait", (handle.name,), tuple(out), by=self.by),
        ]
        for n, v in zip(names, out, strict=True):
            self.renamed[n], self.placement[v.name] = v.name, v.placement
            self.values[v.name] = v
        return lines

    def _all_reduce(self, names: Sequence[str], axes: tuple[str, ...] | None = None, op: str = "sum") -> list[Line]:
        lines: list[Line] = []
        if not names:
            return lines
        current, left = {n: n for n in names}, list(axes or self.zero.batch_axes)
        while left:
            axis = left.pop(0)
            handle = self._handle("reduce")
            sources = tuple(current.values())
            out = [
                replace(self.values[s], name=self.names(f"{n}_sum"), placement=self.placement[s].left(left))
                for n, s in current.items()
            ]
            lines.append(
                Line("all_reduce_start", sources, (handle,), attrs={"axes": (axis,), "op": op}, by="data_parallel")
            )
            lines.append(Line("wait", (handle.name,), tuple(out), by="data_parallel"))
            for n, v in zip(names, out, strict=True):
                self.placement[v.name], self.values[v.name], current[n] = v.placement, v, v.name
        self.renamed.update(current)
        return lines

    # --- the update ---

    def _update(self, line: Line) -> list[Line]:
        """The update on shards, and the whole parameters made anew where they rest whole."""
        zero, before, rename, groups = self.zero, [], dict(self.renamed), defaultdict(list)
        aliases: dict[str, str] = {}
        for path in line.args:
            leaf = self.program.leaves.get(path)
            if leaf is not None and leaf.role == "params" and not leaf.layout.axes and zero.opt_state(leaf):
                value = Value(
                    self.names(f"{identifier(path)}_shard"), leaf.shape, leaf.dtype, Placement("shard", self.axes)
                )
                before.append(Line("take_shard", (path,), (value,), attrs={"axes": self.axes}, by=self.by))
                rename[path] = value.name
                aliases[value.name] = path
                if path in line.writes:
                    groups[self._owner(path)].append(path)
        grads = {leaf: self.renamed.get(g, g) for leaf, g in line.attrs["grads"].items()}
        totals = {kind: tuple(self.renamed.get(name, name) for name in line.attrs[kind]) for kind in ("sums", "maxima")}
        attrs = {**line.attrs, **totals, "grads": grads, "leaf": aliases}
        out = [*before, replace(line.rename(rename), attrs=attrs, writes=tuple(rename.get(w, w) for w in line.writes))]
        for paths in groups.values():
            handle = self._handle("gather")
            values = [replace(self.values[p], name=self.names(f"{identifier(p)}_new")) for p in paths]
            out.append(
                Line(
                    "all_gather_start",
                    tuple(rename[p] for p in paths),
                    (handle,),
                    attrs={"axes": self.axes},
                    by=self.by,
                )
            )
            out.append(Line("wait", (handle.name,), tuple(values), by=self.by))
            out.append(Line("assign", (*paths, *(v.name for v in values)), writes=tuple(paths), by=self.by))
        return out
