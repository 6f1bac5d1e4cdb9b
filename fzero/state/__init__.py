"""Creates, loads, restores and moves the state of a run, one tensor at a time.

Each rank makes or reads only its own shards, and stores each tensor on its memory tier before it
makes the next one. The methods `init`, `load`, `restore` and `gather` of a compiled step call these
files.

| file | what it does |
|---|---|
| `initial_state.py` | creates the first state, from an init function, parameters or weight files |
| `tensor_init.py` | initializes each tensor as a shard, without making the whole tensor where possible |
| `load.py` | loads parameters from safetensors files, and decides which ones to initialize instead |
| `restored_state.py` | restores a state from a checkpoint of any mesh |
| `tensor_storage.py` | allocates the tensors of a state on their memory tiers, and writes them there |
| `state_comparison.py` | assembles a state from its tensors, and lists its differences from the expected one |
| `gather.py` | gathers the unsharded state on every rank |
| `move.py` | `fz.move`: moves a state to another memory tier and back |
| `overwrite.py` | overwrites parameters of a state with given unsharded values |
"""
