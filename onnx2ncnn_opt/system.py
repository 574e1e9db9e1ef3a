"""Differences between operating systems."""

import os
import shlex
import subprocess
import tempfile

WINDOWS = os.name == "nt"


def split_command(text: str) -> tuple[str, ...]:
    """Return the words of a command; ValueError for an open quote. A backslash is an escape, but not on Windows."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    if WINDOWS:
        lexer.escape = ""
    return tuple(lexer)


def command_line(*arguments: str, program: str = "onnx2ncnn-opt") -> str:
    """Return a command, by default of this program, with the quotes of the system's shell."""
    words = [program, *arguments]
    return subprocess.list2cmdline(words) if WINDOWS else shlex.join(words)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a context manager of a new folder.

    Windows cannot remove a file that another process, such as a virus scanner, has open: the file stays, without error.
    """
    return tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-", ignore_cleanup_errors=True)
