"""Saved models: a directory with a manifest, each cell's graph and its weights. Nothing in it is ever unpickled."""

from batchmaker.saved.directory import load, write

__all__ = ["load", "write"]
