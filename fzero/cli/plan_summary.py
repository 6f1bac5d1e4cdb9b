"""Answers `fzero plan` in the user's words, on one screen: does the step fit, how fast is it, what fills each memory,
what bounds it, which flags would help, and where the training script is.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._utils.units import duration, rate, size
from fzero.cli.hf_script import OfModel, Script
from fzero.compiler.lowered import Lowered
from fzero.plan.cost import DISK, HOST
from fzero.plan.memory import ROLE_NAMES
from fzero.plan.plan import Plan
from fzero.plan.process_memory import ProcessPart
from fzero.plan.render import TextTable, tables

AT_THE_LOSS = {"temporaries": "logits and loss", "activations": "activations and logits"}
"""The roles for a peak at the head of the model: at the last op that computes with the batch, which reads the
labels.
"""
TYPICAL_MFU = 0.4
"""Published runs on H100 reach 38 to 43 % (Dubey et al., The Llama 3 herd of models, 2024, table 4)."""
MUCH, LITTLE = 0.1, 0.5
MOST_SUGGESTED, MOST_NAMED = 2, 3
_QUEUES = {
    "compute": "computation",
    "host": "updates on the host",
    "disk": "the disk",
    "to_host": "copies to host memory",
    "to_device": "copies from host memory",
    "gather": "gathering parameters",
    "reduce": "reducing gradients",
    "send": "sends between pipeline stages",
    "recv": "sends between pipeline stages",
    "replicate": "sends to peer replicas",
}
"""The queues of a step (the part before ":" names the axis), in words."""


class Tier(NamedTuple):
    """The memory of a tier that a rank needs at its peak: by the program and by the process. `limit`: what both may
    take together, and `whose`: where that number is from; None if it is not known.
    """

    name: str
    program: int
    process: int
    limit: int | None
    whose: str = ""

    @property
    def total(self) -> int:
        return self.program + self.process

    @property
    def spare(self) -> int | None:
        return None if self.limit is None else self.limit - self.total


@dataclass(frozen=True)
class Answer:
    """The answer of `fzero plan`.

    Attributes:
        lowered, plan: those of the step.
        process: memory besides the program.
        samples, unit: the size of one rank's batch, and what it counts: tokens, images or samples.
        batch_ranks: the number of ranks that divide the batch.
        known: whether the device's memory is known: it was named, or measured.
        includes_process: whether the given budgets include the process.
        of, script: for a transformers model, the flags of the step, and its code.
        code: where the code was written.
        short: what a state needs that alone is larger than the memory.
    """

    lowered: Lowered
    plan: Plan
    process: Sequence[ProcessPart]
    samples: int
    unit: str
    batch_ranks: int
    known: bool
    includes_process: bool
    of: OfModel | None = None
    script: Script | None = None
    code: str = ""
    short: str = ""

    @property
    def num_ranks(self) -> int:
        return self.lowered.program.mesh.size

    @property
    def per_second(self) -> float:
        """Tokens, or samples, that all devices together process per second."""
        return self.samples * self.batch_ranks / self.plan.step_seconds if self.plan.step_seconds else 0.0

    @property
    def filled(self) -> dict[str, int]:
        """Bytes at the peak of the device, in words that users know, the largest first."""
        reads = [i for i, line in enumerate(self.plan.lines) if "batch[" in line]
        words = ROLE_NAMES | (AT_THE_LOSS if self.plan.peak_line.index in reads[1:] else {})
        return self._named(self.plan.breakdown, "device", words)

    def _named(self, by_role: Mapping[str, int], tier: str, words: Mapping[str, str]) -> dict[str, int]:
        """Returns bytes in words that users know, the largest first. If parameters are stored in fp32, their copies
        in the compute dtype are separate: fractions of offload refer to these.
        """
        program, found = self.lowered.program, {words[role]: n for role, n in by_role.items()}
        copies = [leaf for leaf in program.leaves.values() if leaf.role == "compute" and leaf.layout.tier == tier]
        if copies:
            n = sum(leaf.shard_bytes(program.mesh) for leaf in copies)
            found["copies of parameters for the computation"] = n
            # The plan counts the copies among the parameters.
            found[words["params"]] -= n
        return {word: n for word, n in sorted(found.items(), key=lambda item: -item[1]) if n}

    @property
    def slower(self) -> float | None:
        """Seconds per step at `TYPICAL_MFU`, if the plan is above it."""
        plan = self.plan
        return (
            plan.step_seconds * plan.mfu / TYPICAL_MFU
            if plan.mfu and plan.mfu > TYPICAL_MFU and plan.device.asynchronous
            else None
        )

    def process_bytes(self, where: str) -> int:
        return sum(part.nbytes for part in self.process if part.where == where)

    # --- memory ---

    @property
    def tiers(self) -> list[Tier]:
        """The memory tiers that the step needs, with the process."""
        plan, device, budget = self.plan, self.plan.device, self.lowered.budget
        on_device = device.asynchronous
        limit, whose = (device.memory_bytes, device.name) if self.known else (None, "")
        first = "device memory" if on_device else "memory"
        found = [Tier(first, plan.peak_bytes, self.process_bytes("device" if on_device else "host"), limit, whose)]
        host, disk = (budget.host, budget.disk) if budget else (None, None)
        if on_device:
            process = self.process_bytes("host")
            # The budget of the program is what the process leaves of the one that was given.
            limit = None if host is None else host + process * self.includes_process
            found.append(Tier("host memory", plan.host_peak_bytes, process, limit, "--host-budget"))
        if plan.disk_bytes:
            found.append(Tier("disk", plan.disk_bytes, 0, disk, "--disk-budget"))
        return found

    @property
    def fits(self) -> bool | None:
        """Whether the program and the process together fit each memory tier; None if no limit is known."""
        limits = [tier.spare >= 0 for tier in self.tiers if tier.spare is not None]
        budget = self.lowered.budget
        return all(limits) if limits else (True if budget and budget.nbytes is not None else None)

    def _verdict(self) -> str:
        """Returns whether the step fits, and how much is left, or what is missing and what to do."""
        over = [tier for tier in self.tiers if tier.spare is not None and tier.spare < 0]
        if over:
            lacks = "; ".join(
                f"{size(t.total)} of {t.name} with the process, {size(-(t.spare or 0))} more than "
                + (
                    f"the {size(t.limit or 0)} of {t.whose}"
                    if t.whose[:1] != "-"
                    else f"{t.whose} {size(t.limit or 0)}"
                )
                for t in over
            )
            return f"no: {lacks}. {self._way_out(over)}"
        budget = self.lowered.budget
        left = ", ".join(f"{size(t.spare)} of {t.name}" for t in self.tiers if t.spare is not None)
        parts = [f"{left} to spare"] if left else []
        if budget is not None and budget.nbytes is not None and not self._budget_is_the_devices:
            parts.insert(0, f"{size(budget.nbytes - self.plan.peak_bytes)} below --budget {size(budget.nbytes)}")
        if not parts:
            return "not known: --device NAME or --budget SIZE gives the memory that a rank has"
        return f"yes: {'; '.join(parts)}"

    @property
    def _budget_is_the_devices(self) -> bool:
        """Whether the budget is what the process leaves of the device's memory."""
        budget = self.lowered.budget
        if budget is None or budget.nbytes is None or not self.known:
            return False
        left = self.plan.device.memory_bytes - self.tiers[0].process
        return abs(left - budget.nbytes) < 0.02 * self.plan.device.memory_bytes

    def _way_out(self, over: Sequence[Tier]) -> str:
        """Returns what to do if the step does not fit."""
        budget = self.lowered.budget
        limited = budget is not None and (budget.nbytes is not None or budget.host is not None)
        if self.short:
            return f"The state alone is too large: {self.short}"
        if limited:
            return "--include-process counts the process in when it looks for a program"
        memory = self.plan.device.memory_bytes - over[0].process
        return f"--budget {size(memory).replace(' ', '')} looks for a program that fits, and says what would help"

    # --- the answer ---

    def rows(self) -> list[tuple[str, str]]:
        """Returns the lines of the answer: what each is about, and its text."""
        plan = self.plan
        speed = f"{self.per_second:,.0f} {self.unit}/s"
        speed += f", {self.per_second / self.num_ranks:,.0f} per device" if self.num_ranks > 1 else ""
        out = [
            ("fits", self._verdict()),
            ("step", f"{duration(plan.step_seconds)} for {self.samples * self.batch_ranks:,} {self.unit}: {speed}"),
        ]
        if plan.mfu is not None:
            text = f"{plan.mfu:.1%} of the peak FLOP/s of {plan.device.name}"
            if self.slower is not None:
                slow = self.per_second * plan.step_seconds / self.slower
                text += f"; published runs reach about {TYPICAL_MFU:.0%}, which is {slow:,.0f} {self.unit}/s"
            out.append(("MFU", text))
        out.append(("bound by", self._bound()))
        out += [(tier.name, self._of_tier(tier)) for tier in self.tiers]
        out += [("try", line) for line in self.better()[:MOST_SUGGESTED]]
        out += [("assumed", line) for line in self.assumptions()[:1]]
        out += [("code", self.code)] if self.code else []
        return out

    def _bound(self) -> str:
        """Returns the busiest queue, and how long computation waits."""
        plan = self.plan
        text = f"{_queue(plan.bound_by)}, busy {plan.busy[plan.bound_by]:.0%} of the step"
        if plan.channels and plan.exposed_seconds > 0.01 * plan.step_seconds:
            longest = max(plan.channels, key=lambda name: plan.channels[name].exposed_seconds)
            share = plan.exposed_seconds / plan.step_seconds
            text += f"; computation waits {share:.0%} of it, mostly for {_queue(longest)}"
        return text

    def _of_tier(self, tier: Tier) -> str:
        """Returns what a rank needs of a tier and of what limit, and what fills it most."""
        text = size(tier.total) + (f" of {size(tier.limit)}" if tier.limit is not None else "")
        if tier.name == "disk":
            return f"{text}: scratch files"
        parts = [f"program {size(tier.program)}"] if tier.program else []
        parts += [f"process {size(tier.process)}"] if tier.process else []
        text += f": {', '.join(parts)}"
        host = tier.name == "host memory"
        filled = self._named(self.plan.host_breakdown, "host", ROLE_NAMES) if host else self.filled
        most = [f"{word} {size(n)}" for word, n in [*filled.items()][:MOST_NAMED]]
        return text + (f" (most: {', '.join(most)})" if most else "")

    def heading(self) -> str:
        """Returns what was planned."""
        numel = sum(math.prod(self.lowered.params.leaves[i].shape) for i in self.lowered.params.distinct)
        name = self.plan.name if self.script is None else f"{self.script.name} ({self.script.size})"
        return (
            f"{name}, {_count(numel)} parameters, mesh {self.plan.mesh} of {self.num_ranks} x {self.plan.device.name}; "
            "predicted, not measured"
        )

    def text(self, width: int) -> str:
        """Returns the answer: one line, or a few, for each row."""
        lines = [*textwrap.wrap(self.heading(), width), ""]
        rows = self.rows()
        indent = max(len(name) for name, _ in rows) + 2
        before = ""
        for name, text in rows:
            first = f"{'' if name == before else name:<{indent}}"
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=first,
                subsequent_indent=" " * indent,
                break_on_hyphens=False,
                break_long_words=False,
            )
            before = name
        return "\n".join(lines)

    def details(self) -> list[TextTable]:
        """Returns the tables of `--details`: those of the plan, the process, and all that is assumed."""
        how = {True: "measured here", False: "assumed"}
        process = [(f"{p.what} ({p.where})", size(p.nbytes), how[p.measured]) for p in self.process]
        out = [*tables(self.plan), TextTable("the process", ("", "bytes", ""), process)]
        if more := [*self.assumptions()[1:], *self.better()[MOST_SUGGESTED:]]:
            out.append(TextTable("further notes", ("",), [(line,) for line in more], prose=True))
        return out

    def assumptions(self) -> list[str]:
        """Returns the assumptions besides the device's rates."""
        device, out = self.plan.device, list[str]()
        if device.peak_flops:
            dtype = "float32" if self.of is not None and self.of.precision == "fp32" else "bfloat16"
            share = device.flops[dtype] / device.peak_flops[dtype] if device.peak_flops.get(dtype) else None
            if share is not None:
                out.append(
                    f"matrix products in {dtype} reach {share:.0%} of the stated peak, and all transfers that can "
                    "overlap do. No GPU was measured"
                )
        if self.script is not None and self.script.mixture:
            out.append(
                "experts: fz.hf.experts_implementation, with which each expert computes a fixed number of rows, "
                "whatever the router chooses; the library's own ways need far more memory or cannot be compiled"
            )
        hosts = math.ceil(self.num_ranks / device.devices_per_host)
        if self.num_ranks > 1:
            intra, inter = (rate(device.links[name].bandwidth) for name in ("intra", "inter"))
            each = min(self.num_ranks, device.devices_per_host)
            text = f"{hosts} host{'s' * (hosts > 1)} of {each}; a device sends {intra} within a host"
            text += f", {inter} to others, all {each} of a host at once" if hosts > 1 else ""
            out.append(text)
        if device.asynchronous and device.host is not None and not device.machine:
            gb = f"{device.memory_bytes / 1e9:.4g}"
            out.append(f"memory: {gb} x 10^9 bytes of a card of {gb} GB, with what the process takes besides the plan")
        return out

    def better(self) -> list[str]:
        """Returns changes that would probably make the step faster, if the plan suggests any."""
        plan, of, out = self.plan, self.of or OfModel(), list[str]()
        hf = self.of is not None
        larger = f"--batch {2 * of.batch}" if hf else "a batch twice as large"
        channels, budget = plan.channels, self.lowered.budget
        uses = budget.uses((plan.peak_bytes, plan.host_peak_bytes, plan.disk_bytes)) if budget else []
        limited = {use.tier: use.peak < LITTLE * use.limit for use in uses if use.limit is not None}
        # What the host and the disk hold of a step may grow with the batch too.
        has_room = limited.get("host", True) and limited.get("disk", True)
        moved = {q for q in (DISK, "to_device", HOST) if q in channels and plan.busy[q] > plan.busy["compute"]}
        if moved:
            queue = max(moved, key=lambda q: plan.busy[q])
            hidden = plan.busy[queue] / max(plan.busy["compute"], 1e-9) * of.accumulate  # by so many micro-batches
            n, tier = max(2, of.accumulate, 2 ** round(math.log2(hidden))), "disk" if queue == DISK else "host"
            if not hf:
                out.append(f"more micro-batches: computation takes less time than the {tier}")
            elif not of.layerwise:
                out.append(
                    f"--accumulate {n} --layerwise (not tried): the state comes from the {tier} once for {n} "
                    "micro-batches, whose compute takes about as long"
                )
            elif n > of.accumulate:
                out.append(f"--accumulate {n} (not tried): compute then takes about as long as the {tier}")
        # Parameters and gradients do not grow with the batch, so a larger batch gives transfers more compute to hide
        # behind.
        elif self.num_ranks > 1 and plan.exposed_seconds > MUCH * plan.step_seconds and has_room:
            share = plan.exposed_seconds / plan.step_seconds
            out.append(f"{larger}: {share:.0%} of a step waits for transfers, which stay the same")
        if not out and limited.get("device") and has_room:
            out.append(f"{larger}: more than half of the memory is free")
        if of.offload != "none" and not plan.disk_bytes and not plan.host_persistent_bytes and plan.device.asynchronous:
            out.append("without --offload: all of the state fits on the device")
        return out

    def data(self) -> dict[str, Any]:
        """Returns the entries of the JSON output about a transformers model besides those of a plan."""
        assert self.script is not None
        return {
            "devices": self.num_ranks,
            f"{self.unit}_per_second": self.per_second,
            "filled": self.filled,
            "process": [part._asdict() for part in self.process],
            "process_bytes": self.tiers[0].process,
            "fits": self.fits,
            "tiers": [tier._asdict() for tier in self.tiers],
            "assumed": [self.plan.device.source, *self.assumptions()],
            "better": self.better(),
            "model": self.script.size,
            "unknown": list(self.script.unknown),
            "code": str(self.script),
        }


def samples_of(batch: Any) -> tuple[int, str]:
    """Returns the size of a rank's batch, and what it counts: tokens if it has a matrix of integers, otherwise
    samples.
    """
    tensors = [x for x in tree.leaves(batch) if isinstance(x, torch.Tensor) and x.ndim]
    tokens = next((x for x in tensors if x.ndim == 2 and x.dtype in (torch.int32, torch.int64)), None)
    if tokens is not None:
        return tokens.numel(), "tokens"
    return (tensors[0].shape[0] if tensors else 1), "samples"


def _queue(name: str) -> str:
    """Returns the name of a queue in words."""
    kind, _, axis = name.partition(":")
    return _QUEUES.get(kind, kind) + (f" over {axis}" if axis else "")


def _count(number: int) -> str:
    """Returns a number of parameters as text.

    Example:
        >>> _count(8_030_261_248), _count(304_326_632), _count(512)
        ('8.03 B', '304 M', '512')
    """
    for unit, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)
