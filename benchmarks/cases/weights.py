"""Weights of a sharded model for an inference engine: streamed, gathered as a whole, and saved to files."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

from common import peak_mib, reset_peak, rss_mib

from cases import Table, processes

WAYS = {
    "stream": "fz.hf.stream, each tensor passed on and dropped",
    "send": "fz.hf.stream(...).send to another process, over a Unix socket",
    "gather": "fzero: train.gather(state)",
    "save": "fz.hf.save_pretrained",
    "fsdp2_stream": "FSDP2: full_tensor() of one parameter after the other",
    "fsdp2_state_dict": "FSDP2: get_model_state_dict(full_state_dict=True)",
    "fsdp2_offload": "FSDP2: the same with cpu_offload=True, whole on the first rank",
    "fsdp2_save": "FSDP2: the same, then save_pretrained on the first rank",
}


def weights(args: argparse.Namespace) -> Table:
    """The memory and time to hand all weights of a Llama of transformers, sharded by ZeRO-3, to an engine.

    MiB are those above what a rank held with its shards, of the rank with the most. Each way has processes of its own.
    """
    found: dict[str, list[dict[str, float]]] = {way: [] for way in args.only}
    megabytes = 0.0
    for turn in range(args.rounds):
        for way in random.Random(turn).sample(list(found), len(found)):
            with processes(args, args.processes, env={"way": way}) as group:
                megabytes = group.ask("build")[0]
                first = group.ask("take")  # memory that it frees may stay with the process, so it counts for memory
                answers = group.ask("take")  # the first time loads libraries, so this one counts for seconds
            found[way].append({"wall_s": max(x["wall_s"] for x in answers)})
            found[way][-1]["peak_mib"] = max(x["peak_mib"] for x in first)
            found[way][-1]["cpu_s"] = sum(x["cpu_s"] for x in answers)
            print(f"round {turn + 1}: {way}: {found[way][-1]}", file=sys.stderr, flush=True)
    middle = {way: {k: statistics.median(x[k] for x in each) for k in each[0]} for way, each in found.items()}
    rows = [(WAYS[way], f"{x['peak_mib']:.0f}", f"{x['wall_s']:.2f}", f"{x['cpu_s']:.2f}") for way, x in middle.items()]
    notes = [
        f"Llama of {args.layers} layers of width {args.width}, vocabulary {args.vocab}, fp32, {megabytes:.0f} MiB of "
        f"weights, on {args.processes} processes with one thread each; medians of {args.rounds} round(s), each with "
        "processes of its own. MiB: at the peak of the first time, above the shards, of the rank with the most, with "
        "the libraries that are loaded then. Seconds: of the second time. CPU seconds: of all ranks."
    ]
    return Table("Weights for an inference engine", ("", "MiB", "seconds", "CPU s"), rows, notes, {"ways": found})


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import llama
    import torch

    live: dict[str, Any] = {}
    config = llama.Config(args.layers, args.width, args.heads, args.seq, args.batch, vocab=args.vocab)

    def build() -> float:
        torch.set_num_threads(1)
        module: Any = llama.module(config).inner
        size = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20
        live["take"] = (_of_fsdp2 if args.way.startswith("fsdp2") else _of_fzero)(args.way, module)
        gc.collect()
        return size

    def take() -> dict[str, float]:
        reset_peak()
        before, wall, cpu = rss_mib(), time.perf_counter(), time.process_time()
        live["take"]()
        spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        return {**spent, "peak_mib": peak_mib() - before}

    return {"build": build, "take": take}


def _read(tensors: Iterable[tuple[str, Any]]) -> None:
    for _, tensor in tensors:
        tensor.sum()  # as an engine reads it


def _of_fzero(way: str, module: Any) -> Callable[[], object]:
    import transformers

    import fzero as fz

    model = fz.hf.from_config(transformers.AutoModelForCausalLM, module.config)
    step = fz.shard_params()(model.train_step(fz.optim.sgd(0.1)))
    train = fz.compile(step, fz.make_mesh(device="cpu"), backend="eager")
    state = train.init(model.init, fz.random.key(0))
    if way == "stream":
        return lambda: _read(fz.hf.stream(model, state))
    if way == "send":
        return _to_receiver(fz.hf.stream(model, state), train.mesh)
    if way == "gather":
        return lambda: _read(fz.tree.with_names(train.gather(state).params))

    def save() -> None:
        with tempfile.TemporaryDirectory(prefix="fzero-bench-") as folder:
            fz.hf.save_pretrained(_shared(folder), model, state)

    return save


RECEIVER = """
import sys, fzero as fz
for _ in range(2):
    for _, tensor in fz.hf.receive(sys.argv[1]):
        tensor.sum()
"""


def _to_receiver(stream: Any, mesh: Any) -> Callable[[], None]:
    """Starts a process that receives two streams. Returns what sends one."""
    address = f"unix:{_shared(tempfile.mkdtemp(prefix='fzero-bench-'))}/weights"
    if mesh.rank == 0:
        subprocess.Popen([sys.executable, "-c", RECEIVER, address])
    return lambda: stream.send(address)


def _of_fsdp2(way: str, module: Any) -> Callable[[], object]:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from training import fsdp2

    dist.init_process_group("gloo")
    fsdp2(module, module.model.layers, init_device_mesh("cpu", (dist.get_world_size(),)))
    if way == "fsdp2_stream":
        return lambda: _read((name, p.full_tensor()) for name, p in module.state_dict().items())
    options = StateDictOptions(full_state_dict=True, cpu_offload=way != "fsdp2_state_dict")
    if way != "fsdp2_save":
        return lambda: _read(get_model_state_dict(module, options=options).items())
    folder = tempfile.TemporaryDirectory(prefix="fzero-bench-")

    def save() -> None:
        found = get_model_state_dict(module, options=options)
        if dist.get_rank() == 0:
            module.save_pretrained(folder.name, state_dict=found)
        dist.barrier()

    return save


def _shared(folder: str) -> str:
    """The first rank's folder, for all ranks."""
    import torch.distributed as dist

    names = [folder]
    dist.broadcast_object_list(names)
    return names[0]
