"""What the engine costs beside hand-written batching of the same networks; see benchmarks/overhead.py."""
