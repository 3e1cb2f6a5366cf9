"""`batchmaker bench`: policies measured against each other and against the best of plain torch, in one run."""
