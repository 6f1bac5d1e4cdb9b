"""Streams the weights of a sharded state to an inference engine, one tensor after the other, with transformers' names
and in the form in which transformers stores them.

[Note: stream] Each tensor that is yielded is made of rows of a few parameters (weight_conversions.py). These are
gathered when the first tensor needs them, and released after the last tensor of the block that needs them. So a rank
holds at most the parameters of one block, and usually those of one tensor, whatever the size of the model. Before
parameters are gathered, the ranks exchange a message over the control group: if a rank has stopped reading, or its
receiver has failed, all ranks raise the same error, and none waits in a gather.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._compat.allocator import return_freed_memory
from fzero._utils.units import size
from fzero.checkpoint.safetensors_format import ElementRun
from fzero.comm import control_group
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError
from fzero.hf import adapters, weight_conversions
from fzero.hf.gathered_module import whole
from fzero.hf.models import Pretrained
from fzero.hf.weight_transport import Sender
from fzero.modules.functionalize import Functional
from fzero.modules.quantized_linear import quantized_layers
from fzero.sharding.layout import leaf_of
from fzero.train_state import check_computed

_OWNER = "hf.stream"
_NUMBERS = itertools.count()
_KEPT_BYTES = 16 << 20
logger = logging.getLogger("fzero")


class _Tensor(NamedTuple):
    """A tensor of the stream: its name, its shape, and the runs of parameters that make it up."""

    name: str
    shape: tuple[int, ...]
    runs: Sequence[ElementRun]

    @property
    def sources(self) -> list[str]:
        return [*dict.fromkeys(run.key for run in self.runs)]


class WeightStream:
    """The weights of a state as pairs of a name and a tensor, which `stream` returns. Each iteration reads the state
    again.

    Attributes:
        peak_bytes: the most bytes that a rank holds of gathered parameters and of the tensor that is yielded.
        total_bytes: the bytes of all tensors that are yielded.

    Example:
        >>> import torch, fzero as fz
        >>> model = fz.functionalize(torch.nn.Linear(2, 3))
        >>> weights = fz.hf.stream(model, model.params)
        >>> print(weights)
        2 tensors, 36 B, at most 48 B gathered at a time
          outside blocks: 2 tensors, 36 B, 0 all_gathers, peak 48 B
    """

    def __init__(
        self,
        blocks: Mapping[str, Sequence[_Tensor]],
        params: Mapping[str, torch.Tensor],
        merged: adapters.Merged | None,
        dtype: torch.dtype | None,
        device: torch.device | None,
        version: torch.Tensor | None,
    ):
        self._blocks, self._params, self._merged, self._id = blocks, params, merged, next(_NUMBERS)
        self._dtype, self._device, self._version = dtype, device, version
        self._mesh = next((at[1] for x in params.values() if (at := leaf_of(x)) is not None), None)
        numbers = [self._bytes(tensors) for tensors in blocks.values()]
        self.peak_bytes = max((peak for peak, _ in numbers), default=0)
        self.total_bytes = sum(total for _, total in numbers)

    def __str__(self) -> str:
        num = sum(map(len, self._blocks.values()))
        lines = [f"{num} tensors, {size(self.total_bytes)}, at most {size(self.peak_bytes)} gathered at a time"]
        for block, tensors in self._blocks.items():
            peak, total = self._bytes(tensors)
            gathers = sum(self._is_sharded(p) for p in {p for t in tensors for p in self._needed(t)})
            what = f"{len(tensors)} tensors, {size(total)}, {gathers} all_gathers, peak {size(peak)}"
            lines.append(f"  {block or 'outside blocks'}: {what}")
        return "\n".join(lines)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._read(lambda: None)

    def send(self, address: str, *, timeout: float = 60.0) -> None:
        """Sends all tensors to a process that runs `fz.hf.receive(address)`. The first rank sends; every rank calls it.

        Args:
            address: "unix:/path/to/socket", or "host:port".
            timeout: seconds to wait until the receiver listens, and for each of its answers.

        Raises:
            FzeroValueError: on every rank, if the receiver cannot be reached, stops, or does not take the tensors.
        """
        first = self._mesh is None or self._mesh.rank == 0
        sender, failed = Sender(address, timeout), list[BaseException]()

        def check() -> None:
            if failed:
                raise failed[0]

        def attempt(act: Callable[..., object], *args: Any) -> None:
            # An error is kept until the ranks meet before the next gather, where all of them raise it.
            if first and not failed:
                try:
                    act(*args)
                except (OSError, FzeroError) as error:
                    failed.append(error)

        try:
            attempt(sender.connect)
            for name, tensor in self._read(check):
                attempt(sender.send, name, tensor)
            attempt(sender.finish)
            self._meet(check, "the answer of the receiver")
        finally:
            sender.close()

    # --- reading ---

    def _read(self, check: Callable[[], None]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all tensors. `check` is called on all ranks before parameters are gathered; its errors are raised on
        all."""
        check_computed([*self._params.values()], _OWNER)
        before = self._number()

        def meet(at: str) -> None:
            self._meet(lambda: (check(), self._check_unchanged(before)), at)

        freed = 0
        try:
            for tensors in self._blocks.values():
                last = {p: i for i, tensor in enumerate(tensors) for p in self._needed(tensor)}
                held: dict[str, torch.Tensor] = {}
                for i, tensor in enumerate(tensors):
                    if any(p not in held for p in tensor.sources):
                        meet(tensor.name)
                    yield tensor.name, self._made(tensor, held)
                    freed += sum(x.nbytes for p, x in held.items() if last[p] <= i)
                    held = {p: x for p, x in held.items() if last[p] > i}
                    if freed > _KEPT_BYTES:
                        # The allocator keeps freed memory for later steps, in pieces into which the next tensors may
                        # not fit.
                        return_freed_memory()
                        freed = 0
            return_freed_memory()
        except GeneratorExit:
            self._leave()
            raise
        meet("its end")

    def _meet(self, act: Callable[[], object], at: str) -> None:
        """Runs `act` on all ranks, and checks that all of them are at the same tensor of the same stream."""
        if self._mesh is None:
            act()
            return

        def here() -> list[int | str]:
            act()
            return [self._id, at]

        what = "the stream of weights has ended"
        with self._mesh.alone(_OWNER):
            found = control_group.all_gather_values(self._mesh.control, _OWNER, here, form=list[int | str], what=what)
        if any(one != found[0] for one in found):
            problems = [f"rank {rank}: stream {one[0]} of this process, at {one[1]}" for rank, one in enumerate(found)]
            fix = "make streams, and read them, in the same order on all ranks"
            raise FzeroValueError(_OWNER, "ranks read different streams", problems, fix)

    def _leave(self) -> None:
        """Tells the other ranks that this one has stopped reading."""
        fix = "read the stream to its end on every rank, e.g. `for _ in stream: pass`"

        def stop() -> None:
            raise FzeroValueError(_OWNER, "this rank has stopped reading", fix=fix)

        if self._mesh is not None and self._mesh.size > 1:
            # The error is for the other ranks; this one has an error of its own, or has left the loop.
            with contextlib.suppress(FzeroError):
                self._meet(stop, "")

    def _number(self) -> int | None:
        return None if self._version is None else int(self._version)

    def _check_unchanged(self, before: int | None) -> None:
        if self._number() != before:
            what = f"the state was at step {before} when the stream began, and is at step {self._number()}"
            raise FzeroValueError(_OWNER, what, fix="take steps before or after the stream, not while it is read")

    def _made(self, tensor: _Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns a tensor of the stream. `held` has the parameters that were gathered for earlier ones."""
        for param in (p for p in tensor.sources if p not in held):
            if self._merged is not None and param in self._merged.layers:
                held |= self._merged.weights(param, self._whole)
            else:
                held[param] = self._whole(param)
        first = held[tensor.sources[0]] if tensor.runs else torch.empty(0, dtype=self._dtype)
        if [(r.at, r.stop - r.start) for r in tensor.runs] == [(0, first.numel())]:
            found = first.reshape(tensor.shape)
        else:
            found = first.new_empty(tensor.shape)
            flat = found.view(-1)
            for run in tensor.runs:
                flat[run.start : run.stop] = held[run.key].reshape(-1)[run.at : run.at + run.stop - run.start]
        dtype = self._dtype if self._dtype is not None and found.is_floating_point() else None
        return found.to(device=self._device, dtype=dtype)

    def _whole(self, param: str) -> torch.Tensor:
        return whole(self._params[param], self._mesh)

    # --- the plan ---

    def _needed(self, tensor: _Tensor) -> list[str]:
        """The parameters that a tensor is made of."""
        layers = {} if self._merged is None else self._merged.layers
        return [p for source in tensor.sources for p in (source, *self._merged_from(source, layers))]

    def _merged_from(self, param: str, layers: Mapping[str, str]) -> list[str]:
        if self._merged is None or param not in layers:
            return []
        return [p for p in self._merged.parameters(param) if p != param]

    def _form(self, param: str) -> tuple[tuple[int, ...], torch.dtype]:
        x = self._params[param]
        at = leaf_of(x)
        return (tuple(x.shape), x.dtype) if at is None else (at[0].shape, at[0].dtype)

    def _is_sharded(self, param: str) -> bool:
        return (at := leaf_of(self._params[param])) is not None and bool(at[0].layout.apart)

    def _bytes(self, tensors: Sequence[_Tensor]) -> tuple[int, int]:
        """The most bytes that are held at a time while these tensors are made, and the bytes of all of them."""
        last = {p: i for i, tensor in enumerate(tensors) for p in self._needed(tensor)}
        held, peak, total = dict[str, int](), 0, 0
        for i, tensor in enumerate(tensors):
            for p in self._needed(tensor):
                shape, dtype = self._form(p)
                held[p] = torch.Size(shape).numel() * dtype.itemsize
            forms = {} if self._merged is None else self._merged.forms
            own = next((forms.get(p, self._form(p))[1] for p in tensor.sources), torch.float32)
            dtype = self._dtype if self._dtype is not None and own.is_floating_point else own
            made = torch.Size(tensor.shape).numel() * dtype.itemsize
            # peft merges into a copy of the weight, and computes what it adds as a whole.
            is_merged = self._merged is not None and any(p in self._merged.layers for p in tensor.sources)
            peak, total = max(peak, sum(held.values()) + made * (2 if is_merged else 1)), total + made
            held = {p: n for p, n in held.items() if last[p] > i}
        return peak, total


def stream(
    model: Pretrained | Functional,
    state: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    merge: bool = False,
) -> WeightStream:
    """Returns the weights of a state as pairs of a name and a tensor, for an inference engine. vLLM takes them by
    `llm.collective_rpc("reload_weights", kwargs={"weights_iterator": fz.hf.stream(model, state)})`.

    Names and form are those of the files that transformers writes: tied weights come once, and fused experts in the
    stored layout. Quantized weights are dequantized. The order is block by block. Every rank reads the stream to its
    end, and each gets all tensors; a rank that has no engine reads it with `for _ in stream: pass`. To an engine in
    another process, `stream(...).send(address)` sends the tensors. `print(stream(...))` shows the gathers of each block
    and their memory.

    Args:
        model: what `fz.hf.from_pretrained` or `from_config` returned, or `fz.functionalize(module)`, which may be a
            model with adapters of peft.
        state: a state of its training step, or its parameters, on any memory tier. It is read, not changed.
        dtype: floating-point tensors are converted to it.
        device: of the tensors; by default the mesh's device.
        merge: yield the weights of the base model with the adapters merged into them. By default, only the adapters
            of a model with adapters are yielded, with the names that peft gives them in files.

    Memory: gathered parameters of at most one block, and usually of one tensor (`WeightStream.peak_bytes`).
    Communication: one all-gather per sharded parameter, after a message of 512 bytes from each rank.

    Raises:
        FzeroTypeError: another kind of model, or a state whose parameters are not the model's.
        FzeroValueError: on every rank, while the stream is read: a rank has stopped reading, or the state was trained
            meanwhile.
        CheckpointError: the stored form of the weights would split rows of tensors, or the adapters are not saved as
            the tensors that they have.

    Example:
        >>> import transformers, fzero as fz
        >>> config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        >>> model = fz.hf.from_config(transformers.AutoModelForCausalLM, config)
        >>> step = fz.shard_params(model.train_step(fz.optim.adamw(1e-3)))
        >>> train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        >>> state = train.init(model.params)
        >>> weights = dict(fz.hf.stream(model, state, dtype=torch.bfloat16))
        >>> len(weights), weights["transformer.wte.weight"].shape
        (28, torch.Size([64, 16]))
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise FzeroTypeError(_OWNER, f"dtype={dtype!r} is not a floating-point dtype", fix="give e.g. torch.bfloat16")
    params = getattr(state, "params", state)
    if not isinstance(model, Functional) or tree.names(params) != tree.names(model.params):
        what = "this is not a state of the model" if isinstance(model, Functional) else "this is not a model"
        fix = "give what fz.hf.from_pretrained or fz.functionalize returned, and a state of its training step"
        raise FzeroTypeError(_OWNER, what, fix=fix)
    module: Any = model.module if isinstance(model, Pretrained) else model._module
    stored = module.state_dict()
    leaf = {name: slot.name for name, slot in model.slots(module).items() if name in stored}
    merged, is_adapted = None, adapters.is_adapted(module)
    if merge and not is_adapted:
        fix = "leave out merge=True, or give fz.functionalize(peft_model)"
        raise FzeroTypeError(_OWNER, f"{type(module).__name__} has no adapters to merge", fix=fix)
    if is_adapted and not merge:
        tensors = _of_adapters(module, leaf)
    elif is_adapted or quantized_layers(module):
        merged = adapters.Merged(module, leaf)
        tensors = _of_base(module, merged)
    elif hasattr(module, "save_pretrained"):
        tensors = _named(weight_conversions.stored(module), leaf)
    else:
        tensors = _as_they_are({name: x for name, x in stored.items() if name in leaf}, leaf)
    flat = dict(tree.with_names(params))
    where = None if device is None else torch.device(device)
    version = getattr(state, "step", None)
    return WeightStream(_by_block(tensors, model.blocks), flat, merged, dtype, where, version)


def _named(stored: Mapping[str, Any], leaf: Mapping[str, str]) -> list[_Tensor]:
    """Returns tensors whose runs name parameters instead of entries of a state dict."""
    named = lambda runs: [run._replace(key=leaf[run.key]) for run in runs]  # noqa: E731
    return [_Tensor(name, shape, named(runs)) for name, (shape, runs) in stored.items()]


def _as_they_are(state: Mapping[str, Any], leaf: Mapping[str, str]) -> list[_Tensor]:
    """Returns the tensors of a state dict as they are. Of tied ones, the first."""
    first = {leaf[name]: name for name in reversed([*state])}
    return [
        _Tensor(name, tuple(x.shape), [ElementRun(0, x.numel(), leaf[name], 0)])
        for name, x in state.items()
        if first[leaf[name]] == name
    ]


def _of_adapters(module: Any, leaf: Mapping[str, str]) -> list[_Tensor]:
    """Returns the tensors of adapters, with the names that they have in files of peft."""
    if len(module.peft_config) > 1:
        fix = "merge=True merges the active adapter; or delete the other adapters: peft_model.delete_adapter(name)"
        raise FzeroValueError(_OWNER, f"the model has several adapters: {', '.join(module.peft_config)}", fix=fix)
    state, names = adapters.file_names(module)
    return [
        _Tensor(stored, tuple(state[name].shape), [ElementRun(0, state[name].numel(), leaf[name], 0)])
        for stored, name in names.items()
    ]


def _of_base(module: Any, merged: adapters.Merged) -> list[_Tensor]:
    """Returns the tensors that transformers would write after peft's `merge_and_unload`, or for a model that is not
    quantized."""
    base, state = module.get_base_model() if adapters.is_adapted(module) else module, module.state_dict()
    plain = {stored: state[name] for stored, (name, _) in merged.names.items()}
    for stored, (_, leaf) in merged.names.items():
        if leaf in merged.forms:
            shape, dtype = merged.forms[leaf]
            plain[stored] = torch.empty(shape, dtype=dtype, device="meta")
    leaf = {stored: param for stored, (_, param) in merged.names.items()}
    if not hasattr(base, "save_pretrained"):
        return _as_they_are(plain, leaf)
    with torch.device("meta"):
        wanted = {*type(base)(base.config).state_dict()}
    if wanted != plain.keys():
        problems = [f"{name}: missing" for name in sorted(wanted - plain.keys())[:4]]
        problems += [f"{name}: of the adapter" for name in sorted(plain.keys() - wanted)[:4]]
        fix = "model.write_back(train.gather(state).params), then peft_model.merge_and_unload().state_dict()"
        if merged.forms:
            fix = "stream the adapters, without merge=True, to an engine that has the base model"
        raise FzeroValueError(_OWNER, "these adapters cannot be merged layer by layer", problems, fix)
    ties = weight_conversions.tied(base)
    untied = [name for name, first in ties.items() if leaf.get(name) != leaf.get(first)]
    if untied:
        logger.warning(
            "fz.hf.stream: training has untied %s: give the engine a configuration with tie_word_embeddings=False",
            ", ".join(f"{name} from {ties[name]}" for name in untied),
        )
    return _named(weight_conversions.stored(base, plain, {n: x for n, x in ties.items() if n not in untied}), leaf)


def _by_block(tensors: Sequence[_Tensor], blocks: Sequence[str]) -> dict[str, list[_Tensor]]:
    """Groups tensors by the block that their parameters belong to; "" for those outside blocks."""
    out: dict[str, list[_Tensor]] = {}
    for tensor in tensors:
        inside = (b for source in tensor.sources for b in blocks if source.startswith(f"{b}."))
        out.setdefault(next(inside, ""), []).append(tensor)
    return out
