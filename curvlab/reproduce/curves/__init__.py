"""The figures: training loss and test accuracy by epochs and by time."""
