"""Who may call, and how much of the server one client may hold: keys, origins, connections, bytes."""
