"""Inserts host and disk copies: every line's operands are brought to the tier it runs on, and written leaves are stored
back to their home tier.

Lines compute on the device, but for those of the optimizer most of whose state rests elsewhere: they compute on the
host, all of them or a share, and gradients travel to them. Gradients that wait, for the norm of all or for the next
micro-batch, wait where their update reads them (`offload_analysis.py`); or on disk, in leaves that the step writes
behind each backward and reads before each update. A parameter that rests elsewhere comes anew to every line that reads
it. In an evaluation masters are cast on the host; a step reads the copies of transforms/compute_copies_pass.py. All
values that move for one line move together. An update that follows its backward at once does not read leaves again that
the backward has read from disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fzero.ir.attributes import BufferAttrs
from fzero.ir.ops import OPS
from fzero.ir.program import Function, Line, Program, Value, moving, repeats, resting
from fzero.ir.value_names import Names, identifier
from fzero.sharding.layout import Leaf
from fzero.transforms.accumulate_pass import loop_totals
from fzero.transforms.offload import Offload
from fzero.transforms.offload_analysis import known_last, no_gradients, saved_activations, update_lines


def rewrite(
    program: Program, on_device: frozenset[str], waiting: frozenset[str], on_disk: Iterable[tuple[str, str]]
) -> Program:
    """Places copies between tiers around the lines of a program whose update is cut.

    Args:
        program: to be rewritten.
        on_device: leaves off the device that are updated there, of `off_device.updated_on_device`.
        waiting: gradients that wait in host memory, of `off_device.waiting_on_host`.
        on_disk: the leaves in which gradients wait on disk.
    """
    records = [t for t in program.transforms if isinstance(t, Offload)]
    return _TierRewrite(program, records, on_device, waiting, dict(on_disk)).run()


def with_leaves(program: Program, leaves: Iterable[Leaf]) -> Program:
    """The program with the leaves that gradients wait in among its inputs."""
    new = {leaf.path: leaf for leaf in leaves}
    values = (Value(x.path, x.shape, x.dtype, resting(x.layout)) for x in new.values())
    return replace(program, inputs=(*program.inputs, *values), leaves={**program.leaves, **new})


class _TierRewrite:
    def __init__(
        self,
        program: Program,
        records: Sequence[Offload],
        on_device: frozenset[str],
        waiting: frozenset[str],
        on_disk: Mapping[str, str],
    ):
        self.program, self.records = program, records
        self.values, self.names = program.values(), Names(program.values())
        self.functions = dict(program.functions)
        # by value: the names under which it lies on each tier, if not just where it is made
        self.lies: dict[str, dict[str, str]] = {}
        self.casts: dict[str, Line] = {}  # of parameters that come to every reader anew
        self.streams = any("params" in r.of for r in records)
        self.on_device = on_device
        self.parts: set[str] = set()  # ranks' own of leaves that rest whole
        self.scalars: set[str] = set()  # what the optimizer makes of all leaves
        # activations that are on the host from forward to backward, gradients until their update
        self.resting: dict[str, str] = {}
        self.shared: dict[str, str] = {}  # values brought for a line and its repetitions for other micro-batches
        self.recent: list[dict[str, str]] = []  # leaves that the last backwards have read from disk, and their copies
        self.waiting, self.on_disk = waiting | on_disk.keys(), on_disk
        self.unwritten: dict[str, str] = {}  # by a leaf that gradients wait in the copy that it is to be written from
        self.leaving: dict[str, list[str]] = {}  # by a waiting gradient those of its update that are not made yet
        self.known = known_last(program, no_gradients(program))
        totals = loop_totals(program)
        for line in update_lines(program):
            together = [a for a in line.args if a in self.waiting and a not in totals]
            self.leaving.update(dict.fromkeys(together, together))
        self.summands: list[Line] = []  # of sums on the host, which a loop has made and not added yet

    def run(self) -> Program:
        for name, leaf in self.program.leaves.items():
            self.values[name] = replace(self.values[name], tier=leaf.layout.tier)
        self.saved = saved_activations(self.program)
        lines = self._lines(self.program.lines)
        inputs = tuple(self.values[v.name] for v in self.program.inputs)
        return replace(self.program, inputs=inputs, lines=tuple(lines), functions=self.functions)

    def _lines(self, lines: Iterable[Line]) -> list[Line]:
        return [new for line in lines for new in self._line(line)]

    def _line(self, line: Line) -> list[Line]:
        source = line.args[0] if line.args else ""
        if line.body:
            return self._with_body(line)
        if line.guess and line.op in ("cast", "assign"):  # an old value is kept on the tier of its leaf
            return self._on(self._tier(source), line)
        if (
            line.op == "cast"
            and source in self.program.leaves
            and self._tier(source) != "device"
            and line.micro is None
        ):
            return self._cast(line)
        if line.op == "take_shard":
            self.parts.add(line.out[0].name)
            return self._on("device" if self._tier(source) == "device" else "host", line)
        if line.op == "assign":
            return self._assign(line)
        if line.by == "optimizer" and line.op == "call":
            self.scalars.update(v.name for v in line.out)
            self.lies |= {
                a: {**self._at(a), self._tier(found[a]): found[a]}
                for found in self.recent
                for a in line.writes
                if a in found
            }
            before = self._written() if self._stored(line) else []
            lines = self._on(self._side(line), line)
            guessed = [x.saying(guess=True) if x.writes or x.op == "disk_read_start" else x for x in lines]
            return [*before, *(guessed if line.guess else lines)]
        if line.op == "accumulate" and line.out[0].name in self.waiting:
            self.summands.append(line)
            return []
        lines, sums = self._on("device", line), list[Line]()
        if (line.is_backward or line.by == "fuse") and not repeats(line):
            # there an update comes a block later (compiler/hoist_updates.py)
            num = 1 if self.program.mesh.unified_memory else 2
            before = self.recent.pop() if line.segment.index else {}
            self.recent = [*self.recent, {**before, **self._read_by(lines)}][-num:]
            sums = [*self._added(), *self._written()]
        return [*lines, *sums, *self._rest(line)]

    def _with_body(self, line: Line) -> list[Line]:
        """A line with the lines in it."""
        before = self._written()
        outside = {name: dict(tiers) for name, tiers in self.lies.items()}
        if OPS[line.op].reads_old:
            self.lies = {name: tiers for name, tiers in outside.items() if name not in self.program.leaves}
            self.recent = []
        body = (*self._lines(line.body), *self._added())
        self.lies, self.recent = outside, []
        return [*before, replace(line, body=body)]

    def _side(self, line: Line) -> str:
        """The side of an optimizer's line. It is the host if most of the state it reads is off the device and not
        updated there, or if it reads sums on the host and writes nothing."""
        if not line.writes and any(a in self.waiting and "device" not in self._at(a) for a in line.args):
            return "host"
        state = {a: self.values[a].nbytes for a in line.args if a in self.program.leaves or a in self.parts}
        off = {a: n for a, n in state.items() if "device" not in self._at(a)}
        return (
            "host"
            if off and self.on_device.isdisjoint(off) and 2 * sum(off.values()) >= sum(state.values())
            else "device"
        )

    def _is_late(self, line: Line) -> bool:
        """Whether a line of the optimizer comes after the waiting gradients are made: an update without a guess, or a
        line that depends on all gradients."""
        return (
            line.by == "optimizer"
            and line.op == "call"
            and not line.guess
            and bool(line.writes or not self.known.isdisjoint(line.args))
        )

    def _stored(self, line: Line) -> dict[str, str]:
        """The gradients that a line reads from disk, each with its leaf."""
        return {a: self.on_disk[a] for a in line.args if a in self.on_disk} if self._is_late(line) else {}

    # --- where values lie ---

    def _tier(self, name: str) -> str:
        return self.values[name].tier if name in self.values else "device"

    def _at(self, name: str) -> dict[str, str]:
        """The tiers on which a value lies, and its name there."""
        return self.lies.get(name) or {self._tier(name): name}

    def _on(self, tier: str, line: Line) -> list[Line]:
        """The line on a tier, with the lines that bring its arguments and take back its results."""
        given, lines = self._bring(line, tier)
        names = {a: given.get(a) or self._at(a)[tier] for a in line.args}
        written = tuple(names[w] for w in line.writes)
        out = tuple(replace(v, tier=tier) for v in line.out)
        self.values.update((v.name, v) for v in out)
        line = line.saying(on="host") if tier == "host" and line.op == "call" else line
        fn = self._for_host(line.fn) if line.op == "call" and line.on_host else line.fn
        lines.append(replace(line, args=tuple(names[a] for a in line.args), writes=written, out=out, fn=fn))
        return lines + self._store({w: u for w, u in zip(line.writes, written, strict=True) if w != u}, tier)

    def _for_host(self, fn: str) -> str:
        """The function for the host, if the host is another device."""
        if self.program.mesh.device_type == "cpu":
            return fn
        name = f"{fn}_on_host"
        self.functions.setdefault(
            name, Function(name, self.program.functions[fn].graph, self.program.functions[fn].writes, on="host")
        )
        return name

    # --- moving ---

    def _bring(self, line: Line, tier: str) -> tuple[dict[str, str], list[Line]]:
        """Brings a line's operands that are not on its tier: the names it gets there, and the lines that bring it."""
        shared = {a: self.shared[a] for a in line.args if a in self.shared} if repeats(line) else {}
        stored = self._stored(line)
        absent = [a for a in self._absent(line, tier, stored) if a not in shared]
        # many lines read a value that the optimizer makes of all leaves: it comes once, on its own
        scalars = [a for a in absent if a in self.scalars]
        names, lines = self._move(f"to_{tier}", scalars, scalars)
        self.lies |= {a: {**self._at(a), tier: names[a]} for a in scalars}
        absent = [a for a in absent if a not in scalars]
        given = self._buffers(line, absent, tier, lines)
        absent = [a for a in absent if a not in given]
        given |= {a: name for a in absent if (name := self._at_hand(a, stored))}
        given |= self._fetch(absent, stored, tier, lines)
        travel = [a for a in absent if self._tier(given[a]) != tier]
        arrived, more = self._move(f"to_{tier}", [given[a] for a in travel], travel)
        found = {**given, **{a: arrived[given[a]] for a in travel}}
        self.shared = self.shared if repeats(line) else found or self.shared
        return {**shared, **found}, lines + more

    def _absent(self, line: Line, tier: str, stored: Mapping[str, str]) -> list[str]:
        """The operands of a line that are not on its tier, or that wait elsewhere."""
        late = line.is_backward or self._is_late(line)
        waits = lambda a: a in stored or (late and a in self.resting)  # noqa: E731
        return [a for a in dict.fromkeys(line.args) if tier not in self._at(a) or waits(a)]

    def _at_hand(self, name: str, stored: Mapping[str, str]) -> str | None:
        """The name of a value in memory, or of the copy that waits there; None if it is read from disk, or cast."""
        if name in self.resting or name in self.casts or name in stored:
            return self.resting.get(name)
        return self._at(name).get("host") or self._at(name).get("device")

    def _fetch(self, names: Sequence[str], stored: Mapping[str, str], tier: str, lines: list[Line]) -> dict[str, str]:
        """Values that are read from disk, or cast from a leaf that rests elsewhere, under the names that they get."""
        sources = {a: self.casts[a].args[0] if a in self.casts else stored.get(a, a) for a in names}
        disk = {s: a if a in stored else s for a, s in sources.items() if {*self._at(s)} == {"disk"}}
        read, more = self._move("disk_read", list(disk), list(disk.values()))
        lines += more
        found = {a: read[s] for a, s in sources.items() if s in read}
        for a, cast in ((a, self.casts[a]) for a in names if a in self.casts):
            name = self.names(f"{identifier(sources[a])}_cast")
            value = replace(cast.out[0], name=name, tier="host")
            lines.append(self._made(replace(cast, args=(found.get(a, sources[a]),), out=(value,))))
            found[a] = name
        return found

    def _buffers(self, line: Line, absent: Sequence[str], tier: str, lines: list[Line]) -> dict[str, str]:
        """Buffers for leaves that a line writes and does not read, which need a place on its tier, not their value: the
        copies that are computed with."""
        unified = self.program.mesh.unified_memory
        names = [
            a
            for a in absent
            if a in line.writes and self._role(a) == "compute" and (self._tier(a) == "disk" or not unified)
        ]
        if not names:
            return {}
        out = tuple(replace(self.values[n], name=self.names(f"{identifier(n)}_new"), tier=tier) for n in names)
        lines.append(
            self._made(
                Line(
                    "buffer",
                    (),
                    out,
                    attrs=BufferAttrs(leaves=tuple(names), on="host" if tier == "host" else "device"),
                    by="offload",
                )
            )
        )
        return dict(zip(names, (v.name for v in out), strict=True))

    def _role(self, name: str) -> str:
        return self.program.leaves[name].role if name in self.program.leaves else ""

    def _move(self, how: str, names: Sequence[str], called: Sequence[str]) -> tuple[dict[str, str], list[Line]]:
        """Copies of values on another tier: the names of the copies by their sources, and a start and its wait."""
        if not names:
            return {}, []
        tier = "host" if how == "disk_read" else how.removeprefix("to_")
        ending = "" if tier == "device" else "_host"
        out = [
            replace(self.values[n], name=self.names(f"{identifier(c)}{ending}"), tier=tier)
            for n, c in zip(names, called, strict=True)
        ]
        handle = moving(self.names.numbered(how))
        lines = [
            Line(f"{how}_start", tuple(names), (handle,), by="offload"),
            Line("wait", (handle.name,), tuple(out), by="offload"),
        ]
        for line in lines:
            self._made(line)
        return {n: v.name for n, v in zip(names, out, strict=True)}, lines

    def _store(self, written: dict[str, str], tier: str) -> list[Line]:
        """The lines that take values back to the leaves they are for: `written` has the copy of each."""
        lines: list[Line] = []
        back: dict[str, list[str]] = defaultdict(list)
        for target in written:
            if target in self.program.leaves:
                back[self._tier(target)].append(target)
            else:  # a rank's part of a leaf that is written whole later
                self.lies[target] = {tier: written[target]}
        if tier == "device" and back["disk"]:
            names, lines = self._move("to_host", [written[t] for t in back["disk"]], back["disk"])
            written = {**written, **{t: names[written[t]] for t in back["disk"]}}
        for to, targets in back.items():
            how = "disk_write" if to == "disk" else f"to_{to}"
            if targets and to == tier:
                lines.append(
                    Line("assign", (*targets, *(written[t] for t in targets)), writes=tuple(targets), by="optimizer")
                )
            elif targets:
                handle = moving(self.names.numbered(how))
                args = (*targets, *(written[t] for t in targets))
                lines.append(self._made(Line(f"{how}_start", args, (handle,), writes=tuple(targets), by="offload")))
                lines.append(Line("wait", (handle.name,), by="offload"))
        return lines

    def _made(self, line: Line) -> Line:
        self.values.update((v.name, v) for v in line.out)
        return line

    def _read_by(self, lines: Sequence[Line]) -> dict[str, str]:
        """The leaves that these lines read from disk, and their copies."""
        reads = {x.out[0].name: x.args for x in lines if x.op == "disk_read_start"}
        return {
            leaf: v.name
            for x in lines
            if x.op == "wait" and x.args[0] in reads
            for leaf, v in zip(reads[x.args[0]], x.out, strict=True)
        }

    # --- lines of their own kind ---

    def _cast(self, line: Line) -> list[Line]:
        """A parameter in the dtype it is computed in: for each reader anew, or, of a master, once."""
        value = line.out[0]
        self.values[value.name] = replace(value, tier="host")
        if self.streams:
            self.casts[value.name] = line
            return []
        on_host = replace(value, name=self.names(f"{value.name}_host"))
        lines = self._on("host", replace(line, out=(on_host,)))
        handle = moving(self.names.numbered("to_device"))
        lines.append(self._made(Line("to_device_start", (on_host.name,), (handle,), by="offload")))
        lines.append(self._made(Line("wait", (handle.name,), (value,), by="offload")))
        return lines

    def _assign(self, line: Line) -> list[Line]:
        """Values put over leaves: in place if the leaf rests on the device; the others travel."""
        pairs = dict(zip(line.args[: len(line.writes)], line.args[len(line.writes) :], strict=True))
        here = [t for t in pairs if self._tier(t) == "device"]
        lines = (
            self._on("device", replace(line, args=(*here, *(pairs[t] for t in here)), writes=tuple(here)))
            if here
            else []
        )
        for tier in ("device", "host"):
            lines += self._store({t: s for t, s in pairs.items() if t not in here and self._tier(s) == tier}, tier)
        return lines

    # --- values that wait on the host, or on disk ---

    def _rest(self, line: Line) -> list[Line]:
        """Copies to the host of a block's saved values, and of the gradients for an update, as soon as all of them are
        made."""
        lines: list[Line] = []
        for names in (
            [v.name for v in line.out if v.name in self.saved],
            *(self._complete(v.name) for v in line.out if v.name in self.waiting),
        ):
            copies, more = self._move("to_host", names, names)
            self.resting |= {n: copy for n, copy in copies.items() if n not in self.on_disk}
            # a redo reads the host's copy of a leaf that was updated on a guess
            self.lies |= {n: {**self._at(n), "host": copy} for n, copy in copies.items() if n in self.on_disk}
            self.unwritten |= {self.on_disk[n]: copy for n, copy in copies.items() if n in self.on_disk}
            lines += more
        return [*lines, *self._written()] if self.program.mesh.unified_memory else lines

    def _written(self) -> list[Line]:
        """The gradients that have left for a disk, written: a block later, when the device has another to run
        meanwhile."""
        written, self.unwritten = self.unwritten, {}
        return self._store(written, "host") if written else []

    def _complete(self, grad: str) -> list[str]:
        """The gradients of an update whose last one is this, else none."""
        together = self.leaving.pop(grad)
        return [] if any(a in self.leaving for a in together) else together

    def _added(self) -> list[Line]:
        """Sums of micro-batches on the host: a block later, when the device has another to run meanwhile."""
        lines, copies = list[Line](), dict[str, str]()
        if self.summands:
            copies, lines = self._move("to_host", parts := [line.args[0] for line in self.summands], parts)
        for line in self.summands:
            total = replace(line.out[0], tier="host")
            lines.append(self._made(replace(line, args=(copies[line.args[0]],), out=(total,))))
        self.summands = []
        return lines
