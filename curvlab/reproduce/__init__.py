"""Reproduce the paper: its tables, its figures and its claims, as studies that resume."""
