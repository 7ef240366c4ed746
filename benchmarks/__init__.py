"""Benchmark suites that asv runs over the history of curvlab."""
