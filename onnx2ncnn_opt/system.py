"""What differs between operating systems."""

import os
import shlex
import subprocess
import tempfile

WINDOWS = os.name == "nt"


def split_command(text: str) -> tuple[str, ...]:
    """Return the words of a command; raises ValueError for an open quote. On Windows a backslash separates folders."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    if WINDOWS:
        lexer.escape = ""
    return tuple(lexer)


def command_line(*arguments: str) -> str:
    """Return a command of this program as people type it in the system's shell."""
    words = ["onnx2ncnn-opt", *arguments]
    return subprocess.list2cmdline(words) if WINDOWS else shlex.join(words)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder, to use with `with`.

    Windows removes no file that a process has open, as a virus scanner may: such a file stays behind, without an error.
    """
    return tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-", ignore_cleanup_errors=True)
