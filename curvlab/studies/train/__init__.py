"""`curvlab train`: the plan of a run, the run itself, and the folder in which it is kept and resumed."""
