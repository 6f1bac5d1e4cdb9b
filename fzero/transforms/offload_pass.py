"""Inserts copies from and to host memory and disk: the operands of every op are copied to the tier on which it runs,
and written state is copied back to the tier that stores it.

Ops run on the device, except calls of the optimizer most of whose state is stored on another tier: these run on the
host, all of them or a share, and gradients are sent to them. Gradients that are held, for the norm of all gradients or
for the next micro-batch, are held where their update reads them (`offload_analysis.py`), or on disk, in tensors that
the step writes after each backward and reads before each update. An offloaded parameter is copied again for every op
that reads it. In an evaluation, masters are cast on the host; a training step reads the copies of
transforms/compute_copies_pass.py. All values that are copied for one op are copied together. An update that directly
follows its backward does not read tensors again that the backward has read from disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fzero.ir.attributes import BufferAttrs, CopyAttrs
from fzero.ir.ops.rollback import Rollback
from fzero.ir.program import Function, Instruction, Program, Value, moving, repeats, stored_placement
from fzero.ir.value_names import Names
from fzero.sharding.layout import Leaf
from fzero.transforms.accumulate import loop_totals
from fzero.transforms.offload import Offload
from fzero.transforms.offload_analysis import known_last, no_gradients, saved_activations, update_ops
from fzero.transforms.speculate_pass import with_old_values


@dataclass(frozen=True)
class UpdatePlacement:
    """Where the update of offloaded state runs, and where gradients wait for it.

    Attributes:
        on_device: the offloaded tensors that the device updates, from `offload_analysis.updated_on_device`.
        waiting: the gradients that are held in host memory, from `offload_analysis.waiting_on_host`.
        on_disk: pairs of a gradient that is held on disk and the tensor that stores it.
    """

    on_device: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    on_disk: tuple[tuple[str, str], ...] = ()


def rewrite(program: Program, options: UpdatePlacement) -> Program:
    """Inserts copies between memory tiers around the ops of a program, those of old values that speculative updates
    overwrite included.

    Precondition: the update is partitioned and hoisted, and every value is on the device.
    """
    program, records = with_old_values(program), [t for t in program.transforms if isinstance(t, Offload)]
    return _TierRewrite(program, records, options.on_device, options.waiting, dict(options.on_disk)).run()


@dataclass(frozen=True)
class GradientLeaves:
    """The tensors that store gradients on disk."""

    leaves: tuple[Leaf, ...] = field(compare=False)


def with_gradient_leaves(program: Program, options: GradientLeaves) -> Program:
    """Returns the program with the tensors that store gradients added to its inputs.

    Precondition: the update is partitioned.
    """
    new = {leaf.path: leaf for leaf in options.leaves}
    values = (Value(x.path, x.shape, x.dtype, stored_placement(x.layout)) for x in new.values())
    return replace(program, inputs=(*program.inputs, *values), leaves={**program.leaves, **new})


class _TierRewrite:
    """The rewrite of one program: visits its ops in order, and inserts the copies that each of them needs.

    It keeps track of the tiers on which each value exists, and delays some ops: stores of gradients on disk and
    accumulations on the host come a block later, so that they overlap the computation of that block.
    """

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
        # by value: its name on each tier on which it exists, if not only where it was computed
        self.lies: dict[str, dict[str, str]] = {}
        self.casts: dict[str, Instruction] = {}  # casts of parameters that are copied again for every reader
        self.streams = any("params" in r.of for r in records)
        self.on_device = on_device
        self.parts: set[str] = set()  # shards taken of unsharded state
        self.scalars: set[str] = set()  # scalars that calls of the optimizer return
        # copies on the host: of activations from forward to backward, of gradients until their update
        self.resting: dict[str, str] = {}
        self.shared: dict[str, str] = {}  # values copied for an op and its repetitions for other micro-batches
        self.recent: list[dict[str, str]] = []  # tensors that the last backwards have read from disk, and their copies
        self.waiting, self.on_disk = waiting | on_disk.keys(), on_disk
        # by a tensor that stores gradients on disk: the copy that is to be written to it
        self.unwritten: dict[str, str] = {}
        self.leaving: dict[str, list[str]] = {}  # by a held gradient: all gradients of the same update
        self.known = known_last(program, no_gradients(program))
        totals = loop_totals(program)
        for op in update_ops(program):
            together = [a for a in op.args if a in self.waiting and a not in totals]
            self.leaving.update(dict.fromkeys(together, together))
        self.summands: list[
            Instruction
        ] = []  # accumulations on the host whose summands a loop has computed but not added yet

    def run(self) -> Program:
        for name, leaf in self.program.leaves.items():
            self.values[name] = replace(self.values[name], tier=leaf.layout.tier)
        self.saved = saved_activations(self.program)
        ops = self._rewrite_ops(self.program.instructions)
        inputs = tuple(self.values[v.name] for v in self.program.inputs)
        return replace(self.program, inputs=inputs, instructions=tuple(ops), functions=self.functions)

    def _rewrite_ops(self, ops: Iterable[Instruction]) -> list[Instruction]:
        return [new for op in ops for new in self._rewrite_op(op)]

    def _rewrite_op(self, op: Instruction) -> list[Instruction]:
        source = op.args[0] if op.args else ""
        if op.body:
            return self._with_body(op)
        if op.speculative and op.op in ("cast", "assign"):  # the old value stays on the tier of its tensor
            return self._on(self._tier(source), op)
        if op.op == "cast" and source in self.program.leaves and self._tier(source) != "device" and op.micro is None:
            return self._cast(op)
        if op.op == "take_shard":
            self.parts.add(op.out[0].name)
            return self._on("device" if self._tier(source) == "device" else "host", op)
        if op.op == "assign":
            return self._assign(op)
        if op.by == "optimizer" and op.op == "call":
            return self._update(op)
        if op.op == "accumulate" and op.out[0].name in self.waiting:
            self.summands.append(op)
            return []
        return self._compute(op)

    def _compute(self, op: Instruction) -> list[Instruction]:
        """Returns an op of loss and gradients on the device. After a backward come the sums and the writes that may
        run then."""
        ops, sums = self._on("device", op), list[Instruction]()
        if (op.is_backward or op.by == "fuse") and not repeats(op):
            # with separate memories, an update comes a block later (compiler/hoist_updates.py)
            num = 1 if self.program.mesh.unified_memory else 2
            before = self.recent.pop() if op.segment.index else {}
            self.recent = [*self.recent, {**before, **self._read_by(ops)}][-num:]
            sums = [*self._added(), *self._written()]
        return [*ops, *sums, *self._rest(op)]

    def _update(self, op: Instruction) -> list[Instruction]:
        """Returns a call of the optimizer on the side where it runs. It writes the copies of tensors that were brought
        for a recent backward."""
        self.scalars.update(v.name for v in op.out)
        for found in self.recent:
            written = (a for a in op.writes if a in found)
            self.lies |= {a: {**self._at(a), self._tier(found[a]): found[a]} for a in written}
        before = self._written() if self._stored(op) else []
        ops = self._on(self._side(op), op)
        if op.speculative:
            ops = [x.saying(speculative=True) if x.writes or x.tiers == ("disk", "host") else x for x in ops]
        return [*before, *ops]

    def _with_body(self, op: Instruction) -> list[Instruction]:
        """Returns an op that contains other ops, with these rewritten."""
        before = self._written()
        outside = {name: dict(tiers) for name, tiers in self.lies.items()}
        if op.op == Rollback.name:
            self.lies = {name: tiers for name, tiers in outside.items() if name not in self.program.leaves}
            self.recent = []
        body = (*self._rewrite_ops(op.body), *self._added())
        self.lies, self.recent = outside, []
        return [*before, replace(op, body=body)]

    def _side(self, op: Instruction) -> str:
        """Returns the side on which a call of the optimizer runs. It is the host if most of the state it reads is
        offloaded and not updated on the device, or if it reads accumulated gradients on the host and writes nothing."""
        if not op.writes and any(a in self.waiting and "device" not in self._at(a) for a in op.args):
            return "host"
        state = {a: self.values[a].nbytes for a in op.args if a in self.program.leaves or a in self.parts}
        off = {a: n for a, n in state.items() if "device" not in self._at(a)}
        return (
            "host"
            if off and self.on_device.isdisjoint(off) and 2 * sum(off.values()) >= sum(state.values())
            else "device"
        )

    def _is_late(self, op: Instruction) -> bool:
        """Whether an op of the optimizer runs after the held gradients have been computed: a non-speculative update, or
        an op that depends on all gradients."""
        return (
            op.by == "optimizer"
            and op.op == "call"
            and not op.speculative
            and bool(op.writes or not self.known.isdisjoint(op.args))
        )

    def _stored(self, op: Instruction) -> dict[str, str]:
        """Returns the gradients that an op reads from disk, each with the tensor that stores it."""
        return {a: self.on_disk[a] for a in op.args if a in self.on_disk} if self._is_late(op) else {}

    # --- the tiers of values ---

    def _tier(self, name: str) -> str:
        return self.values[name].tier if name in self.values else "device"

    def _at(self, name: str) -> dict[str, str]:
        """The tiers on which a value exists, with its name on each."""
        return self.lies.get(name) or {self._tier(name): name}

    def _on(self, tier: str, op: Instruction) -> list[Instruction]:
        """Returns the op on a tier, with the ops that copy its arguments there and its results back."""
        given, ops = self._bring(op, tier)
        names = {a: given.get(a) or self._at(a)[tier] for a in op.args}
        written = tuple(names[w] for w in op.writes)
        out = tuple(replace(v, tier=tier) for v in op.out)
        self.values.update((v.name, v) for v in out)
        op = op.saying(on="host") if tier == "host" and op.op == "call" else op
        fn = self._for_host(op.fn) if op.op == "call" and op.on_host else op.fn
        ops.append(replace(op, args=tuple(names[a] for a in op.args), writes=written, out=out, fn=fn))
        return ops + self._store({w: u for w, u in zip(op.writes, written, strict=True) if w != u}, tier)

    def _for_host(self, fn: str) -> str:
        """Returns the name of the subgraph compiled for the host, if the host is a different device."""
        if self.program.mesh.device_type == "cpu":
            return fn
        name = f"{fn}_on_host"
        self.functions.setdefault(
            name, Function(name, self.program.functions[fn].graph, self.program.functions[fn].writes, on="host")
        )
        return name

    # --- copies ---

    def _bring(self, op: Instruction, tier: str) -> tuple[dict[str, str], list[Instruction]]:
        """Copies an op's operands to its tier. Returns their names there, and the ops that copy them."""
        shared = {a: self.shared[a] for a in op.args if a in self.shared} if repeats(op) else {}
        stored = self._stored(op)
        absent = [a for a in self._absent(op, tier, stored) if a not in shared]
        # Many ops read each scalar that the optimizer computes, so it is copied once, in a separate transfer.
        scalars = [a for a in absent if a in self.scalars]
        names, ops = self._move(tier, scalars, scalars)
        self.lies |= {a: {**self._at(a), tier: names[a]} for a in scalars}
        absent = [a for a in absent if a not in scalars]
        given = self._buffers(op, absent, tier, ops)
        absent = [a for a in absent if a not in given]
        given |= {a: name for a in absent if (name := self._at_hand(a, stored))}
        given |= self._fetch(absent, stored, tier, ops)
        travel = [a for a in absent if self._tier(given[a]) != tier]
        arrived, more = self._move(tier, [given[a] for a in travel], travel)
        found = {**given, **{a: arrived[given[a]] for a in travel}}
        self.shared = self.shared if repeats(op) else found or self.shared
        return {**shared, **found}, ops + more

    def _absent(self, op: Instruction, tier: str, stored: Mapping[str, str]) -> list[str]:
        """Returns the operands of an op that are not on its tier, or whose held copies are elsewhere."""
        late = op.is_backward or self._is_late(op)
        waits = lambda a: a in stored or (late and a in self.resting)  # noqa: E731
        return [a for a in dict.fromkeys(op.args) if tier not in self._at(a) or waits(a)]

    def _at_hand(self, name: str, stored: Mapping[str, str]) -> str | None:
        """Returns the name of a value in memory, or of its held copy; None if it must be read from disk or cast."""
        if name in self.resting or name in self.casts or name in stored:
            return self.resting.get(name)
        return self._at(name).get("host") or self._at(name).get("device")

    def _fetch(
        self, names: Sequence[str], stored: Mapping[str, str], tier: str, ops: list[Instruction]
    ) -> dict[str, str]:
        """Returns the names of values that are read from disk, or cast from an offloaded tensor."""
        sources = {a: self.casts[a].args[0] if a in self.casts else stored.get(a, a) for a in names}
        disk = {s: a if a in stored else s for a, s in sources.items() if {*self._at(s)} == {"disk"}}
        read, more = self._move("host", list(disk), list(disk.values()), source="disk")
        ops += more
        found = {a: read[s] for a, s in sources.items() if s in read}
        for a, cast in ((a, self.casts[a]) for a in names if a in self.casts):
            name = self.names(f"{self.names.stem(sources[a])}_cast")
            value = replace(cast.out[0], name=name, tier="host")
            ops.append(self._made(replace(cast, args=(found.get(a, sources[a]),), out=(value,))))
            found[a] = name
        return found

    def _buffers(self, op: Instruction, absent: Sequence[str], tier: str, ops: list[Instruction]) -> dict[str, str]:
        """Returns buffers for tensors that an op writes but does not read, so that they need memory on its tier, but
        not their old values: the compute copies."""
        unified = self.program.mesh.unified_memory
        names = [
            a
            for a in absent
            if a in op.writes and self._role(a) == "compute" and (self._tier(a) == "disk" or not unified)
        ]
        if not names:
            return {}
        out = tuple(replace(self.values[n], name=self.names(f"{self.names.stem(n)}_new"), tier=tier) for n in names)
        ops.append(
            self._made(
                Instruction(
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

    def _move(
        self, tier: str, names: Sequence[str], called: Sequence[str], source: str = ""
    ) -> tuple[dict[str, str], list[Instruction]]:
        """Copies values to a tier, from the disk or between host and device. Returns the names of the copies by those
        of their sources, and a start with its wait."""
        if not names:
            return {}, []
        ending = "" if tier == "device" else "_host"
        out = [
            replace(self.values[n], name=self.names(f"{self.names.stem(c)}{ending}"), tier=tier)
            for n, c in zip(names, called, strict=True)
        ]
        start = self._copy(tier, names, source=source)
        wait = self._made(Instruction("wait", (start.out[0].name,), tuple(out), by="offload"))
        return {n: v.name for n, v in zip(names, out, strict=True)}, [start, wait]

    def _copy(self, target: str, args: Sequence[str], writes: Sequence[str] = (), source: str = "") -> Instruction:
        """Returns the start of a copy. By default, what is copied to the host comes from the device."""
        source = source or ("device" if target == "host" else "host")
        stem = "disk_read" if source == "disk" else "disk_write" if target == "disk" else f"to_{target}"
        attrs, handle = CopyAttrs(source=source, target=target), moving(self.names.numbered(stem))
        return self._made(
            Instruction("copy_start", tuple(args), (handle,), attrs=attrs, writes=tuple(writes), by="offload")
        )

    def _store(self, written: dict[str, str], tier: str) -> list[Instruction]:
        """Returns the ops that copy written values back to the tensors of the state. `written` maps each tensor to its
        copy."""
        ops: list[Instruction] = []
        back: dict[str, list[str]] = defaultdict(list)
        for target in written:
            if target in self.program.leaves:
                back[self._tier(target)].append(target)
            else:  # a shard of a tensor that is written unsharded later
                self.lies[target] = {tier: written[target]}
        if tier == "device" and back["disk"]:
            names, ops = self._move("host", [written[t] for t in back["disk"]], back["disk"])
            written = {**written, **{t: names[written[t]] for t in back["disk"]}}
        for to, targets in back.items():
            if targets and to == tier:
                ops.append(
                    Instruction(
                        "assign", (*targets, *(written[t] for t in targets)), writes=tuple(targets), by="optimizer"
                    )
                )
            elif targets:
                args = (*targets, *(written[t] for t in targets))
                start = self._copy(to, args, targets)
                ops += [start, Instruction("wait", (start.out[0].name,), by="offload")]
        return ops

    def _made(self, op: Instruction) -> Instruction:
        self.values.update((v.name, v) for v in op.out)
        return op

    def _read_by(self, ops: Sequence[Instruction]) -> dict[str, str]:
        """Returns the tensors that these ops read from disk, and their copies."""
        reads = {x.out[0].name: x.args for x in ops if x.tiers == ("disk", "host")}
        return {
            leaf: v.name
            for x in ops
            if x.op == "wait" and x.args[0] in reads
            for leaf, v in zip(reads[x.args[0]], x.out, strict=True)
        }

    # --- special ops ---

    def _cast(self, op: Instruction) -> list[Instruction]:
        """Casts a parameter to its compute dtype: for each reader again if parameters are offloaded, or once if only
        masters are."""
        value = op.out[0]
        self.values[value.name] = replace(value, tier="host")
        if self.streams:
            self.casts[value.name] = op
            return []
        on_host = replace(value, name=self.names(f"{value.name}_host"))
        ops = self._on("host", replace(op, out=(on_host,)))
        start = self._copy("device", (on_host.name,))
        return [*ops, start, self._made(Instruction("wait", (start.out[0].name,), (value,), by="offload"))]

    def _assign(self, op: Instruction) -> list[Instruction]:
        """Writes values to tensors of the state: in place if the tensor is stored on the device; otherwise the values
        are copied."""
        pairs = dict(zip(op.args[: len(op.writes)], op.args[len(op.writes) :], strict=True))
        here = [t for t in pairs if self._tier(t) == "device"]
        ops = (
            self._on("device", replace(op, args=(*here, *(pairs[t] for t in here)), writes=tuple(here))) if here else []
        )
        for tier in ("device", "host"):
            ops += self._store({t: s for t, s in pairs.items() if t not in here and self._tier(s) == tier}, tier)
        return ops

    # --- values that are held on the host or on disk ---

    def _rest(self, op: Instruction) -> list[Instruction]:
        """Returns copies to the host of a block's saved values, and of the gradients of an update as soon as all of
        them have been computed."""
        ops: list[Instruction] = []
        for names in (
            [v.name for v in op.out if v.name in self.saved],
            *(self._complete(v.name) for v in op.out if v.name in self.waiting),
        ):
            copies, more = self._move("host", names, names)
            self.resting |= {n: copy for n, copy in copies.items() if n not in self.on_disk}
            # A gradient that is stored on disk also has a copy on the host. Ops that run before all gradients are known
            # (such as its part of a norm, or a speculative update) read that copy; later ops, those of a rollback
            # among them, read the gradient from disk (`_stored`).
            self.lies |= {n: {**self._at(n), "host": copy} for n, copy in copies.items() if n in self.on_disk}
            self.unwritten |= {self.on_disk[n]: copy for n, copy in copies.items() if n in self.on_disk}
            ops += more
        return [*ops, *self._written()] if self.program.mesh.unified_memory else ops

    def _written(self) -> list[Instruction]:
        """Returns the ops that write gradients to disk. They come a block after the copies to the host, so that the
        device runs another block meanwhile."""
        written, self.unwritten = self.unwritten, {}
        return self._store(written, "host") if written else []

    def _complete(self, grad: str) -> list[str]:
        """Returns the gradients of an update if this is the last of them to be computed, otherwise none."""
        together = self.leaving.pop(grad)
        return [] if any(a in self.leaving for a in together) else together

    def _added(self) -> list[Instruction]:
        """Returns the ops that add up micro-batches on the host. They come a block later, so that the device runs
        another block meanwhile."""
        ops, copies = list[Instruction](), dict[str, str]()
        if self.summands:
            copies, ops = self._move("host", parts := [op.args[0] for op in self.summands], parts)
        for op in self.summands:
            total = replace(op.out[0], tier="host")
            ops.append(self._made(replace(op, args=(copies[op.args[0]],), out=(total,))))
        self.summands = []
        return ops
