"""Sends parameters and gradients encoded (transforms/compress_codes.py): rewrites the transfers that
transforms/zero_pass.py has inserted, one at a time.

    w_codes = encode(params['w'])                 # once per step, before all ops that read it, from the stored value
    w = decode(all_gather(w_codes))

    codes = encode_grads(d_w, ...)                # all gradients of a block: the parts for all ranks, concatenated
    d_w_shard, ... = decode_sum(all_to_all(codes))

If the sum is needed unsharded, it is encoded again (`recode`) and gathered, and every rank decodes the same bits. Codes
of parameters are sharded like the parameter, and are gathered over several axes as the parameter would be; codes of
gradients differ on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from fzero._compat import compat
from fzero.errors import FzeroValueError
from fzero.ir.attributes import GatherAttrs, ScatterAttrs
from fzero.ir.from_graph import Functions
from fzero.ir.ops import STARTS
from fzero.ir.program import REPLICATED, Instruction, Placement, Program, Value, moving
from fzero.ir.value_names import Names
from fzero.ops.block_quantization import BLOCK
from fzero.sharding.layout import Leaf
from fzero.sharding.placements import Shard
from fzero.trace.recorder import Recorded
from fzero.transforms import compress_codes
from fzero.transforms.compress import AxisFormats, Compress
from fzero.transforms.compress_codes import GRADS, PARAMS, Form, Format, Wire
from fzero.transforms.transform import find
from fzero.transforms.zero_placement import Zero

_GATHER = "all_gather_start"
_REDUCTIONS = ("reduce_scatter_start", "all_reduce_start")
_KEEPS = ("wait", "accumulate", "reshape", "split_parts", "add")
"""The ops whose results are the same gradients as their arguments, in another form."""


@dataclass(frozen=True)
class Encoding:
    """How the parallel transforms shard each parameter and, for "auto", the formats that were chosen."""

    zero: Zero = field(compare=False)
    formats: tuple[AxisFormats, ...] = ()


def rewrite(program: Program, options: Encoding) -> Program:
    """Returns the program with encoded transfers.

    Precondition: the program is sharded over the mesh, and its update is not partitioned yet.

    Raises:
        FzeroValueError: an axis of the transform is not on the mesh; or nothing is sent encoded over it, or over any
            axis.
    """
    spec = find(program.transforms, Compress)
    assert spec is not None
    return _Coding(program, spec.chosen(options.formats) if spec.auto else spec, options.zero).run()


def ladders(program: Program, zero: Zero) -> list[list[AxisFormats]]:
    """Returns the formats that "auto" may choose for each axis, from no compression to the most compression.

    The program is one whose transfers are not encoded yet. 4-bit gradients are offered only on axes that reduce sums of
    another axis.

    Raises:
        FzeroValueError: the axis of the transform is not on the mesh; nothing could be sent encoded.
    """
    spec = find(program.transforms, Compress)
    assert spec is not None
    coding = _Coding(program, spec, zero)
    coding.check_axes()
    if coding.alone:
        return []
    found = list[list[AxisFormats]]()
    for axis in (a for a in program.mesh.axes if a in coding.axes and spec.axis in (None, a)):
        able = coding.travels(axis)
        rungs = [AxisFormats(axis)]
        rungs += [AxisFormats(axis, None, name) for name in ("bf16", "int8") if name in able.grads]
        rungs += [rungs[-1]._replace(params="int8")] if able.params else []
        rungs += [rungs[-1]._replace(grads="int4")] if "int4" in able.grads and not able.first else []
        found += [rungs] if len(rungs) > 1 else []
    if not found:
        raise coding.does_nothing("does nothing")
    return found


class _Travels(NamedTuple):
    """What could be sent encoded over an axis: whether any parameters; the formats that would change gradients; and
    whether the axis is the first over which some gradient is reduced."""

    params: bool
    grads: frozenset[str]
    first: bool


class _Bundle(NamedTuple):
    """The gradients of one transfer that vary over the same axes, and the ops that send them.

    Attributes:
        encode: the call that encodes them.
        sent, come: the buffers before and after the all_to_all.
        add: the call that decodes and adds them up.
        wholes: the gathered encoded sums, if the sums are to be unsharded.
        decode: the last call.
    """

    encode: Instruction
    sent: Sequence[Value]
    come: Sequence[Value]
    add: Instruction
    wholes: Sequence[Value]
    decode: Instruction


class _Coding:
    """The rewrite of one program: visits its ops in order, and replaces the transfers that are encoded.

    A parameter keeps its codes from the first gather that needs them, so that each stored value is encoded once per
    step.
    """

    def __init__(self, program: Program, spec: Compress, zero: Zero):
        self.program, self.spec, self.mesh = program, spec, program.mesh
        shared = {a for r in zero.specs for a in r.axes}.difference(zero.computed)
        self.axes = {a for a in shared if self.mesh.axes[a] > 1}  # over which parameters and gradients are sent
        # No named axis has two ranks, which an elastic run may come to.
        self.alone = bool(shared) and self.axes.isdisjoint(spec.axes or shared)
        self.values, self.names = program.values_by_name, Names(program.values())
        self.functions = Functions(program.functions)
        self.device = torch.device(compat.trace_device(self.mesh.device_type))
        ops = [op for op, _ in program.walk()]
        self.made = {v.name: op for op in ops for v in op.out}
        self.waits = {op.args[0]: op for op in ops if op.is_wait}
        self.leaf_of = {**self._params(ops), **self._grads()}
        # the names that some op reads as decoded values
        self.read = {a for x in ops for a in x.args if not self._takes_codes(x, a)}
        self.read |= {*program.outputs}
        self.codes: dict[str, Value] = {}  # the codes of a parameter, of its cast, or of a gathered shard of it
        self.wires: dict[str, Wire] = {}  # likewise
        self.num_deals = 0
        self.before: list[Instruction] = []  # calls that encode before an op, or before the loop that contains it
        self.starts: dict[str, Instruction] = {}  # by handle of a gather of codes: the gather before the rewrite
        self.done: set[str] = set()  # axes over which something is sent encoded
        self.gone: set[str] = set()  # handles whose waits have been replaced

    def run(self) -> Program:
        self.check_axes()
        ops = list[Instruction]()
        for op in self.program.instructions:
            new = self._rewrite_op(op)
            ops += [*self.before, *new]
            self.before = []
        self._check()
        read = {a for op in ops for x in op.with_body() for a in x.args} | {*self.program.outputs}
        idle = lambda x: x.op == "cast" and read.isdisjoint(v.name for v in x.out)  # noqa: E731
        kept = [replace(x, body=tuple(y for y in x.body if not idle(y))) if x.body else x for x in ops]
        ops = [x for x in kept if not idle(x)]
        return replace(self.program, instructions=tuple(ops), functions=self.functions.by_name)

    def check_axes(self) -> None:
        """Raises if the configuration names an axis that the mesh does not have."""
        if unknown := [a for a in self.spec.axes if a not in self.mesh.axes]:
            said = [f"{a!r}: the mesh has {self.mesh}" for a in unknown]
            raise FzeroValueError("compress", "unknown mesh axis", said, "name an axis of the mesh")

    # --- what is sent encoded ---

    def travels(self, axis: str) -> _Travels:
        """Returns what could be sent encoded over an axis."""
        ops = [x for x, _ in self.program.walk() if x.op in (_GATHER, *_REDUCTIONS) and x.axes == (axis,)]
        gathers = [x for x in ops if x.op == _GATHER]
        reductions = [(x, self._pairs(x)) for x in ops if x.op != _GATHER]

        def coded(of: str) -> bool:
            wires = (wire for op, pairs in reductions for wire in self._wires(op, pairs, GRADS[of]))
            return any(wire.format is not None for wire in wires)

        return _Travels(
            self.spec.params is not None and any(self._gathers_codes(x) for x in gathers),
            frozenset(of for of in GRADS if self.spec.grads and coded(of)),
            any(not self._is_sum(value.name) for _, pairs in reductions for value, _ in pairs),
        )

    def _gathers_codes(self, op: Instruction) -> bool:
        takes = [a for a in op.args if a in self.leaf_of and self._takes_codes(op, a)]
        format = PARAMS["int8"]
        return any(self._wire(a, format, math.prod(self._held(self.values[a]).shape)).format for a in takes)

    def _is_sum(self, name: str) -> bool:
        """Whether a gradient has been reduced over another axis before."""
        op = self.made.get(name)
        if op is None or op.op not in _KEEPS:
            return False
        if op.op == "wait":
            return self.made[op.args[0]].op in _REDUCTIONS
        # For a sum over micro-batches, check each summand; the first of them is zeros.
        position = [v.name for v in op.out].index(name)
        return any(self._is_sum(a) for a in op.args[position :: len(op.out)])

    def _params(self, ops: Sequence[Instruction]) -> dict[str, Leaf]:
        """Returns the parameter of each value that is one, a cast of one, or gathered from one of these."""
        found = {x.path: x for x in self.program.leaves.values() if x.role in ("params", "compute")}
        for op in ops:
            source = self.made.get(op.args[0]) if op.op == "wait" else None
            if op.op == "cast" and len(op.out) == 1:
                source = op
            if source is not None and source.op in (_GATHER, "cast"):
                found.update((v.name, found[a]) for v, a in zip(op.out, source.args, strict=False) if a in found)
        return found

    def _grads(self) -> dict[str, Leaf]:
        """Returns the parameter of each gradient, and of each value that becomes a gradient when it is accumulated and
        reduced."""
        found = dict[str, Leaf]()
        todo = [(g, self.program.leaves[path]) for path, g in self.program.grads.items()]
        while todo:
            name, leaf = todo.pop()
            op = self.made.get(name)
            if name in found or op is None:
                continue
            found[name] = leaf
            if op.op in _KEEPS:
                source = self.made[op.args[0]] if op.op == "wait" else op
                # The arguments of an op that adds up several values are all first summands, then
                # all second ones.
                todo += [(a, leaf) for a in source.args[[v.name for v in op.out].index(name) :: len(op.out)]]
        return found

    def _format(self, op: Instruction) -> Format | None:
        """The format of a transfer of parameters or gradients; None: uncompressed."""
        (axis,) = op.axes if len(op.axes) == 1 else ("",)
        of = self.spec.of_params if op.op == _GATHER else self.spec.of_grads
        return of(axis) if axis in self.axes else None

    def _takes_codes(self, op: Instruction, name: str) -> bool:
        """Whether an op gathers this value encoded, provided that the value has codes. It does not if the gather
        returns permuted shards of a dim."""
        if op.op != _GATHER or self._format(op) is None:
            return False
        return STARTS[_GATHER].arrives(op, self.values[name].placement).kind != "permuted"

    def _wire(self, name: str, format: Format, numel: int) -> Wire:
        """Returns the form in which a value is sent in parts of `numel` elements."""
        value, leaf = self.values[name], self.leaf_of[name]
        whole = self.program.leaves.get(leaf.master, leaf)
        refused = self.spec.refuses(whole) or value.dtype.itemsize == 1 or numel % BLOCK
        narrow = format.bits == 16 and value.dtype.itemsize == 2
        return Wire(None if refused or narrow else format, numel, value.dtype)

    def _held(self, value: Value) -> Form:
        return Form(value.local_shape(self.mesh), value.dtype)

    # --- ops ---

    def _rewrite_op(self, op: Instruction) -> list[Instruction]:
        if op.body:
            return [replace(op, body=tuple(new for x in op.body for new in self._rewrite_op(x)))]
        if op.op == _GATHER and (format := self._format(op)) and self.leaf_of.keys() & {*op.args}:
            return self._gather(op, format)
        if op.op == "wait" and op.args[0] in self.starts:
            return self._gathered(op, self.starts[op.args[0]])
        if op.op == "wait" and op.args[0] in self.gone:
            return []
        if op.op in _REDUCTIONS and (format := self._format(op)):
            return self._reduce(op, format)
        return [op]

    def _call(self, fn: str, graph: Recorded, args: Sequence[str], out: Sequence[Value]) -> Instruction:
        return Instruction("call", tuple(args), tuple(out), self.functions.add(fn, graph), by=self.spec.name)

    def _gather(self, op: Instruction, format: Format) -> list[Instruction]:
        """Returns the gather with codes in place of the values that are encoded, and the calls that encode those
        without codes."""
        takes = [a for a in op.args if a in self.leaf_of and self._takes_codes(op, a)]
        fresh = [a for a in takes if a not in self.codes]
        wires = {a: self._wire(a, format, math.prod(self._held(self.values[a]).shape)) for a in fresh}
        ops = self._encoded({a: wire for a, wire in wires.items() if wire.format is not None})
        sent = tuple(self.codes[a].name if a in takes and a in self.codes else a for a in op.args)
        if sent == op.args:
            return [op]
        self.done.update(op.axes)
        self.starts[op.out[0].name] = op
        return [*ops, replace(op, args=sent)]

    def _encoded(self, wires: dict[str, Wire]) -> list[Instruction]:
        """Encodes shards, and returns the ops that do it. Stored values are encoded once per step, before all ops that
        read them (these ops go to `self.before`)."""
        ops, self.wires = list[Instruction](), {**self.wires, **wires}
        stored_paths = {a: path for a in wires if (path := self._resting(a)) is not None}
        self.codes |= {a: self.codes[path] for a, path in stored_paths.items() if path in self.codes}
        early = {path: wires[a] for a, path in stored_paths.items() if a not in self.codes}
        for group, place in ((early, self.before), ({a: w for a, w in wires.items() if a not in stored_paths}, ops)):
            if group:
                given = tuple(self._held(self.values[a]) for a in group)
                made = [self._coded(a, wire) for a, wire in group.items()]
                graph = compress_codes.shard_encoder(given, tuple(group.values()), self.device)
                place.append(self._call("encode", graph, [*group], made))
        self.codes |= {a: self.codes[path] for a, path in stored_paths.items()}
        return ops

    def _resting(self, name: str) -> str | None:
        """Returns the stored parameter that a value is, or is cast from; None for other values. Codes are made from the
        stored values."""
        made = self.made.get(name)
        source = name if made is None else made.args[0] if made.op == "cast" else None
        return source if source in self.program.leaves else None

    def _coded(self, name: str, wire: Wire) -> Value:
        """Returns the codes of a shard, which are sharded as the shard is."""
        at = replace(self.values[name].placement, dims=())
        shape = (wire.sent * self.mesh.axis_size(at.axes), 1)
        self.codes[name] = Value(self.names(f"{self.names.stem(name)}_codes"), shape, torch.uint8, at)
        return self.codes[name]

    def _gathered(self, wait: Instruction, start: Instruction) -> list[Instruction]:
        """Returns the wait for codes, and the call that decodes those that any op except another gather reads."""
        size, out = self.mesh.axis_size(start.axes), list[Value]()
        decoded = list[tuple[Value, Value, Wire]]()
        for a, value in zip(start.args, wait.out, strict=True):
            if a not in self.codes or not self._takes_codes(start, a):
                out.append(value)
                continue
            coded = self.codes[a]
            come = replace(coded, name=self.names(f"{value.name}_codes"))
            come = replace(come, placement=STARTS[_GATHER].arrives(start, coded.placement))
            wire = self.wires[a]._replace(numel=self.wires[a].numel * size)
            self.codes[value.name], self.wires[value.name] = come, wire
            out.append(come)
            if value.name in self.read:
                decoded.append((come, value, wire))
        ops = [replace(wait, out=tuple(out))]
        if decoded:
            come, made, wires = zip(*decoded, strict=True)
            given = tuple(map(self._held, come))
            graph = compress_codes.decoder(given, wires, tuple(map(self._held, made)), self.device)
            ops.append(self._call("decode", graph, [v.name for v in come], made))
        return ops

    def _reduce(self, op: Instruction, format: Format) -> list[Instruction]:
        """Returns the encoded reduction; values that are not gradients keep the original one."""
        wait, pairs = self.waits[op.out[0].name], self._pairs(op)
        wires = self._wires(op, pairs, format)
        if all(w.format is None for w in wires):
            return [op]
        self.done.update(op.axes)
        self.gone.add(op.out[0].name)
        scatters = op.op == _REDUCTIONS[0]
        ops = self._dealt(op, [(*pair, wire) for pair, wire in zip(pairs, wires, strict=True)], scatters)
        if rest := [(a, v) for a, v in zip(op.args, wait.out, strict=True) if a not in self.leaf_of]:
            args, kept = zip(*rest, strict=True)
            ops += [replace(op, args=args), replace(wait, out=kept)]
        return ops

    def _pairs(self, op: Instruction) -> list[tuple[Value, Value]]:
        """Returns the gradients that a reduction takes, each with its result."""
        out = self.waits[op.out[0].name].out
        return [(self.values[a], v) for a, v in zip(op.args, out, strict=True) if a in self.leaf_of]

    def _wires(self, op: Instruction, pairs: Sequence[tuple[Value, Value]], format: Format) -> list[Wire]:
        """Returns the forms in which the gradients of a reduction are sent; none if the reduction is not a sum of
        gradients."""
        said, size = op.says(ScatterAttrs) if op.op == _REDUCTIONS[0] else None, self.mesh.axis_size(op.axes)
        if getattr(op.attrs, "reduction", "") != "sum" or (said is not None and said.rows):
            return []
        wires = list[Wire]()
        for value, out in pairs:
            unit = BLOCK if self.spec.refuses(self.leaf_of[value.name]) is None else 1
            held = math.prod(self._held(out).shape)
            # An all_reduce divides a gradient among the ranks, in parts that consist of complete
            # blocks.
            padded = -(-held // (size * unit)) * unit
            wires.append(self._wire(value.name, format, padded if said is None else held))
        return wires

    def _dealt(self, op: Instruction, moved: Sequence[tuple[Value, Value, Wire]], scatters: bool) -> list[Instruction]:
        """Returns the ops of a reduction: encode the summands, exchange them by an all_to_all, add them up. If the
        reduction leaves unsharded sums, the sums are then encoded, gathered and decoded."""
        (axis,) = op.axes
        # grouped by the axes over which the gradients vary
        bundles = dict[tuple[str, ...], list[tuple[Value, Value, Wire]]]()
        for value, out, wire in moved:
            own = tuple(a for a in self.mesh.axes if a in value.placement.varies_over)
            bundles.setdefault(own, []).append((value, out, wire))
        made = [self._bundle(axis, own, values, scatters) for own, values in bundles.items()]
        self.num_deals += 1
        ops = [x.encode for x in made]
        ops += self._moved(
            "all_to_all_start", "deal", axis, [v for x in made for v in x.sent], [v for x in made for v in x.come]
        )
        ops += [x.add for x in made]
        if not scatters:
            ops += self._moved(
                _GATHER, "gather_sum", axis, [v for x in made for v in x.add.out], [v for x in made for v in x.wholes]
            )
            ops += [x.decode for x in made]
        return ops

    def _bundle(
        self, axis: str, own: tuple[str, ...], values: Sequence[tuple[Value, Value, Wire]], scatters: bool
    ) -> _Bundle:
        """Returns the ops for gradients that vary over the same axes (`own`). The codes are exchanged by an all_to_all
        along `axis`."""
        sources, outs, wires = zip(*values, strict=True)
        size, made = self.mesh.axes[axis], tuple(map(self._held, outs))
        forms = compress_codes.bundles(wires, size)

        def named(ending: str, placement: Placement) -> list[Value]:
            kinds = ["codes" if form.dtype == torch.uint8 else "raw" for form in forms]
            names = [self.names(f"{kind}{ending}_{self.num_deals}") for kind in kinds]
            return [Value(n, form.shape, form.dtype, placement) for n, form in zip(names, forms, strict=True)]

        sent, come = named("", Placement("varying", own)), named("_dealt", Placement("varying", own))
        encoder = compress_codes.encoder(tuple(map(self._held, sources)), wires, size, self.device)
        encode = self._call("encode_grads", encoder, [v.name for v in sources], sent)
        names = [v.name for v in come]
        if scatters:
            add = self._call("decode_sum", compress_codes.adder(wires, size, made, self.device), names, outs)
            return _Bundle(encode, sent, come, add, [], add)
        left = tuple(a for a in own if a != axis)
        rest = Placement("varying", left) if left else REPLICATED
        parts, wholes = named("_part", replace(rest, dim_shards=((axis, Shard(0)),))), named("_sum", rest)
        add = self._call("recode", compress_codes.recoder(wires, size, self.device), names, parts)
        decoder = compress_codes.unbundler(wires, size, made, self.device)
        return _Bundle(
            encode, sent, come, add, wholes, self._call("decode_sums", decoder, [v.name for v in wholes], outs)
        )

    def _moved(self, op: str, name: str, axis: str, sent: Sequence[Value], come: Sequence[Value]) -> list[Instruction]:
        """Returns a transfer and its wait."""
        handle, attrs = moving(self.names.numbered(name)), GatherAttrs(axes=(axis,))
        start = Instruction(op, tuple(v.name for v in sent), (handle,), attrs=attrs, by=self.spec.name)
        return [start, Instruction("wait", (handle.name,), tuple(come), by=self.spec.name)]

    # --- errors if nothing is encoded ---

    def _check(self) -> None:
        """Raises if nothing is sent encoded, at all or over an axis that the configuration names."""
        if self.alone or (not self.program.assigns and self.spec.params is None):
            return
        idle = [a for a in self.spec.axes if self.mesh.axes[a] > 1 and a not in self.done]
        if self.done and (not idle or not self.program.assigns):
            return
        over = ", ".join(map(repr, idle))
        raise self.does_nothing(f"nothing would be sent encoded over {over}" if idle else "does nothing")

    def does_nothing(self, what: str) -> FzeroValueError:
        """Returns the error for a step whose tensors would all be sent uncompressed, with the reasons."""
        said = [f"{self.spec}: the mesh has {self.mesh}"]
        if not self.axes:
            said.append("no transform shards parameters or divides the batch")
        else:
            said.append(f"parameters are sharded, or the batch is divided, over {', '.join(sorted(self.axes))}")
            leaves = [x for x in self.program.leaves.values() if x.role == "params"]
            shown = [f"{x}: {why}" for x in leaves if (why := self.spec.refuses(x)) is not None]
            said += [*shown[:5], *([f"and {len(shown) - 5} more"] if len(shown) > 5 else [])]
        fix = (
            "leave compress out here; or select parameters of at least "
            "4,096 elements that are communicated over an axis"
        )
        return FzeroValueError("compress", what, said, fix)
