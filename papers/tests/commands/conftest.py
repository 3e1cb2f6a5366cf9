"""Fixtures of the command line, for the tests of the commands that this distribution adds."""

from command_line import command, program, read_json, text_file, tree_file

__all__ = ["command", "program", "read_json", "text_file", "tree_file"]
