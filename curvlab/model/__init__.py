"""What a model is made of and what it computes: layers, the graph of them, and recordings of batches."""
