"""Axes of parallelism, and Muon: for each its contestants, which parallel_axes.py runs."""

from contest import Axis

from axes import expert, muon, pipeline, sequence, tensor

AXES: dict[str, Axis] = {
    "tensor": tensor.AXIS,
    "expert": expert.AXIS,
    "sequence": sequence.AXIS,
    "pipeline": pipeline.AXIS,
    "muon": muon.AXIS,
}
