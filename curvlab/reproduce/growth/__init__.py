"""Table 1: what grows how fast, and what fits the paper's card."""
