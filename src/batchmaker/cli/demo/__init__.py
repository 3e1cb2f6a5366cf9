"""`batchmaker demo`: cellular and padded batching, side by side, on one machine in half a minute."""
