"""Keeps runs going when ranks or hosts are lost (`fz.run`), by recovering the state from memory.

Under `python -m fzero.run`, each rank is the child of a supervisor. While it trains, it keeps its
newest states in host memory that outlives its process; with `fz.redundant` another host holds a
copy. When a rank dies, its supervisor starts it again, while the other ranks keep their processes.
All ranks meet on a new mesh, find the newest state that is complete in the memory of all hosts, and
continue from it. `supervisor.py` and `host_directory.py` do not import PyTorch.

| file | what it does |
|---|---|
| `supervisor.py` | runs one rank as a child process and restarts it when it dies (`python -m fzero.run`) |
| `restarts.py` | `fz.run`: calls the training function, and again on a new mesh after each lost rank |
| `recovery_manager.py` | joins the ranks on a mesh, restores the newest state, and commits states to host memory |
| `run_context.py` | `fz.Run`: gives the training function its mesh, state and step numbers, and stores states |
| `stop_request.py` | records stop signals, and makes all ranks stop before the same step |
| `health.py` | `fz.Health`: the checks that a run makes while it trains, and their findings |
| `memory_checkpoint.py` | stores the newest states in memory files that outlive the process |
| `memory_slots.py` | makes, finds and checks the memory files of states, which are overwritten in place |
| `host_directory.py` | finds the directory of a host's in-memory checkpoints, and shares each rank's progress |
| `peer_replicas.py` | receives and stores the shards that another host sends (`fz.redundant`) |
| `recovery_source.py` | finds the newest state that is complete across all hosts, and reads this rank's shard |
| `node_heartbeat.py` | detects lost hosts by heartbeats in the store |
| `abort_transfers.py` | aborts GPU collectives that wait for a lost rank |
"""
