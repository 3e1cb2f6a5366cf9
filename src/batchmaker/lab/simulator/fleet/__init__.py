"""A fleet in virtual time: N schedulers, or a compiled model of them, behind a router."""
