"""The served models and the handling of calls, independent of the protocol."""
