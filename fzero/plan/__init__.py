"""The plan: what a program costs, known before any device is touched: seconds, bytes on every wire, memory at every
line."""
