"""What benchmarks/examples.py measures: a file for each folder of examples/."""
