"""A GPU that schedules itself: requests go in as arrays, the numbers of finished ones come out."""
