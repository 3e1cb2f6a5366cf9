"""A fleet in virtual time: N schedulers, or their compiled calls alone, behind a router."""
