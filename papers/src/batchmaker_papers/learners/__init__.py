"""Learning a batching policy from closed mini-batches, by Q-learning (ED-Batch, ICML 2023)."""
