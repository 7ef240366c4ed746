"""Rows on several processes: every statistic is a sum over rows, reduced before anything non-linear.

Inside a torch.distributed program each rank makes a `Problem` of its own rows and all ranks make the
same calls with the same `process_group`; without that argument nothing communicates.

    problem   = curvlab.Problem(model, "cross-entropy", inputs[rows], targets[rows])     # a rank's rows
    curvature = curvlab.estimate("pch-1", problem, process_group=group)
    gradient  = problem.gradient(process_group=group)
    solution  = curvlab.solve("ea-cg", curvature, gradient, alpha=0.05, process_group=group)

A rank without rows passes `[]` as its inputs, and takes part. `docs/scaling.md` says what is sent.
"""

from curvlab.distributed.communicator import Launch, launched, shard
from curvlab.distributed.statistics import LayerTraffic, layer_traffic

__all__ = ["Launch", "LayerTraffic", "launched", "layer_traffic", "shard"]
