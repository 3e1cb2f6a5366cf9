"""What a user writes: cells, unfold functions, layers, sequences; and how a request is unfolded."""
