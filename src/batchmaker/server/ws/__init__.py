"""WebSockets: connections, messages, and the conversations on them."""
