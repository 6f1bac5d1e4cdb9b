"""Summarizes a plan in the user's words: whether a model fits, how fast it trains, what fills the memory, what is
assumed, what would help, and the code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fzero._utils.units import duration, rate, size
from fzero.cli.hf_script import OfModel, Script
from fzero.compiler.lowered import Lowered
from fzero.plan.cost import DISK, HOST
from fzero.plan.memory import ROLE_NAMES
from fzero.plan.plan import Plan
from fzero.plan.process_memory import ProcessPart
from fzero.plan.render import TextTable, assumed

AT_THE_LOSS = {"temporaries": "logits and loss", "activations": "activations and logits"}
"""The roles for a peak at the head of the model: at the last op that computes with the batch, which reads the
labels.
"""
TYPICAL_MFU = 0.4
"""Published runs on H100 reach 38 to 43 % (Dubey et al., The Llama 3 herd of models, 2024, table 4)."""
MUCH, LITTLE = 0.1, 0.5


@dataclass(frozen=True)
class Answer:
    """The answer of `fzero plan --hf`.

    Attributes:
        lowered, plan: those of the step.
        of, script: the flags of the step, and its code.
        process: memory besides the program.
    """

    lowered: Lowered
    plan: Plan
    of: OfModel
    script: Script
    process: Sequence[ProcessPart]

    @property
    def num_ranks(self) -> int:
        return self.lowered.program.mesh.size

    @property
    def per_second(self) -> float:
        """Tokens, or samples, that all devices together train on per second."""
        return self.script.samples * (self.num_ranks // self.of.tensor) / self.plan.step_seconds

    @property
    def filled(self) -> dict[str, int]:
        """Bytes at the peak of the device, in words that users know, the largest first."""
        reads = [i for i, line in enumerate(self.plan.lines) if "batch[" in line]
        words = ROLE_NAMES | (AT_THE_LOSS if self.plan.peak_line.index in reads[1:] else {})
        return self._named(self.plan.breakdown, "device", words)

    def _named(self, by_role: Mapping[str, int], tier: str, words: Mapping[str, str]) -> dict[str, int]:
        """Returns bytes in words that users know, the largest first. If parameters are stored in fp32, their copies
        in the compute dtype are a separate row: fractions of offload refer to these.
        """
        program, found = self.lowered.program, {words[role]: n for role, n in by_role.items()}
        copies = [leaf for leaf in program.leaves.values() if leaf.role == "compute" and leaf.layout.tier == tier]
        if copies:
            found[f"parameters' copies in {self.of.precision}"] = n = sum(
                leaf.shard_bytes(program.mesh) for leaf in copies
            )
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

    def tables(self) -> list[TextTable]:
        """Returns the tables before the code."""
        plan, unit = self.plan, self.script.unit
        speed = f"{self.per_second:,.0f} {unit}/s, {self.per_second / self.num_ranks:,.0f} per device"
        totals = [("model", f"{self._parameters() / 1e9:.3g} B parameters", self.script.size)]
        totals.append(("step", duration(plan.step_seconds), speed))
        if self.slower is not None:
            speed = f"{self.per_second * plan.step_seconds / self.slower:,.0f} {unit}/s, as in published runs"
            totals.append((f"at {TYPICAL_MFU:.0%} MFU", duration(self.slower), speed))
        totals.append(("bound by", plan.bound_by, f"{plan.busy[plan.bound_by]:.0%} busy"))
        if plan.mfu is not None:
            totals.append(
                (
                    "MFU",
                    f"{plan.mfu:.1%}",
                    f"of the device's peak; {plan.roofline_fraction:.0%} of the rate assumed to be attainable",
                )
            )
        where = "device" if plan.device.asynchronous else "host"
        rows = [(word, size(n), f"{n / plan.peak_bytes:.0%}") for word, n in self.filled.items()]
        rows.append(
            ("peak of the program", size(plan.peak_bytes), f"{size(plan.persistent_bytes)} of it between steps")
        )
        rows += self._process_rows(where, plan.peak_bytes)
        what = f"{self.script.name} on {self._devices()}"
        out = [
            TextTable(f"{what}: predicted, not measured", ("", "", ""), totals),
            TextTable(f"memory per {'device' if where == 'device' else 'process'}", ("", "bytes", ""), rows),
        ]
        if where == "device":
            rows = [(word, size(n), "") for word, n in self._named(plan.host_breakdown, "host", ROLE_NAMES).items()]
            rows += [("peak of the program", size(plan.host_peak_bytes), "")] if rows else []
            rows += self._process_rows("host", plan.host_peak_bytes)
            rows += [("on disk", size(plan.disk_bytes), "scratch files")] if plan.disk_bytes else []
            out.append(TextTable("host memory per process", ("", "bytes", ""), rows))
        out.append(assumed(plan))
        return out + (
            [TextTable("choices", ("", "chosen", "because"), plan.decisions, prose=True)] if plan.decisions else []
        )

    def _process_rows(self, where: str, peak: int) -> list[tuple[str, str, str]]:
        how = {True: "measured here", False: "assumed"}
        rows = [(p.what, size(p.nbytes), how[p.measured]) for p in self.process if p.where == where]
        return [*rows, ("process in total", size(peak + self.process_bytes(where)), "")]

    def _parameters(self) -> int:
        return sum(math.prod(self.lowered.params.leaves[i].shape) for i in self.lowered.params.distinct)

    def _devices(self) -> str:
        return f"{self.num_ranks} x {self.plan.device.name}"

    def assumptions(self) -> list[str]:
        """Returns the assumptions besides the device's rates."""
        device, out = self.plan.device, list[str]()
        if device.peak_flops:
            dtype = "bfloat16" if self.of.precision != "fp32" else "float32"
            share = device.flops[dtype] / device.peak_flops[dtype] if device.peak_flops.get(dtype) else None
            if share is not None:
                out.append(
                    f"efficiency: matrix products in {dtype} reach {share:.0%} of the stated peak, and all transfers "
                    "that can overlap do. No GPU was measured"
                )
        if self.script.mixture:
            out.append(
                "experts: fz.hf.experts_implementation, with which each expert computes a fixed number of rows, "
                "whatever the router chooses; the library's own ways need far more memory or cannot be compiled"
            )
        hosts = math.ceil(self.num_ranks / device.devices_per_host)
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.lowered.program.mesh.axes.items())
        if self.num_ranks > 1:
            intra, inter = (rate(device.links[name].bandwidth) for name in ("intra", "inter"))
            each = min(self.num_ranks, device.devices_per_host)
            text = f"mesh {mesh}: {hosts} host{'s' * (hosts > 1)} of {each}; a device sends {intra} within a host"
            text += f", {inter} to others, all {each} of a host at once" if hosts > 1 else ""
            out.append(text)
        if device.asynchronous and device.host is not None and not device.machine:
            gb = f"{device.memory_bytes / 1e9:.4g}"
            out.append(f"memory: {gb} x 10^9 bytes of a card of {gb} GB, with what the process takes besides the plan")
        return out

    def better(self) -> list[str]:
        """Returns flags that would make the step faster, if the plan knows any."""
        plan, of, out = self.plan, self.of, list[str]()
        channels = plan.channels
        moved = {q for q in (DISK, "to_device", HOST) if q in channels and plan.busy[q] > plan.busy["compute"]}
        if moved:
            queue = max(moved, key=lambda q: plan.busy[q])
            hidden = plan.busy[queue] / max(plan.busy["compute"], 1e-9) * of.accumulate  # by so many micro-batches
            n, tier = max(2, of.accumulate, 2 ** round(math.log2(hidden))), "disk" if queue == DISK else "host"
            if not of.layerwise:
                out.append(
                    f"--accumulate {n} --layerwise (not tried): the state comes from the {tier} once for {n} "
                    "micro-batches, whose compute takes about as long"
                )
            elif n > of.accumulate:
                out.append(f"--accumulate {n} (not tried): compute then takes about as long as the {tier}")
        # Parameters and gradients do not grow with the batch, so a larger batch gives transfers more compute to hide
        # behind.
        elif self.num_ranks > 1 and plan.exposed_seconds > MUCH * plan.step_seconds:
            share = plan.exposed_seconds / plan.step_seconds
            out.append(f"--batch {2 * of.batch}: {share:.0%} of a step waits for transfers, which stay the same")
        limit = self.lowered.budget.nbytes if self.lowered.budget else None
        if not out and limit and plan.peak_bytes < LITTLE * limit:
            out.append(f"--batch {2 * of.batch}: more than half of the memory is free")
        if of.offload != "none" and not plan.disk_bytes and not plan.host_persistent_bytes and plan.device.asynchronous:
            out.append("without --offload: all of the state fits on the device")
        return out

    def fits(self) -> str:
        """Returns the last line, with the host's memory if that has a budget."""
        limit = self.lowered.budget.nbytes if self.lowered.budget else None
        if limit is None:
            return f"{size(self.plan.peak_bytes)} at the peak"
        device, peak = self.plan.device, self.plan.peak_bytes
        on_device = device.asynchronous
        both = peak + self.process_bytes("device" if on_device else "host")
        text = f"fits {size(limit)}: {size(peak)} at the peak, {size(limit - peak)} to spare; {size(both)} with the "
        if both <= device.memory_bytes:
            text += f"process, of the {size(device.memory_bytes)} of {device.name}"
        else:
            text += f"process, more than the {size(device.memory_bytes)} of {device.name}: "
            text += "--include-process counts the process in"
        budget = self.lowered.budget
        if on_device and budget is not None and (host_peak := self.plan.host_peak_bytes):
            process = self.process_bytes("host")
            if budget.host is None:
                text += f"; {size(host_peak + process)} of host memory are used, which --host-budget limits"
            elif host_peak + process <= budget.host:
                text += f"; of {size(budget.host)} of host memory {size(host_peak + process)} are used"
            else:
                total, rest = size(host_peak + process), (budget.host - process) // 10**9
                text += f"; {total} of host memory are used with the process, more than {size(budget.host)}"
                text += f": if the host has no more, plan with --host-budget {rest}GB" if rest > 0 else ""
        return text

    def text(self) -> str:
        """Returns the lines after the tables."""
        lines = [f"assumed: {line}" for line in self.assumptions()]
        lines += [f"better: {line}" for line in self.better()]
        return "\n".join([*lines, "", "# ---- the code that was planned: train.py", str(self.script), self.fits()])

    def data(self) -> dict[str, Any]:
        """Returns the entries of the JSON output besides those of a plan."""
        return {
            "devices": self.num_ranks,
            f"{self.script.unit}_per_second": self.per_second,
            "filled": self.filled,
            "process": [part._asdict() for part in self.process],
            "process_bytes": self.process_bytes("device" if self.plan.device.asynchronous else "host"),
            "assumed": [self.plan.device.source, *self.assumptions()],
            "better": self.better(),
            "model": self.script.size,
            "unknown": list(self.script.unknown),
            "code": str(self.script),
        }
