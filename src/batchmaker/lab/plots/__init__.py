"""Pictures of what was seen, simulated or tuned. matplotlib is loaded when the first one is drawn."""
