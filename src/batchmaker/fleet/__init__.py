"""Many replicas of an engine: which of them a request goes to, and how many there should be. Without I/O."""
