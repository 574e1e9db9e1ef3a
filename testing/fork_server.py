"""Forks of one process run command lines: it has imported their modules, because imports take most of a command's time.

A line of JSON on stdin asks for a command, a line on stdout tells its exit code, negative for a signal.
"""

import gc
import importlib
import json
import os
import signal
import sys

_SECONDS = 120


def _become(folder: str, args: list[str], paths: str, out: str, err: str) -> None:
    """Give a fork the state of a new process."""
    signal.alarm(_SECONDS)
    os.chdir(folder)
    sys.path[:1] = [folder, *filter(None, paths.split(os.pathsep))]
    sys.argv = ["onnx2ncnn-opt", *args]
    for stream, path in enumerate((os.devnull, out, err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)


def main() -> None:
    """Serve until stdin ends."""
    from onnx2ncnn_opt.__main__ import prepare

    prepare()
    import click

    from onnx2ncnn_opt.cli.main import cli
    from onnx2ncnn_opt.cli.main import main as command

    package = importlib.import_module("onnx2ncnn_opt")
    for name in package.__all__:
        getattr(package, name)
    importlib.import_module("onnx2ncnn_opt.report.console")
    importlib.import_module("onnx2ncnn_opt.onnx.ops").all_ops()
    for name in cli.list_commands(click.Context(cli)):
        cli.get_command(click.Context(cli), name)
    gc.freeze()
    while line := sys.stdin.readline():
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(**request)
            code = command()
            sys.stdout.flush()
            os._exit(code)  # to take down all that was imported would be most of the time
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
