"""`curvlab compare`: its settings, the tasks they ask for, how each is measured, and the resulting frames."""
