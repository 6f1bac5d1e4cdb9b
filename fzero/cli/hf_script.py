"""Writes the training script for a configuration of the transformers library, and makes a target from its first part.

[Note: the code that is planned] A target of `--hf` is text: the script that the command prints. The plan is made of
what the first lines of this script create when they are executed, so the plan describes the code that a user pastes.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple

from tyro.conf import arg

from fzero._utils import bounded_json
from fzero.cli.target import UsageError, users_code
from fzero.step import Step

_SEQ = 4096  # tokens, if the configuration allows that many
_MOST_DEVICES = 16_384  # if an error asks for more devices, it is not translated to `--devices`
_CAPACITY = 1.25  # rows of an expert, as a multiple of its even share
_FLAG = arg(help_behavior_hint="")
_TARGET_INSTEAD = "write a function that returns (step, params, batch), and plan that: fzero plan FILE.py:FUNCTION"
_STAGES = {0: "fz.data_parallel", 1: "fz.shard_opt_state", 2: "fz.shard_grads", 3: "fz.shard_params"}
_LABELS_OF = {  # the shape of the labels, by the name of the library's own table that lists the class
    "tokens": ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    "each token": ("TOKEN_CLASSIFICATION",),
    "each row": ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION"),
    "span": ("QUESTION_ANSWERING",),
}


@dataclass(frozen=True)
class OfModel:
    """A step of a transformers model, in place of MODULE:FUNCTION. The command prints its code."""

    hf: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """a directory with config.json, or such a file. Weights are not read"""
    seq: Annotated[int | None, arg(metavar="TOKENS", help_behavior_hint="(default: 4096, or as many as it takes)")] = (
        None
    )
    """tokens per sequence"""
    batch: int = 1
    """sequences that a device processes at once"""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO stage over all devices: 1 shards optimizer state, 2 also gradients, 3 also parameters"""
    tensor: Annotated[int, arg(metavar="DEVICES")] = 1
    """devices that process the same samples, each with a shard of every layer: fz.tensor_parallel"""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """dtype of the computation; parameters and optimizer state are stored in fp32"""
    loss: Literal["full", "chunked"] = "full"
    """chunked computes the cross entropy in chunks of the positions, so that a step never holds all logits"""
    remat: Annotated[str | None, arg(metavar="POLICY", help_behavior_hint="(default: auto; full with --offload)")] = (
        None
    )
    """what blocks recompute: auto, full, none, min_cut, or a fraction"""
    accumulate: int = 1
    """micro-batches per step, each of --batch sequences"""
    layerwise: Annotated[bool, _FLAG] = False
    """all micro-batches pass through a block before the next block starts (with --accumulate)"""
    offload: Literal["none", "auto", "cpu", "nvme"] = "none"
    """where optimizer state and parameters are stored: auto finds the fastest choice within the budgets"""
    scratch: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: /scratch)")] = None
    """directory on the disk for --offload auto or nvme; for a plan it need not exist"""

    @property
    def given(self) -> list[str]:
        """The flags that differ from their defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def of_all(self, number: int) -> OfModel:
        """Returns the model with the sequences of `number` devices in one step of one device, without micro-batches,
        for the search for a mesh.

        Raises:
            UsageError: for flags that the search decides.
        """
        searched = {"zero", "tensor", "layerwise", "offload", "scratch"}.intersection(self.given)
        if problems := [f"--{name} does not go with --mesh auto" for name in sorted(searched)]:
            fix = "leave them out: they are searched for; --batch and --accumulate say how many sequences a step has"
            raise UsageError("mesh", "--mesh auto plans every mesh of a number of devices", problems, fix)
        return replace(self, batch=self.batch * self.accumulate * number, accumulate=1)

    def axes(self, number: int) -> dict[str, int]:
        """Returns the mesh of `number` devices."""
        parts, left = divmod(number, max(1, self.tensor))
        if left:
            fix = f"a number of devices that {self.tensor} divides, or another --tensor"
            raise UsageError("hf", f"--tensor {self.tensor} does not divide {number} devices", fix=fix)
        return {"data": parts} | ({"model": self.tensor} if self.tensor > 1 else {})


class Script(NamedTuple):
    """A training script, in parts.

    Attributes:
        name: name of the model's class.
        model: makes `model` and `step`.
        mesh: makes `mesh`.
        batch: makes `batch`, that of one rank, on `mesh.device`.
        train: compiles the step, initializes the state and runs steps.
        samples: tokens of one rank in a step, or samples if there are no tokens.
        unit: what `samples` counts.
        size: layers, width, heads and vocabulary, as text.
        unknown: messages about keys of the configuration that its class does not have.
        mixture: whether the experts of a mixture are computed by `fz.hf.experts_implementation`.
        path: the path of the model, as the parts name it.
    """

    name: str
    model: str
    mesh: str
    batch: str
    train: str
    samples: int
    unit: str
    size: str
    unknown: tuple[str, ...]
    mixture: bool
    path: str

    def __str__(self) -> str:
        return "\n".join((self.model, self.mesh, "", self.batch, self.train))

    def with_path(self, path: str) -> str:
        """Returns the script with another path of the model."""
        return str(self).replace(_quoted(self.path), _quoted(path))


class Target(NamedTuple):
    """A step, its parameters, a batch, and the number of blocks."""

    step: Step
    params: Any
    batch: Any
    blocks: int


def planned(
    of: OfModel, axes: dict[str, int], per_host: int, budgets: Mapping[Any, str | None]
) -> tuple[Script, Target]:
    """Returns the script of a model on a mesh, and its target.

    The library's own implementations of the experts of a mixture either depend on the values of the batch or copy an
    expert's weights for each token, so a mixture uses `fz.hf.experts_implementation`.

    Args:
        of: the flags.
        axes: axes of the mesh.
        per_host: devices per host, for the command line that starts the script.
        budgets: keywords of `fz.compile`.

    Raises:
        UsageError: if there is no such configuration, or if no loss or batch is known for it.
    """
    made = _script(of, axes, per_host, budgets)
    target, mixture = _load(of, made)
    if mixture:
        # Whether a model has experts is only known once its class has been instantiated, so the script is written
        # twice.
        made = _script(of, axes, per_host, budgets, mixture)
        target, _ = _load(of, made)
    return made, target


def _script(
    of: OfModel, axes: dict[str, int], per_host: int, budgets: Mapping[Any, str | None], mixture: bool = False
) -> Script:
    """See `planned`. `mixture`: whether the model has experts."""
    path, config = _configuration(of.hf or "")
    name, imported = _class(config, path)
    _check(of, config, axes)
    rows = of.batch * of.accumulate
    batch, samples, unit = _batch(config, name, rows, of)
    where, given = _quoted(str(path)), ", experts_implementation=rows" if mixture else ""
    if path.is_dir():
        made = f"model = fz.hf.from_pretrained({imported}, {where}{given})"
    else:
        made = (
            f'with torch.device("meta"):  # shapes alone\n'
            f"    model = fz.hf.from_config({imported}, AutoConfig.from_pretrained({where}){given})"
        )
    if mixture:
        made = (
            "# each expert computes a fixed number of rows; choices above it are dropped (capacity=None drops none)\n"
            f"rows = fz.hf.experts_implementation(capacity={_CAPACITY})\n{made}"
        )
    names = [imported] if path.is_dir() else sorted({"AutoConfig", imported})
    size = 1
    for n in axes.values():
        size *= n
    hosts = -(-size // per_host)
    nodes = f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint HOST:PORT " if hosts > 1 else ""
    stored = path.is_dir() and any(p.suffix in (".safetensors", ".bin") for p in path.iterdir())
    given = "".join(f", {name}={_quoted(value)}" for name, value in budgets.items() if value is not None)
    given += ", batch=batch" if of.offload == "auto" else ""
    transforms = ",\n    ".join(_transforms(of, axes, budgets))
    loss = ', loss="chunked"' if of.loss == "chunked" else ""
    return Script(
        name=name,
        path=str(path),
        model=(
            f"import torch\nfrom transformers import {', '.join(names)}\n\n"
            f"import fzero as fz\nfrom fzero import optim\n\n"
            f"{made}\n"
            f"optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-5))\n"
            f"step = fz.compose(\n    {transforms},\n)(model.train_step(optimizer{loss}))\n"
        ),
        mesh=(
            f"# torchrun {nodes}--nproc-per-node {min(size, per_host)} train.py\n"
            f"mesh = fz.make_mesh({', '.join(f'{axis}={n}' for axis, n in axes.items())})"
        ),
        batch=f"# your data: the rows of this rank{', the same along model' * (of.tensor > 1)}\n{batch}",
        train=(
            f"train = fz.compile(step, mesh{given})\n"
            f"state = train.{f'load({where})' if stored else 'init(model.init)'}\n"
            f"for _ in range(3):\n    state, metrics = train(state, batch)\n"
            f'print(float(metrics["loss"]))\n'
        ),
        samples=samples,
        unit=unit,
        size=_size(config),
        unknown=tuple(_unknown(path, config)),
        mixture=mixture,
    )


def _load(of: OfModel, made: Script) -> tuple[Target, bool]:
    """Returns the target of a script, and whether the model is a mixture. Executes the script's first part. The batch
    is created: entries that are one tensor stay one tensor.
    """
    found: dict[str, Any] = {"mesh": SimpleNamespace(device="cpu")}
    with users_code(of.hf or ""):
        # The plan is made of exactly the text that is printed, so the two cannot differ. [Note: the code that is
        # planned]
        exec(compile(f"{made.model}\n{made.batch}", "<the script of --hf>", "exec"), found)
    model = found["model"]
    from fzero.hf.moe import is_mixture  # here, because the other commands work without fzero.hf

    return Target(found["step"], model.params, found["batch"], len(model.blocks)), is_mixture(model.module)


def as_flags(refusal: str, of: OfModel, device: str, budgets: Sequence[str]) -> str:
    """Adds the flags that correspond to the calls that an error message suggests, and `--loss chunked` if the peak is
    where the loss is computed.

    Args:
        refusal: the error message.
        of: the flags of the model.
        device: the name of the device, as in `--devices 8xh100`.
        budgets: the flags of budgets that were given, which may be raised.
    """
    flags = [flag for pattern, flag in _FLAGS.items() if re.search(pattern, refusal)]
    if re.search(_NEEDS_DISK, refusal):
        more = {"--offload auto": of.offload != "auto", "--host-budget SIZE": "--host-budget" not in budgets}
        flags.append(" ".join([*(flag for flag, missing in more.items() if missing), "--disk-budget SIZE"]))
    if budgets and "raise a budget" in refusal:
        flags.append(f"a larger {' or '.join(budgets)}")
    if (fewer := re.search(r"num_micro_batches=(\d+)", refusal)) and of.batch >= (n := int(fewer[1])):
        flags.insert(0, f"--batch {of.batch // n} --accumulate {of.accumulate * n}")
    # behind the embedding, only the loss reads the batch
    if of.loss == "full" and re.search(r"^ +at: (?!.*embed).*batch\[", refusal, re.MULTILINE):
        flags.insert(0, "--loss chunked")
    ranks = re.search(r"at least (\d+) ranks", refusal)
    # No cluster has more devices: in that case the budget is too small, and other flags are the way out.
    flags += [f"--devices {ranks[1]}x{device}"] if ranks and int(ranks[1]) <= _MOST_DEVICES else []
    return "\n".join([refusal, *([f"As flags: {'; '.join(flags)}"] if flags else [])])


_FLAGS = {
    r"fz\.offload\(.cpu.": "--offload cpu --host-budget SIZE",
    r"fz\.offload\(.nvme., \(": "--offload nvme --scratch DIR",
    r"fz\.remat\(.full.\)": "--remat full",
    r"fz\.shard_params\(axis": "--zero 3",
    r"schedule=.layerwise.": "--accumulate N --layerwise",
}
"""The flags for the calls that error messages suggest (compiler/advice.py, state_budget.py, auto_offload.py)."""
_NEEDS_DISK = r"fz\.offload\(.auto., path=DIR\)"

# --- the configuration ---


def _configuration(given: str) -> tuple[Path, Any]:
    """Returns the path of a configuration, a directory or a file, and the configuration itself."""
    from fzero.hf.transformers_import import library

    AutoConfig = library("plan --hf").AutoConfig
    path = Path(given).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=3)
        problems = [f"perhaps you meant: {path.parent / n}" for n in near]
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", given) and not near:
            problems.append("a name of the hub: nothing is downloaded here")
            fix = (
                f'python -c "from huggingface_hub import snapshot_download as get; print(get({given!r}, '
                f"allow_patterns='config.json'))\" prints a directory to give; or "
                f"AutoConfig.from_pretrained({given!r}).save_pretrained('DIR')"
            )
        else:
            fix = "give a directory with config.json, or such a file"
        raise UsageError("hf", f"{given} does not exist", problems, fix)
    if not file.exists():
        fix = "AutoConfig.from_pretrained(NAME).save_pretrained(DIR) writes one"
        raise UsageError("hf", f"{path} has no config.json", fix=fix)
    try:
        data = bounded_json.read(file)
        if not isinstance(data, dict) or "model_type" not in data:
            raise ValueError("it names no model_type")
        return path, AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        problems = str(error).strip().splitlines()[:1]
        fix = "give a configuration that transformers.AutoConfig reads"
        raise UsageError("hf", f"{file} is not a configuration of transformers", problems, fix) from None


def _tables(kind: str) -> set[str]:
    """Returns the names of the classes that the library lists for a task."""
    from transformers.models.auto import modeling_auto  # pyright: ignore[reportMissingImports] - of the extra `hf`

    found = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values()
    return {name for names in found for name in ((names,) if isinstance(names, str) else names)}


def _class(config: Any, path: Path) -> tuple[str, str]:
    """Returns the class of the model, and the name by which it is imported."""
    import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`
    from transformers.models.auto import modeling_auto  # pyright: ignore[reportMissingImports]

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    name = next(iter(config.architectures or ()), None) or causal
    if name is None:
        fix = 'add e.g. "architectures": ["T5ForConditionalGeneration"]'
        raise UsageError("hf", f"{path} names no architecture", fix=fix)
    if name == causal:
        return name, "AutoModelForCausalLM"
    if not hasattr(transformers, name):
        near = difflib.get_close_matches(name, dir(transformers), n=3)
        problems = [f"perhaps you meant: {n}" for n in near]
        raise UsageError("hf", f"transformers has no class {name!r}", problems, "name one in `architectures`")
    return name, name


def _check(of: OfModel, config: Any, axes: Mapping[str, int]) -> None:
    """Raises an error that lists flags which are invalid, or which contradict the configuration or the mesh."""
    least = ("batch", "accumulate", "tensor")
    problems = [f"--{n} {getattr(of, n)}: must be at least 1" for n in least if getattr(of, n) < 1]
    if of.tensor != (size := axes.get("model", 1)):
        problems.append(f"--tensor {of.tensor}: the mesh has model={size}")
    problems += [f"--seq {of.seq}: must be at least 1"] if of.seq is not None and of.seq < 1 else []
    most = _positions(config)
    if of.seq is not None and most is not None and of.seq > most:
        problems.append(f"--seq {of.seq}: the configuration has max_position_embeddings={most}")
    if of.layerwise and of.accumulate == 1:
        problems.append("--layerwise: there is one micro-batch; add e.g. --accumulate 8")
    policies = ("auto", "full", "none", "min_cut")
    if of.remat is not None and of.remat not in policies and not re.fullmatch(r"0?\.\d+|[01](\.0*)?", of.remat):
        near = difflib.get_close_matches(of.remat, policies, n=1)
        problems.append(f"--remat {of.remat}: perhaps you meant {near[0] if near else 'full'}")
    if of.scratch is not None and of.offload not in ("auto", "nvme"):
        problems.append(f"--scratch {of.scratch}: nothing goes to disk; add --offload auto or nvme")
    if problems:
        raise UsageError("hf", "invalid flags", problems, "fzero plan --help lists them")


def _positions(config: Any) -> int | None:
    """Returns the longest sequence that a configuration has positions for, if it says so."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _size(config: Any) -> str:
    """Returns the size of a model as text, from the names that every configuration of the library has."""
    text = config.get_text_config()
    words = {
        "num_hidden_layers": "{} layers",
        "hidden_size": "hidden size {}",
        "num_attention_heads": "{} heads",
        "vocab_size": "vocabulary {}",
    }
    found = {name: getattr(text, name, None) for name in words}
    return ", ".join(words[name].format(value) for name, value in found.items() if isinstance(value, int))


def _unknown(path: Path, config: Any) -> Iterator[str]:
    """Yields a message for each unknown key of a configuration's file that resembles a key which the file lacks, and
    one message for all other unknown keys with numbers.

    The library stores every key of a file as an attribute of the configuration. A key is unknown if the class without
    arguments lacks it and has not renamed it. Old files of the library have such keys too, so they are reported and
    not rejected.
    """
    from fzero.hf.transformers_import import library

    generation = library("plan --hf").GenerationConfig()
    data = bounded_json.read(path / "config.json" if path.is_dir() else path)
    for name, given, part in _parts(data, config):
        kind, where = type(part), f"{name}: " if name else ""
        try:
            default = kind()
        except Exception:  # a class that needs arguments, whose defaults are not known
            continue
        known = lambda key, default=default: any(hasattr(x, key) for x in (default, generation))  # noqa: E731
        odd = [key for key in given if not key.startswith("_") and key in vars(part) and not known(key)]
        there = {kind.attribute_map.get(key, key) for key in given}
        names = [*(key for key in vars(default) if not key.startswith("_")), *kind.attribute_map]
        left = [key for key in names if kind.attribute_map.get(key, key) not in there]
        near = {key: found for key in odd if (found := _nearest(key, left))}
        for key, found in near.items():
            value = getattr(part, found)
            yield f"{where}{key}={given[key]}: {kind.__name__} has no {key}; did you mean {found}, which is {value}?"
        modeling = sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"))
        code = "" if modeling is None else inspect.getsource(modeling)  # which may read keys that the class lacks
        rest = [key for key in odd if key not in near and type(given[key]) is int and f'"{key}"' not in code]
        if rest := [f"{key}={given[key]}" for key in rest]:
            yield f"{where}{kind.__name__} has no {', '.join(rest)} of its own; the model may ignore it"


def _nearest(key: str, names: Sequence[str]) -> str | None:
    """Returns the name that a key probably means: a name in which each word of the key begins a word, or else a
    similar name.
    """
    words = key.split("_")
    begins = lambda name: all(any(w.startswith(word) for w in name.split("_")) for word in words)  # noqa: E731
    whole = [name for name in names if len(words) > 1 and begins(name)]
    return next(iter(whole or difflib.get_close_matches(key, names, n=1, cutoff=0.75)), None)


def _parts(data: Mapping[str, Any], config: Any, name: str = "") -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Yields a configuration and those inside it: dotted name, the keys of its file, and the configuration
    itself.
    """
    yield name, data, config
    for key, value in data.items():
        part = getattr(config, key, None)
        if isinstance(value, dict) and hasattr(part, "attribute_map"):
            yield from _parts(value, part, f"{name}.{key}" if name else key)


def _batch(config: Any, name: str, rows: int, of: OfModel) -> tuple[str, int, str]:
    """Returns lines that make a batch, the number of tokens or samples in it, and which of the two these are."""
    import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`

    shape = next((shape for shape, kinds in _LABELS_OF.items() for kind in kinds if name in _tables(kind)), None)
    main = getattr(getattr(transformers, name, None), "main_input_name", "input_ids")
    text = config.get_text_config()
    if shape is None or main not in ("input_ids", "pixel_values"):
        what = f"no batch is known for {name}" if shape else f"{name} has no loss of its own that is known here"
        raise UsageError("hf", what, fix=_TARGET_INSTEAD)
    seq = of.seq or min(_SEQ, _positions(config) or _SEQ)
    if main == "pixel_values":
        side = config.image_size if isinstance(config.image_size, (list, tuple)) else [config.image_size] * 2
        dims = ", ".join(map(str, (rows, getattr(config, "num_channels", 3), *side)))
        first, samples, unit = f"pixels = torch.randn({dims}, device=mesh.device)", rows, "images"
        entries = '"pixel_values": pixels'
    else:
        first = f"ids = torch.randint({text.vocab_size}, ({rows}, {seq}), device=mesh.device)"
        entries, samples, unit = '"input_ids": ids', rows * seq, "tokens"
    labels = f"torch.randint({max(1, getattr(config, 'num_labels', 2))}, (%s), device=mesh.device)"
    entries += {
        "tokens": ', "labels": ids',
        "each token": f', "labels": {labels % f"{rows}, {seq}"}',
        "each row": f', "labels": {labels % f"{rows},"}',
        "span": f', "start_positions": {labels % f"{rows},"}, "end_positions": {labels % f"{rows},"}',
    }[shape]
    return f"{first}\nbatch = {{{entries}}}\n", samples, unit


def _transforms(of: OfModel, axes: dict[str, int], budgets: Mapping[Any, str | None]) -> list[str]:
    """Returns the calls that make the transforms."""
    over = tuple(axis for axis in reversed(axes) if axis != "model")  # a mesh begins with its slowest axis
    groups = [over] if of.zero else [(axis,) for axis in over]  # data_parallel takes a single axis
    out = []
    for group in groups if any(axes[axis] > 1 for axis in over) else []:
        names = ", ".join(map(_quoted, group))
        named = "" if group == ("data",) else f"axis=({names})" if len(group) > 1 else f"axis={names}"
        out.append(f"{_STAGES[of.zero]}({named})")
    out += [f"fz.tensor_parallel(rules=fz.hf.tensor_rules(model, ranks={of.tensor}))"] if of.tensor > 1 else []
    out += [] if of.precision == "fp32" else [f'fz.mixed_precision("{of.precision}")']
    policy = of.remat or ("full" if of.offload != "none" else "auto")
    out.append(f"fz.remat({_quoted(policy) if policy.isidentifier() else float(policy)})")
    if of.accumulate > 1:
        schedule = ', schedule="layerwise"' if of.layerwise else ""
        out.append(f"fz.accumulate({of.accumulate}{schedule})")
    disk = of.scratch or ("/scratch" if of.offload == "nvme" or budgets.get("disk_budget") is not None else None)
    path = f", path={_quoted(disk)}" if disk and of.offload != "cpu" else ""
    if of.offload == "auto":
        out.append(f'fz.offload("auto"{path})')
    elif of.offload != "none":
        out.append(f'fz.offload("{of.offload}", ("opt_state", "params"){path})')
    return out


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
