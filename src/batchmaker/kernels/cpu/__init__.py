"""Recurrent steps on the CPU: all those of a task in one compiled call.

`loop` has what the executor calls, `steps` what is compiled, `products` the ways to multiply by the weights, `choice`
which of them is the fastest here, and `machine` what numba lacks.
"""
