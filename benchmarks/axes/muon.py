"""`fz.optim.muon` on one process, under ZeRO-3 and with offload, compared with torch.optim.Muon and DeepSpeed's Muon.

Muon updates the matrices of the layers, AdamW the other parameters; all in fp32, and Muon iterates in bf16, as torch's
does. DeepSpeed's Muon has another formula, so its sharded runs are compared with its own run on one process.
"""

from __future__ import annotations

from typing import Any

import torch
from contest import Axis
from model import Config, make_init, make_loss, module
from training import WEIGHT_DECAY, FzeroStep, Step, averaged, deepspeed_engine, deepspeed_module, deepspeed_step

LR, OTHER_LR = 2e-3, 3e-4


def of_muon(path: str, leaf: torch.Tensor) -> bool:
    return "layers" in path and leaf.ndim == 2


def _fzero(config: Config, size: int, backend: str, offloaded: bool) -> Step:
    import fzero as fz
    from fzero import optim

    other = optim.adamw(OTHER_LR, weight_decay=WEIGHT_DECAY)
    step = fz.train_step(make_loss(config), optim.muon(LR, weight_decay=WEIGHT_DECAY, where=of_muon, other=other))
    step = fz.shard_params(step) if size > 1 else step
    step = fz.offload(step, "cpu", "opt_state") if offloaded else step
    mesh = fz.make_mesh(device="cpu", data=size)
    return FzeroStep(step, mesh, make_init(config)(fz.random.key(0)), backend=backend)


def _torch(config: Config) -> Step:
    model = module(config)
    parameters = list(model.named_parameters())
    muon = torch.optim.Muon([x for name, x in parameters if of_muon(name, x)], lr=LR, weight_decay=WEIGHT_DECAY)
    rest = [x for name, x in parameters if not of_muon(name, x)]
    adamw = torch.optim.AdamW(rest, lr=OTHER_LR, weight_decay=WEIGHT_DECAY, fused=True)

    def run(batch: Any) -> Any:
        loss = model(*batch)
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return run


def _deepspeed(config: Config, size: int, offloaded: bool) -> Step:
    deepspeed_module()
    model = module(config)
    for name, x in model.named_parameters():
        x.use_muon = of_muon(name, x)  # type: ignore[attr-defined]
    rates = {"muon_lr": LR, "adam_lr": OTHER_LR, "lr": LR, "weight_decay": WEIGHT_DECAY}
    changes: dict[str, Any] = {"optimizer": {"type": "Muon", "params": rates}, "gradient_clipping": 0.0}
    if offloaded:
        changes["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    return averaged(deepspeed_step(deepspeed_engine(model, config.batch // size, 1, **changes)), size)


def make(name: str, config: Config, rank: int, size: int, backend: str, batch: Any) -> Step:
    if name == "torch":
        return _torch(config)
    if name.startswith("fzero"):
        return _fzero(config, size, backend, offloaded="offloaded" in name)
    return _deepspeed(config, size, offloaded="offloaded" in name)


AXIS = Axis(
    make,
    shard=lambda name, rank, size: (rank, size),
    titles={
        "torch": "torch.optim.Muon and AdamW",
        "fzero": "fzero",
        "fzero_2": "fzero, shard_params",
        "fzero_3": "fzero, shard_params",
        "fzero_4": "fzero, shard_params",
        "fzero_offloaded": "fzero, shard_params and offload",
        "deepspeed": "DeepSpeed's Muon, ZeRO-1",
        "deepspeed_2": "DeepSpeed's Muon, ZeRO-1",
        "deepspeed_offloaded": "DeepSpeed's Muon, ZeRO-2 and offload",
    },
    pairs=(("fzero", "torch"),),
    model={"layers": 4, "width": 256, "heads": 8, "seq": 128, "batch": 12},
    small={"layers": 2, "width": 64, "heads": 4, "seq": 16},
    processes=(1,),
    fixed={"fzero_2": 2, "fzero_3": 3, "fzero_4": 4, "fzero_offloaded": 2, "deepspeed_2": 2, "deepspeed_offloaded": 2},
    steps=20,
    formulas={"deepspeed": "DeepSpeed"},
    counted=False,
    note="Muon for the matrices of the layers, AdamW for the rest",
)
