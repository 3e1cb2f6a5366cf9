"""The scheduler: it decides which nodes run together, on which worker, and where their values are. No I/O, no torch."""
