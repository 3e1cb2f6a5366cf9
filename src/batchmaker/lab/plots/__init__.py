"""Pictures of measurements, simulations and tuning. matplotlib is loaded when the first one is drawn."""
