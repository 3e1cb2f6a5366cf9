"""Optimisation of a module: export, folding, splitting off the state-independent part, packing."""
