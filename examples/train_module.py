"""An ordinary module, trained as it is: what a PyTorch loop becomes. The lines that it was are behind `# was:`.

torchrun --nproc-per-node 2 examples/train_module.py [steps]
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from console import say
from einops import rearrange

import fzero as fz


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class NextByte(nn.Module):
    """The next byte of a text from the 16 before it."""

    def __init__(self, width=256, layers=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width // 16), nn.Linear(width, 256)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))

    def forward(self, text):
        return self.head(self.layers(rearrange(self.embed(text), "b t width -> b (t width)")))


parser = argparse.ArgumentParser(description="Trains a small model on Python's own source.")
parser.add_argument("steps", type=int, nargs="?", default=150, help="number of steps (default: 150)")
STEPS, ROWS = parser.parse_args().steps, 240
if STEPS < 1:
    parser.error(f"{STEPS} steps are less than 1")
data = fz.data.TokenDataset(fz.data.python_source(limit_bytes=1 << 20).long(), seq=16, batch=ROWS, seed=0)
torch.manual_seed(0)  # the same first parameters on every rank
net = NextByte()
mesh = fz.make_mesh()  # was: dist.init_process_group("nccl")
model = fz.functionalize(net)  # was: net = DistributedDataParallel(net.to(device))
step = model.train_step(  # was: optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(2e-3)),
    lambda out, batch: F.cross_entropy(out, batch[1]),
)
train = fz.compile(fz.shard_params(step), mesh, backend="eager")  # ZeRO-3; "inductor", the default, compiles
state = train.init(model.params)
for i in range(STEPS):
    text, targets = data.batch_at(i, mesh.rank, mesh.size)
    state, metrics = train(state, (text, targets[:, -1]))
    # was: optimizer.zero_grad()
    #      loss = F.cross_entropy(net(text), targets[:, -1])
    #      loss.backward()
    #      clip_grad_norm_(net.parameters(), 1.0)
    #      optimizer.step()
    if (i + 1) % 25 == 0 or i + 1 == STEPS:
        say(f"step {i + 1}/{STEPS}  loss {metrics['loss'].item():.3f}")  # on the first rank
model.write_back(train.gather(state).params)  # was: nothing: net.state_dict() is of the trained module again
fz.close_mesh()
