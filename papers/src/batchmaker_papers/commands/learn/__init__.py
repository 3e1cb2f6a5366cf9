"""`batchmaker learn`: a batching policy for a model, from its requests."""
