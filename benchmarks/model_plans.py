"""Whether models of 7 billion to a trillion parameters fit, and how fast they train: plans, of which nothing is run.

    python benchmarks/model_plans.py                   # ten minutes of CPU; a case that is there is not planned again
    python benchmarks/model_plans.py --only 8b         # the cases whose name has this
    python benchmarks/model_plans.py --tables          # the results of the cases that are there

Each case is `fzero plan --hf CONFIG --devices ... --json` in a process of its own. Full training with AdamW and
clipping, bf16 with fp32 masters, sequences of 4,096 tokens (2,048 of the trillion).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, SOURCE, publish

_SIZES = {  # vocabulary, width, hidden, layers, key and value heads
    "Llama 2 7B": (32000, 4096, 11008, 32, 32),
    "Llama 3 8B": (128256, 4096, 14336, 32, 8),
    "Llama 2 13B": (32000, 5120, 13824, 40, 40),
    "Llama 3 70B": (128256, 8192, 28672, 80, 8),
    "1 T": (50304, 25600, 68352, 128, 200),
}
AUTO = ("--offload", "auto")
VERTICAL = ("--accumulate", "8", "--vertical")
HOME = (*AUTO, *VERTICAL, "--host-budget", "58GB", "--disk-budget", "2TB")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{f"{n}, 8 x 80 GB": (n, ("--devices", "8xh100")) for n in list(_SIZES)[:4]},
    **{f"{n}, 64 x 80 GB": (n, ("--devices", "64xh100")) for n in list(_SIZES)[:4]},
    **{f"{n}, 1 x 24 GB": (n, ("--devices", "1xrtx4090", *HOME)) for n in list(_SIZES)[:4]},
    "Llama 2 13B, 1 x 32 GB": (
        "Llama 2 13B",
        ("--devices", "1xrtx5090", *AUTO, *VERTICAL, "--host-budget", "256GB"),
    ),
    "1 T, 128 x 80 GB": (
        "1 T",
        ("--devices", "128xa100", "--seq", "2048", *AUTO, "--host-budget", "100GB", "--disk-budget", "1TB"),
    ),
}
"""The model and the flags of each case. Budgets are those of one rank."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--cases", type=Path, default=Path(tempfile.gettempdir()) / "fzero-model-plans")
    parser.add_argument("--tables", action="store_true", help="plan nothing")
    parser.add_argument("--seconds", type=int, default=1800, help="for a case; one that takes longer is left out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.cases.mkdir(parents=True, exist_ok=True)
    for name, (model, flags) in CASES.items():
        path = args.cases / f"{name.replace(' ', '_')}.json"
        if not args.tables and args.only.lower() in name.lower() and not path.exists():
            print(name, file=sys.stderr)
            path.write_text(json.dumps(planned(args.cases / f"{model.replace(' ', '_')}", model, flags, args.seconds)))
    found = {n: json.loads(p.read_text()) for n in CASES if (p := args.cases / f"{n.replace(' ', '_')}.json").exists()}
    write(found, args.out)


def planned(config: Path, model: str, flags: tuple[str, ...], limit: int) -> dict[str, Any]:
    """What a plan says, or why there is none."""
    from transformers import LlamaConfig  # pyright: ignore[reportMissingImports]

    vocab, width, hidden, layers, shared = _SIZES[model]
    LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=shared,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(config)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "fzero", "plan", "--hf", str(config), *flags, "--json"]
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"refused": f"not planned: it took more than {limit} s"}
    took = {"cpu_seconds": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, "flags": flags}
    if done.returncode == 1:
        lines = [x for x in done.stderr.splitlines() if not x.startswith("fzero.plan:")]
        return {"refused": "\n".join(lines), **took}
    if done.returncode:
        raise SystemExit(done.stderr)
    keep = ("step_seconds", "mfu", "peak_bytes", "host_peak_bytes", "disk_bytes", "bound_by", "tokens_per_second")
    data = json.loads(done.stdout)
    return {k: data[k] for k in (*keep, "process", "decisions", "better", "assumed", "devices")} | took


def write(found: dict[str, Any], out: Path) -> None:
    rows, notes = [], ["Predicted, not measured: no such machine was at hand."]
    for name, case in found.items():
        if "refused" in case:
            lines = case["refused"].splitlines()
            rows.append([name, "no", *[""] * 8])
            notes.append(f"{name}: {'; '.join(x.strip() for x in lines[: 6 if len(lines) > 6 else None])}")
            continue
        process = sum(p["nbytes"] for p in case["process"] if p["where"] == "device")
        sizes = (case["peak_bytes"], case["peak_bytes"] + process, case["host_peak_bytes"], case["disk_bytes"])
        speed = (f"{case['step_seconds']:.3g}", f"{case['tokens_per_second']:,.0f}", f"{case['mfu']:.0%}")
        rows.append([name, "yes", *(f"{n / 1e9:.1f}" if n else "" for n in sizes), *speed, case["bound_by"]])
        chosen = next((d["chosen"] for d in case["decisions"] if d["what"] == "offload"), "")
        notes += [f"{name}: {chosen}"] if chosen else []
    notes += [f"Left out: {name}" for name in CASES if name not in found]
    for case in found.values():
        notes += [f"Assumed: {text}" for text in case.get("assumed", [])[:2] if f"Assumed: {text}" not in notes]
    notes += [f"{name}: fzero plan --hf DIR {' '.join(CASES[name][1])}" for name in found]
    columns = (
        "model, devices",
        "fits",
        "GB a device",
        "with the process",
        "host GB a rank",
        "disk GB a rank",
        "s a step",
        "tokens/s",
        "MFU",
        "bound by",
    )
    title = "Models that fit, and how fast"
    publish("model_plans", title, columns, rows, notes, {"cases": found}, out, how="Planned")


if __name__ == "__main__":
    main()
