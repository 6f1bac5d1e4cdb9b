"""Predicts the cost of a program before any device is touched: seconds, bytes sent, and memory.

`plan.py` combines the program with the rates of a device. Memory is exact, from the program alone;
times are predicted from rates that are measured (`fzero calibrate`) or listed for known devices.
This folder imports nothing from `transforms/` or `compiler/`: it does not know how a program was
made.

| file | what it does |
|---|---|
| `plan.py` | `Plan`: peak memory, bytes per channel and step time, from the files below |
| `device.py` | `Device`: the rates at which a device computes, reads, copies and sends |
| `device_lookup.py` | looks up a device by name, in a calibration file, or this machine |
| `calibration.py` | reads and writes the file with the measured rates of this machine |
| `cost.py` | the FLOPs, bytes and seconds of each op |
| `inductor/` | predicts the kernels and the temporary memory of compiled subgraphs |
| `memory.py` | the bytes alive at every op, by role |
| `process_memory.py` | the memory of the process besides its program: interpreter, libraries, device context |
| `timeline.py` | simulates when every op and transfer starts and ends, and what waits for what |
| `render.py` | renders a plan as text, JSON, HTML or a Chrome trace |
| `page/` | renders a plan as an HTML page with charts, the program and the user's lines |
| `picture.py` | draws a plan as a picture: the queues over time, and the memory below |
"""
