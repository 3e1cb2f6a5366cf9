"""`batchmaker simulate`: policies under a virtual clock."""
