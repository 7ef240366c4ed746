"""Studies: the products that measure, each a package, with what they share beside them.

compare   every provider with every solver on one problem, as frames and a report
train     one training run, checkpointed and resumed
small     errors, bounds and plan: one function each, from a problem to a frame
"""
