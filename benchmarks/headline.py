"""Whether 7 billion parameters train on one GPU of 24 GB, with 64 GB of host memory and an NVMe, and how fast: plans,
of which nothing is run.

    python benchmarks/headline.py                   # half a minute of CPU a row
    python benchmarks/headline.py --layers 4        # to see that it works

bf16 with fp32 masters, AdamW, clipped by the global norm, `remat("full")`, accumulated over micro-batches of 16,384
tokens. What rests where is found by `offload("auto")`, with 22 GB of the device, 58 GB of the host and 500 GB of the
disk. The rates are those of a known device, which the notes print.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from common import RESULTS, publish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

BUDGETS = {"memory_budget": "22GB", "host_budget": "58GB", "disk_budget": "500GB"}
# micro-batches, and whether all pass through a block before the next
CASES = ((1, True), (4, True), (8, True), (4, False))


def main() -> None:
    import plan_llama

    import fzero as fz
    from fzero.plan.devices import get_device

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="rtx4090", help="a known device, or the path of a calibration file")
    parser.add_argument("--layers", type=int, default=plan_llama.LAYERS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device, rows, data = get_device(args.device), [], []
    for micro_batches, vertical in CASES:
        step, params, batch = plan_llama.headline(micro_batches, args.layers, vertical)
        begin = time.process_time()
        plan = fz.lower(step, fz.AbstractMesh(data=1, device_type="cuda"), params, batch, device=device, **BUDGETS).plan
        took, tokens = time.process_time() - begin, batch[0].numel()
        peaks = [plan.peak_bytes, plan.host_peak_bytes, plan.disk_bytes]
        case = f"{micro_batches}{', vertical' if vertical and micro_batches > 1 else ''}"
        shares = ["" if plan.mfu is None else f"{plan.mfu:.0%}", f"{plan.speed_of_light:.0%}"]
        rows.append(
            [
                case,
                f"{tokens:,}",
                f"{plan.step_seconds:.1f}",
                f"{86400e-6 * tokens / plan.step_seconds:.0f}",
                *shares,
                *(f"{n / 1e9:.1f}" for n in peaks),
                plan.bound_by,
                f"{took:.0f}",
            ]
        )
        data.append(
            {
                "micro_batches": micro_batches,
                "vertical": vertical,
                "tokens": tokens,
                "step_seconds": plan.step_seconds,
                "peaks": peaks,
                "planned_in_cpu_seconds": took,
                "decisions": [d._asdict() for d in plan.decisions],
            }
        )
    rates = (
        device.host_memory_bandwidth,
        device.host_copy.bandwidth,
        device.disk_read.bandwidth,
        device.disk_write.bandwidth,
    )
    memory, link, read, write = (f"{rate / 1e9:.3g} GB/s" for rate in rates)
    notes = [
        f"Predicted, not measured: {device.name}, {device.source}",
        f"Assumed of the host: {memory} of memory, {link} to the device and from it; of the disk: {read} read, {write} "
        f"written",
        *(f"{row[0]}: {found['decisions'][0]['chosen']}" for row, found in zip(rows, data, strict=True)),
    ]
    columns = (
        "micro-batches",
        "tokens a step",
        "s a step",
        "M tokens a day",
        "MFU",
        "of attainable",
        "GPU GB",
        "host GB",
        "disk GB",
        "bound by",
        "planned in CPU s",
    )
    found = {"device": device.name, "budgets": BUDGETS, "cases": data}
    publish(
        "headline", "7 billion parameters on one GPU of 24 GB", columns, rows, notes, found, args.out, how="Planned"
    )


if __name__ == "__main__":
    main()
