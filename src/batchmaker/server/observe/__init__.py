"""What operators see: logs, metrics, spans, counts, traces and the live page."""
