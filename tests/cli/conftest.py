"""Fixtures of the command line, for the tests of this folder."""

from command_line import command, program, read_json, short_reference, text_file, tree_file

__all__ = ["command", "program", "read_json", "short_reference", "text_file", "tree_file"]
