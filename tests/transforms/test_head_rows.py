"""The head in rows: equal to the whole, whatever the loss, and never a value as wide as all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import compat, optim
from fzero.errors import BudgetError, FzeroValueError
from fzero.program.ops.control import add_product
from fzero.testing import check_equivalent
from fzero.trace import head_rows
from fzero.trace.record import record

ROWS, LENGTH, WIDTH, VOCAB = 4, 16, 32, 96


@fz.block
def layer(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"]


def hidden(params, tokens):
    x = params["embed"][tokens]
    for p in params["layers"]:
        x = layer(p, x)
    return x


def normed(p, x):
    return F.layer_norm(x, (WIDTH,), p["norm"])


HEADS = {
    "matrix": lambda p, x: normed(p, x) @ p["out"].T,
    "linear": lambda p, x: F.linear(normed(p, x), p["out"], p["bias"]),
    "einsum": lambda p, x: torch.einsum("bsd,vd->bsv", normed(p, x), p["out"]),
    "bare": lambda p, x: x @ p["out"].T,
}


def make(loss: Any, head: str = "matrix", block: bool = True, tied: bool = False) -> Any:
    """A loss function of parameters and (tokens, targets)."""
    run = fz.block(HEADS[head]) if block else HEADS[head]

    def loss_fn(params, batch):
        tokens, targets = batch
        own = params["head"] | ({"out": params["embed"]} if tied else {})
        return loss(run(own, hidden(params, tokens)), targets)

    return loss_fn


def parameters(head: str = "matrix", tied: bool = False) -> Any:
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g) / shape[-1] ** 0.5  # noqa: E731
    own = {} if tied else {"out": draw(VOCAB, WIDTH)}
    own |= {} if head == "bare" else {"norm": torch.ones(WIDTH)}
    own |= {"bias": draw(VOCAB)} if head == "linear" else {}
    layers = [{"up": draw(WIDTH, 64), "down": draw(64, WIDTH)} for _ in range(2)]
    return {"embed": draw(VOCAB, WIDTH), "layers": layers, "head": own}


def batch(rows: int = ROWS, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, VOCAB, (rows, LENGTH), generator=g) for _ in range(2))
    targets[0, 3:9], targets[2, :2] = -100, -100
    return tokens, targets


def flat(**options):
    return lambda z, y: F.cross_entropy(z.flatten(0, 1).float(), y.flatten(), **options)


def weights_of_classes(z, y):
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 1.5, VOCAB))


def by_hand(z, y):
    mask = (y >= 0).float()
    picked = F.log_softmax(z.float(), -1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
    return -(picked * mask).sum() / mask.sum()


def with_z_loss(z, y):
    return flat()(z, y) + 1e-2 * z.float().logsumexp(-1).square().mean()


def logits_shifted(z, y):
    return F.cross_entropy(z[:, :-1].flatten(0, 1).float(), y[:, 1:].flatten())


def labels_shifted(z, y):  # as transformers does
    shifted = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(z.float().view(-1, VOCAB), shifted.view(-1))


def soft_capped(z, y):
    return flat()(30 * torch.tanh(z / 30), y)


def classes_in_dim_1(z, y):
    return F.cross_entropy(z.transpose(1, 2), y)


def weighted(z, y):
    return fz.loss.weighted(flat(reduction="sum")(z, y), (y != -100).sum())


def with_metrics(z, y):
    return flat()(z, y), {"right": (z.argmax(-1) == y).float().mean(), "mean": z.mean(), "peak": z.detach().amax()}


def focal(z, y):
    losses = F.cross_entropy(z.flatten(0, 1), y.flatten().clamp(min=0), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def of_a_teacher(z, y):
    teacher = torch.softmax(0.5 * z.detach(), -1)
    return F.kl_div(F.log_softmax(z, -1).flatten(0, 1), teacher.flatten(0, 1), reduction="batchmean")


def of_elements(z, y):
    return F.binary_cross_entropy_with_logits(z, F.one_hot(y.clamp(min=0), VOCAB).float())


LOSSES = {
    "mean": flat(),
    "sum": flat(reduction="sum"),
    "smoothed": flat(label_smoothing=0.1),
    "other ignored": flat(ignore_index=7),
    **{
        fn.__name__: fn
        for fn in (
            *(weights_of_classes, by_hand, with_z_loss, logits_shifted, labels_shifted, soft_capped, classes_in_dim_1),
            *(weighted, with_metrics, focal, of_a_teacher, of_elements),
        )
    },
}


def trained(loss_fn: Any, params: Any, given: Any, *transforms: Any, steps: int = 2, **options: Any) -> Any:
    """Metrics of the last step, parameters, and the program."""
    step = fz.train_step(loss_fn, optim.sgd(0.05), has_aux=options.pop("has_aux", False))
    train = fz.compile(fz.compose(*transforms)(step), fz.make_mesh(), **({"backend": "eager"} | options))
    state = train.init(params)
    for _ in range(steps):
        state, metrics = train(state, given)
    return metrics, state.params, train.program


def assert_same(found: Any, want: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(fz.tree.leaves(found), fz.tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def num_parts(program: Any) -> int:
    return sum(line.op == "add_product" for line, _ in program.walk())


@pytest.mark.full(keep=["other ignored", "of_a_teacher", "with_z_loss"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_rows_are_equal_to_the_whole(name):
    """Loss, metrics and parameters of two steps; and no line of the program has a value as large as the logits."""
    loss_fn, aux = make(LOSSES[name]), name == "with_metrics"
    given = batch()
    if name == "other ignored":
        given[1].clamp_(min=0)
    want = trained(loss_fn, parameters(), given, has_aux=aux)
    found = trained(loss_fn, parameters(), given, fz.remat(head_rows=16), has_aux=aux)
    assert_same(found[:2], want[:2])
    logits = ROWS * LENGTH * VOCAB
    assert num_parts(found[2]) == 4 and num_parts(want[2]) == 0
    assert all(v.numel < logits for line, _ in found[2].walk() for v in line.out)
    graphs = [f.graph.graph for f in found[2].functions.values()]
    wide = [x for g in graphs for x in g.nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    assert all(x.meta["val"].numel() < logits for x in wide)


@pytest.mark.full(keep=["bare-False-False", "bare-True-False"])
@pytest.mark.parametrize(
    ("head", "block", "tied"),
    [("linear", True, False), ("einsum", True, False), ("bare", True, False), ("bare", False, False),
     ("matrix", False, False), ("linear", True, True), ("matrix", False, True)],
)  # fmt: skip
def test_heads_in_rows_are_equal_to_the_whole(head, block, tied):
    loss_fn, params = make(flat(), head, block, tied), parameters(head, tied)
    want, found = (trained(loss_fn, params, batch(), *more) for more in ((), (fz.remat(head_rows=16),)))
    assert_same(found[:2], want[:2])
    assert num_parts(found[2]) == 4


def test_a_frozen_head_has_no_gradient_to_add_up():
    loss_fn = make(flat())
    step = fz.train_step(loss_fn, optim.sgd(0.5), trainable=lambda path, leaf: "out" not in path)
    results = []
    for more in ((), (fz.remat(head_rows=16),)):
        train = fz.compile(fz.compose(*more)(step), fz.make_mesh(), backend="eager")
        state, metrics = train(train.init(parameters()), batch())
        results.append((metrics, state.params))
    assert_same(*results)
    assert any(name.endswith("_rows") for name in train.program.functions) and not num_parts(train.program)


def test_two_heads_on_the_same_rows():
    def loss_fn(params, given):
        x = hidden(params, given[0])
        return flat()(x @ params["head"]["out"].T, given[1]) + flat()(x @ params["second"].T, given[1].roll(1, 1))

    params = parameters() | {"second": torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(5)) / 6}
    del params["head"]["norm"]
    want, found = (trained(loss_fn, params, batch(), *more) for more in ((), (fz.remat(head_rows=16),)))
    assert_same(found[:2], want[:2])
    assert num_parts(found[2]) == 8


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch does not have it")
def test_the_loss_of_torch_that_has_the_matrix():
    def loss_fn(params, given):
        x = hidden(params, given[0])
        return F.linear_cross_entropy(x.flatten(0, 1), params["head"]["out"], given[1].flatten())

    params = parameters("bare")
    want, found = (trained(loss_fn, params, batch(), *more) for more in ((), (fz.remat(head_rows=16),)))
    assert_same(found[:2], want[:2])
    assert num_parts(found[2]) == 4


# --- how many rows ---


@pytest.mark.parametrize(("rows", "parts"), [(64, 0), (63, 2), (32, 2), (31, 4), (5, 16), (4, 16)])
def test_rows_at_once_are_at_most_those_that_are_asked_for(rows, parts):
    loss_fn = make(flat())
    lowered = fz.lower(fz.remat(head_rows=rows)(fz.train_step(loss_fn, optim.sgd(0.1))), fz.AbstractMesh(data=1),
                       parameters(), batch())  # fmt: skip
    assert num_parts(lowered.program) == parts
    assert bool(parts) == any("is computed in" in x for x in lowered.program.notes) == ("head_rows" in lowered.stages())


def test_positions_of_one_sequence_are_rows():
    given = tuple(x[:1] for x in batch())
    want, found = (trained(make(labels_shifted), parameters(), given, *more) for more in ((), (fz.remat(head_rows=4),)))
    assert_same(found[:2], want[:2])
    assert num_parts(found[2]) == 4


def test_the_largest_tensor_of_a_run_is_one_of_some_rows():
    """As the allocator sees it, not as the program says."""

    class Largest(compat.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
            return out

    most = {}
    for rows in (None, 8):
        train = fz.compile(fz.remat(head_rows=rows)(fz.train_step(make(flat()), optim.sgd(0.1))), fz.make_mesh(),
                           backend="eager")  # fmt: skip
        state = train.init(parameters())
        state, _ = train(state, batch())
        with Largest() as largest:
            train(state, batch())
        most[rows] = largest.numel
    assert most[None] == ROWS * LENGTH * VOCAB and most[8] <= ROWS * LENGTH * 64


# --- refusals ---


def squared(z, y):
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
    return loss * loss


def of_sequences(z, y):
    picked = F.log_softmax(z, -1).gather(-1, y.clamp(min=0)[..., None])[..., 0].sum(-1)
    return -F.logsigmoid(picked).mean()


def along_rows(z, y):
    return flat()(z.softmax(1).log(), y)


REFUSED = {
    squared: r"is of all rows, and by aten\.\w+\.\w+, .*each row depends on it",
    of_sequences: r"aten\.sum\.dim_IntList, .* is of all rows, and by",
    along_rows: "depends on all rows",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda fn: fn.__name__)
def test_a_loss_of_all_rows_together_is_refused(loss):
    step = fz.remat(head_rows=4)(fz.train_step(make(loss), optim.sgd(0.1)))
    given = tuple(x[:1] for x in batch())  # one sequence
    with pytest.raises(FzeroValueError, match=rf"(?s)no rows to compute apart.*{REFUSED[loss]}.*Fix: ") as raised:
        fz.lower(step, fz.AbstractMesh(data=1), parameters(), given)
    assert "test_head_rows.py:" in str(raised.value)


def test_a_head_that_ranks_cut_is_refused():
    rules = {"out": 0, "up": 1, "down": 0}
    step = fz.compose(fz.tensor_parallel(axis="model", rules=rules), fz.remat(head_rows=16))(
        fz.train_step(make(flat()), optim.sgd(0.1))
    )
    with pytest.raises(FzeroValueError, match=r"(?s)head_rows.*with tensor_parallel\(axis='model'"):
        fz.lower(step, fz.AbstractMesh(model=2), parameters(), batch())


def test_rows_that_no_part_has_are_refused_with_those_that_one_has():
    def lower(rows):
        step = fz.remat(head_rows=rows)(fz.train_step(make(flat()), optim.sgd(0.1)))
        return fz.lower(step, fz.AbstractMesh(data=1), parameters(), batch())

    with pytest.raises(FzeroValueError, match=r"its 64 rows .* at most 3; the fewest are 4, as many of each of 4 seq"):
        lower(3)
    assert num_parts(lower(4).program) == 16


def test_a_step_without_a_head_is_refused():
    step = fz.remat(head_rows=16)(fz.train_step(lambda p, x: (x * p["w"]).square().mean(), optim.sgd(0.1)))
    with pytest.raises(FzeroValueError, match="no function has both passes of a product with a parameter"):
        fz.lower(step, fz.AbstractMesh(data=1), {"w": torch.ones(4)}, torch.ones(8, 4))


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, "all", torch.tensor(3)])
def test_rows_that_are_no_number_of_rows(rows):
    with pytest.raises(FzeroValueError, match=r"(?s)head_rows=.*Fix: rows that are computed at once"):
        fz.remat(head_rows=rows)


# --- with other transforms ---

TOGETHER = {
    "zero-3 bf16": ({"data": 2}, [fz.shard_params(), fz.mixed_precision("bf16")]),
    "reduced in bf16": ({"data": 2}, [fz.shard_params(), fz.mixed_precision("bf16", reduce="bf16")]),
    "loop": ({"data": 2}, [fz.shard_opt_state(), fz.accumulate(2)]),
    "vertical": ({"data": 2}, [fz.shard_params(), fz.accumulate(2, vertical=True), fz.mixed_precision("bf16")]),
    "two axes": ({"replica": 2, "data": 2}, [fz.shard_params(axis="data"), fz.data_parallel(axis="replica")]),
    "tensor": ({"data": 1, "model": 2}, [fz.tensor_parallel(axis="model", rules={"up": 1, "down": 0})]),
    "positions": ({"data": 1, "seq": 2}, [fz.sequence_parallel(axis="seq")]),
    "stages": ({"pipe": 2}, [fz.pipeline(), fz.accumulate(2, vertical=True)]),
    "offload": ({"data": 2}, [fz.shard_params(), fz.offload("cpu", ("opt_state", "params"))]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("loss", [flat(), weighted], ids=["mean", "weighted"])
def test_the_head_in_rows_among_other_transforms(name, loss):
    axes, transforms = TOGETHER[name]
    step = fz.compose(*transforms, fz.remat("full", head_rows=8))(fz.train_step(make(loss), optim.adamw(1e-2)))
    mesh = fz.AbstractMesh(**axes)
    given = batch(8)
    given[1].clamp_(min=0)
    if loss is weighted:  # else the mean of means is another than that of the whole batch
        given[1][5, 3:], given[1][0, :4] = -100, -100
    report = check_equivalent(step, parameters(), given, mesh, steps=2)
    part = tuple(x[: 8 // mesh.axes.get("data", 1) // mesh.axes.get("replica", 1)] for x in given)
    assert report.equivalent and any(map(num_parts, fz.lower(step, mesh, parameters(), part).programs))


def on_ranks(backend: str, precision: str) -> list[Any]:
    mesh, found = fz.make_mesh(), []
    given = tuple(x.chunk(2)[mesh.rank] for x in batch(8))
    for rows in (None, 16):
        transforms = (
            fz.shard_params(),
            fz.mixed_precision("bf16", watch=True),
            fz.accumulate(2),
            fz.remat(head_rows=rows),
        )
        train = fz.compile(
            fz.compose(*transforms)(fz.train_step(make(weighted), optim.sgd(0.1))), mesh, backend=backend
        )
        state = train.init(parameters())
        for _ in range(2):
            state, metrics = train(state, given)
        found.append(([float(metrics["loss"])], train.gather(state).params, num_parts(train.program)))
    return found


@pytest.mark.full
@pytest.mark.parametrize(("backend", "precision"), [("eager", "fp16"), ("inductor", "bf16")])
def test_two_processes_compute_the_head_in_rows(run_ranks, backend, precision):
    for whole, rows in run_ranks(2, on_ranks, backend, precision):
        assert (whole[2], rows[2]) == (0, 2)
        assert_same(rows[:2], whole[:2], 1e-2)


def test_a_low_precision_gradient_is_added_up_in_float32():
    """And so is as exact with many parts as with one: no cast of the gradient is left in between."""
    step = fz.train_step(make(flat(), "bare"), optim.sgd(1.0))
    exact = torch.func.grad(lambda p: make(flat(), "bare")(p, batch()))(parameters("bare"))["head"]["out"]
    errors = {}
    for rows in (None, 4):
        train = fz.compile(fz.compose(fz.mixed_precision("bf16"), fz.remat(head_rows=rows))(step), fz.make_mesh(),
                           backend="eager")  # fmt: skip
        state, _ = train(train.init(parameters("bare")), batch())
        grad = parameters("bare")["head"]["out"] - state.params["head"]["out"]
        errors[rows] = float((grad - exact).norm() / exact.norm())
    totals = {v.dtype for line, _ in train.program.walk() if line.op == "add_product" for v in line.out}
    assert totals == {torch.float32} and errors[4] < 1.2 * errors[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_added_in_place(dtype, monkeypatch):
    total, a, b = torch.randn(40, 24), torch.randn(16, 40).to(dtype), torch.randn(16, 24).to(dtype)
    want = total.double() + a.double().T @ b.double()
    monkeypatch.setattr("fzero.program.ops.control.BLOCK", 24 * 4 * 7)  # several blocks, the last one smaller
    for native in (True, False):
        monkeypatch.setattr(compat, "native_bf16", lambda device, native=native: native)
        monkeypatch.setattr(compat, "native_fp16", lambda device, native=native: native)
        sums = total.clone()
        assert add_product(sums, a, b) is sums
        torch.testing.assert_close(sums.double(), want, rtol=1e-2, atol=2e-2 if native else 1e-4)


# --- chosen by the budget ---


def plans(budget: str | None, *transforms: Any) -> Any:
    """Of a vocabulary that makes most of the step."""
    params = parameters()
    params["head"]["out"] = torch.empty(2048, WIDTH, device="meta")
    params["embed"] = torch.empty(2048, WIDTH, device="meta")
    given = tuple(torch.zeros(32, 64, dtype=torch.int64) for _ in range(2))
    step = fz.compose(fz.shard_params(), *transforms)(fz.train_step(make(flat()), optim.sgd(0.1)))
    return fz.lower(step, fz.AbstractMesh(data=2), params, given, memory_budget=budget)


@pytest.mark.full
def test_a_budget_chooses_the_rows():
    assert plans(None, fz.remat("full")).plan.peak_bytes > 16 << 20
    parts = {}
    for budget in ("100 MiB", "12 MiB", "6 MiB"):
        lowered = plans(budget, fz.remat("auto"))
        parts[budget] = num_parts(lowered.program)
        (said,) = [x.chosen for x in lowered.plan.decisions if x.what == "head rows"]
        text = f"_value_and_grad is computed in {parts[budget]} parts of {2048 // max(1, parts[budget])} rows"
        assert said.endswith(text if parts[budget] else "all at once") and "head rows" in str(lowered.plan)
    assert parts["100 MiB"] == 0 < parts["12 MiB"] < parts["6 MiB"]
    assert num_parts(plans("6 MiB", fz.remat("full", head_rows="auto")).program)
    assert num_parts(plans(None, fz.remat("full", head_rows="auto")).program) == 0


def test_rows_are_advised_where_a_step_does_not_fit():
    with pytest.raises(BudgetError, match=r"fz\.remat\(policy='full', head_rows='auto'\): .* which fits"):
        plans("12 MiB", fz.remat("full"))


def test_a_head_that_has_no_rows_stays_whole_under_a_budget():
    params, given = parameters(), batch()
    step = fz.remat("auto")(fz.train_step(make(squared), optim.sgd(0.1)))
    lowered = fz.lower(step, fz.AbstractMesh(data=1), params, given, memory_budget="1 MiB")
    assert not any("is computed in" in x for x in lowered.program.notes)


# --- the split itself ---


def test_what_does_not_depend_on_the_product_is_computed_ahead():
    def step(w, x, y):
        w = w.detach().requires_grad_()
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(torch.tanh(x) @ w, y)
        return [loss, *torch.autograd.grad(loss, [w, x])]

    with compat.FakeTensorMode() as mode:
        given = [
            mode.from_tensor(x) for x in (torch.randn(8, 50), torch.randn(12, 8), torch.zeros(12, dtype=torch.int64))
        ]
        graph = record(lambda *xs: step(*xs), given, owner="step", names=["w", "x", "y"])
    made = head_rows.in_rows(graph, 4)
    assert isinstance(made, head_rows.HeadRows)
    assert (made.parts, made.rows) == (3, 4) and made.totals[0].shape == (8, 50) and made.totals[0].result == 1
    of = lambda part: {str(x.target) for x in part.graph.nodes if x.op == "call_function"}  # noqa: E731
    assert "aten.tanh.default" in of(made.ahead) and "aten.mm.default" not in of(made.ahead)
    assert made.behind is not None and "aten.cat.default" in of(made.behind)
    assert sum("mm" in str(x.target) for x in made.part.graph.nodes) == 2


@pytest.mark.full
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_models_of_transformers(name):
    """Their loss shifts the labels; Gemma's head is tied, and its logits are soft-capped."""
    import transformers

    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, attn_implementation="eager")
    torch.manual_seed(0)
    model = fz.functionalize(transformers.AutoModelForCausalLM.from_config(config))
    tokens = torch.randint(0, 128, (2, 16))
    given = {"input_ids": tokens, "labels": torch.where(torch.rand(2, 16) < 0.2, -100, tokens)}
    results = []
    for rows in (None, 8):
        step = fz.remat("full", head_rows=rows)(model.train_step(optim.sgd(0.1)))
        train = fz.compile(step, fz.make_mesh(), backend="eager")
        state, metrics = train(train.init(model.params), given)
        results.append(({k: metrics[k] for k in ("loss", "grad_norm")}, state.params, num_parts(train.program)))
    (*whole, none), (*found, parts) = results
    assert_same(found, whole)
    assert (none, parts) == (0, 4)
