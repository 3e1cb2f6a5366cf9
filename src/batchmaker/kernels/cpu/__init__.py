"""Recurrent steps on the CPU: all steps of a task in one compiled call.

`loop` is the interface for the executor, `steps` the compiled code, `products` the ways to multiply by the weights,
`choice` the choice of the fastest, and `machine` the operations that numba lacks.
"""
