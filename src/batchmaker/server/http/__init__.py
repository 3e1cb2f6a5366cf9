"""HTTP: the listener, connections, common handling of calls, and the routes."""
