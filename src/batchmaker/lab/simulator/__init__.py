"""The virtual driver: the scheduler and its policies under a virtual clock, with a cost model in place of a device."""
