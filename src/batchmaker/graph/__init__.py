"""What a request computes: cell types, cell graphs in arrays, recording an unfold function, subgraphs."""
