"""Measures on any torch device: time, memory, floating-point operations, and the environment."""
