"""The CUDA executor: one worker per GPU. Tasks are submitted, and nothing waits for a GPU."""
