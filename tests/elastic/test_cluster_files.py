"""The files for clusters, tried as far as that goes without one: the job script with stand-ins of Slurm's commands,
the manifest and the image by what they refer to."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import EXAMPLES, ROOT, environment

CLUSTERS = EXAMPLES / "clusters"


@pytest.mark.full
def test_the_job_script_trains_on_two_nodes(tmp_path: Path) -> None:
    """Both nodes are this machine: `srun` starts the command once a node, each with one rank."""
    stand_ins = {
        "scontrol": 'test "$1 $2 $3" = "show hostnames n[1-2]" && printf "localhost\\nother\\n"',
        "srun": 'shift; "$@" & first=$!; "$@"; second=$?; wait $first && exit $second',
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        **environment(),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "USER": "tester",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "FZERO_PORT": "0",
        "FZERO_OUT": str(tmp_path / "run"),
    }
    with socket.socket() as free:
        free.bind(("localhost", 0))
        env["FZERO_PORT"] = str(free.getsockname()[1])
    tiny = ("--layers=1", "--width=16", "--heads=2", "--seq=16", "--batch=4", "--accumulate=1", "--backend=eager")
    script = ["bash", str(CLUSTERS / "slurm.sh"), *tiny, "--steps", "2"]
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data=2" in done.stdout, done.stdout
    assert any((tmp_path / "run").iterdir()), "a checkpoint, where the job was told"


def test_the_job_script_asks_slurm_for_what_it_uses() -> None:
    lines = (CLUSTERS / "slurm.sh").read_text().splitlines()
    pairs = (line.removeprefix("#SBATCH --").split("=") for line in lines if line.startswith("#SBATCH"))
    asked = {pair[0]: pair[-1] for pair in pairs}
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(line) < first for line in lines if line.startswith("#SBATCH")), "Slurm reads no further"
    assert asked["ntasks-per-node"] == "1" and {"nodes", "gpus-per-node", "requeue", "signal"} <= asked.keys()


def test_the_manifest_refers_to_what_it_has() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in container["command"] if flag.startswith("--"))
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["completions"] == spec["parallelism"] == int(flags["nnodes"]) and spec["completionMode"] == "Indexed"
    assert int(flags["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    host, port = flags["rdzv-endpoint"].split(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert [p["containerPort"] for p in container["ports"]] == [int(port)]
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in container["volumeMounts"]}
    _check_flags(container["args"])


def test_the_image_is_made_of_what_is_there() -> None:
    """Instructions that there are, a base of one release, sources that exist, shell that parses, and no root."""
    text = (CLUSTERS / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in steps} <= known and steps[0][0] == "FROM" and ":" in steps[0][1]
    assert not steps[0][1].endswith(":latest")
    last = {name: value for name, value in steps}  # noqa: C416 - of pairs that are lists
    assert last["USER"] not in ("root", "0")
    for name, value in steps:
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", value], check=True)
            assert "apt-get install" not in value or {"--yes", "--no-install-recommends", "rm"} <= set(value.split())
        if name == "COPY":
            assert all((ROOT / source).exists() for source in value.split()[:-1]), value
    entry: list[Any] = json.loads(last["ENTRYPOINT"])
    assert (ROOT / entry[entry.index("gpu") + 1]).is_file()
    _check_flags([*entry[entry.index("gpu") + 2 :], *json.loads(last["CMD"])])


def _check_flags(args: list[str]) -> None:
    """Whether examples/train_gpt.py takes them."""
    help_text = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_gpt.py"), "--help"], capture_output=True, text=True, env=environment()
    ).stdout
    assert all(flag in help_text for flag in args if flag.startswith("--"))
