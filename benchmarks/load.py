"""Loads a directory of transformers with everything on disk, and writes it back: memory, bytes read, the same logits.

    python benchmarks/load.py --path DIR               # a Llama of 1.9 GB in bf16, on 1 and 2 ranks: about 3 minutes
    python benchmarks/load.py --path DIR --layers 2 --width 256    # small

DIR is on a disk with room for 25 GB. Masters are fp32 and AdamW's: 12 bytes a parameter go to scratch files, where the
files have 2. What is measured is what each rank's resident memory grows by at its most, from before `train.load` to
after it, and while `fz.hf.save_pretrained` writes the model back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Group, passed_on, peak_mib, publish, reset_peak, rss_mib, script_flags, serve, settings, verdict

GROWTH_LIMIT_MIB = 1024
READ_LIMIT = 1.1  # bytes read by all ranks, over those of the files
SHARD_BYTES = 500_000_000


def config(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig  # pyright: ignore[reportMissingImports]

    return LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=11 * args.width // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        max_position_embeddings=256,
        use_cache=False,
    )


def write(args: argparse.Namespace, path: Path) -> None:
    """The directory, a file at a time."""
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    with torch.device("meta"):
        shapes = {name: x.shape for name, x in LlamaForCausalLM(config(args)).state_dict().items()}
    files: list[list[str]] = [[]]
    for name, shape in shapes.items():
        if sum(2 * shapes[held].numel() for held in files[-1]) + 2 * shape.numel() > SHARD_BYTES and files[-1]:
            files.append([])
        files[-1].append(name)
    generator, weight_map = torch.Generator().manual_seed(0), dict[str, str]()
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        save_file({n: _drawn(shapes[n], generator) for n in names}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    made = config(args)
    made.architectures, made.dtype = ["LlamaForCausalLM"], "bfloat16"
    made.save_pretrained(path)


def _drawn(shape: Any, generator: Any) -> Any:
    import torch

    return 0.02 * torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator) + (len(shape) == 1)


def logits(path: Path, out: Path) -> None:
    """What plain transformers computes of a directory."""
    import torch
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.save(model.eval()(torch.arange(16)[None]).logits, out)


def worker(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    import fzero as fz

    torch.set_num_threads(1)
    mesh, live = fz.make_mesh(), dict[str, Any]()

    def load(path: str, scratch: str) -> dict[str, float]:
        model = fz.hf.from_pretrained(AutoModelForCausalLM, path)
        transforms = [fz.offload("nvme", ("params", "opt_state"), path=scratch), fz.mixed_precision("bf16")]
        transforms += [fz.shard_params()] if mesh.size > 1 else []
        train = fz.compile(fz.compose(*transforms)(model.train_step(fz.optim.adamw(1e-4))), mesh, backend="eager")
        reads, preadv = list[int](), os.preadv

        def counting(fd: int, *rest: Any) -> int:  # of several threads
            got = preadv(fd, *rest)
            reads.append(got if os.readlink(f"/proc/self/fd/{fd}").startswith(path) else 0)
            return got

        before = rss_mib()
        reset_peak()
        begin, os.preadv = time.perf_counter(), counting
        state = train.load(path)
        os.preadv = preadv
        live["model"], live["state"] = model, state
        return {"growth_mib": peak_mib() - before, "wall_s": time.perf_counter() - begin, "read_bytes": sum(reads)}

    def save(out: str) -> dict[str, float]:
        before, begin = rss_mib(), time.perf_counter()
        reset_peak()
        fz.hf.save_pretrained(out, live["model"], live["state"], dtype=torch.bfloat16)
        return {"save_growth_mib": peak_mib() - before, "save_wall_s": time.perf_counter() - begin}

    serve({"load": load, "save": save})
    fz.close_mesh()


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    if args.do:
        {"write": lambda: write(args, args.do[1]), "logits": lambda: logits(*args.do[1:])}[str(args.do[0])]()
        return
    rows, points = [], []
    folder = Path(tempfile.mkdtemp(prefix="fzero-load-", dir=args.path))
    try:
        source = folder / "model"
        source.mkdir()
        _apart(args, "write", source)
        _apart(args, "logits", source, folder / "logits.pt")
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        for ranks in args.ranks:
            out, scratch = folder / f"out-{ranks}", folder / f"scratch-{ranks}"
            scratch.mkdir()
            with Group(__file__, ranks, passed_on(args, "layers", "width", "vocab", "path"), timeout=900) as group:
                found = group.ask("load", path=str(source), scratch=str(scratch))
                saved = group.ask("save", out=str(out))
            shutil.rmtree(scratch)
            _apart(args, "logits", out, folder / "again.pt")
            point = {k: max(x[k] for x in part) for part in (found, saved) for k in part[0]}
            point |= {"ranks": ranks, "equal": _equal(folder / "logits.pt", folder / "again.pt")}
            point["read"] = sum(x["read_bytes"] for x in found) / size
            points.append(point)
            print(point, file=sys.stderr, flush=True)
            row = (ranks, f"{point['growth_mib']:.0f}", f"{point['read']:.3f}", f"{point['wall_s']:.1f}")
            rows.append(
                (
                    *row,
                    f"{point['save_growth_mib']:.0f}",
                    f"{point['save_wall_s']:.1f}",
                    "yes" if point["equal"] else "NO",
                )
            )
            shutil.rmtree(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    growth, read = (max(p[k] for p in points) for k in ("growth_mib", "read"))
    notes = [
        f"Llama of {args.layers} layers of width {args.width}, {size / 1e9:.2f} GB of safetensors in bf16; parameters "
        "and AdamW's moments on disk, masters in fp32; one thread a rank.",
        f"growth of a rank's resident memory while loading: {growth:.0f} MiB at most, {GROWTH_LIMIT_MIB} wanted: "
        f"{verdict(growth, GROWTH_LIMIT_MIB)}",
        f"bytes of the files read by all ranks / of the files: {read:.3f} at most, {READ_LIMIT:g} wanted: "
        f"{verdict(read, READ_LIMIT)}",
        "logits: of plain transformers from the directory, and from what `fz.hf.save_pretrained` wrote of the state.",
    ]
    columns = ("ranks", "growth MiB", "read", "load s", "save growth MiB", "save s", "logits bit equal")
    data = {"settings": settings(args, "path", "do"), "bytes": size, "points": points}
    publish(args.name, "Loading a model with everything on disk", columns, rows, notes, data, args.out)


def _apart(args: argparse.Namespace, *do: Any) -> None:
    """In a process of its own."""
    flags = passed_on(args, "layers", "width", "vocab", "path")
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, __file__, *flags, "--do", *map(str, do)], check=True, env=env)


def _equal(a: Path, b: Path) -> bool:
    import torch

    return torch.equal(torch.load(a), torch.load(b))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--do", nargs="+", type=Path, help=argparse.SUPPRESS)
    script_flags(parser, "load")
    return parser.parse_args()


if __name__ == "__main__":
    main()
