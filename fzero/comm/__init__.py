"""Communicates between ranks: starts and joins processes, exchanges control messages and runs collectives.

Tensors move through process groups (gloo and NCCL) or, between CPU ranks of one host, through
shared memory. Control messages are small JSON values, which go through process groups of their own or
the launcher's store; nothing that is received is unpickled or run as code. A rank that waits also watches
the other ranks, so a rank that failed or left is an error that names it, not a hang. This folder
imports only `errors.py`, `_compat/` and `_utils/`: the mesh is built on top of it.

| file | what it does |
|---|---|
| `launcher_environment.py` | reads from the launcher's environment which rank this process is, and on which host |
| `launcher.py` | ties a rank to torchrun: the rank exits with it, and an error is printed once, briefly, at the end |
| `rendezvous.py` | joins the processes of one start in the store, under a name that no earlier start used |
| `local_device.py` | chooses the device of this rank, and checks that the devices of all ranks form a mesh |
| `groups.py` | the ranks and the process group along one mesh axis |
| `control_messages.py` | reads and writes small messages of ranks in the launcher's store |
| `collective_sequence.py` | numbers collective actions, so that ranks that do different things raise an error |
| `control_group.py` | exchanges JSON over process groups of its own; runs a function on all ranks together |
| `transport.py` | chooses process groups or shared memory for a mesh |
| `collectives.py` | runs collectives through process groups, each as a start and a wait |
| `shared_memory.py` | runs collectives between the CPU ranks of one host through shared memory |
"""
