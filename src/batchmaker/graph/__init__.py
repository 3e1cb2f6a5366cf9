"""The computation of a request: cell types, cell graphs in arrays, recording of unfold functions, subgraphs."""
