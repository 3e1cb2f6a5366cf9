"""Saved models: a directory with the graph of each cell, or with weights by name. Nothing in it is ever unpickled."""

from batchmaker.saved.directory import load, saved_files, write, write_folder

__all__ = ["load", "saved_files", "write", "write_folder"]
