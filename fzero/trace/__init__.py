"""Tracing: functions of tensors become graphs of ATen operations. Knows nothing of programs."""
