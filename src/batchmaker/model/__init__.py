"""The interface for model authors: cells, unfold functions, layers, sequences; and the unfolding of a request."""
