import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from onnx2ncnn_opt.cli.headings import HEADINGS, Grouped
from onnx2ncnn_opt.cli.main import cli
from onnx2ncnn_opt.onnx.ops import all_ops
from onnx2ncnn_opt.passes import PASSES
from testing.command import COMMAND, names, net_files, refused, run, run_well
from testing.models import write_model


def loaded(folder: Path, *args: str) -> tuple[str, set[str]]:
    """Return the output of a command that ends well, and the heavy modules that it loads."""
    code = (
        "import sys; from onnx2ncnn_opt.cli.main import main; code = main(sys.argv[1:]);"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'ncnn', 'rich', 'torch', 'sympy.core'};"
        "print(*heavy & set(sys.modules), sep='\\n', file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("command", [(), ("convert",), ("verify",), ("passes",), ("ops",)])
def test_help_needs_nothing_heavy(tmp_path: Path, command: tuple[str, ...]) -> None:
    out, modules = loaded(tmp_path, *command, "--help")
    assert out.startswith(f"Usage: {' '.join(('onnx2ncnn-opt', *command))} ")
    assert modules == set()


def test_without_verification_runtimes_stay_unloaded_and_optimize_needs_no_onnx(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 2, h, w] x) => (float[1, n] y) { y = Flatten(x) }")
    out, modules = loaded(tmp_path, "convert", "model.onnx", "--no-verify")
    assert "not verified" in out
    assert "output:" not in out
    assert names(tmp_path) == {"model.onnx"} | net_files("model")
    assert modules == {"numpy", "onnx", "onnx_ir"}
    _, modules = loaded(tmp_path, "optimize", "model.ncnn.param", "-o", "out", "--no-verify")
    assert modules == {"numpy"}


WITHOUT_RUNTIMES = """
import sys
from onnx2ncnn_opt.cli.main import main
sys.modules["ncnn"] = sys.modules["onnxruntime"] = None  # as if they were not installed
for words in sys.argv[1:]:
    assert main(words.split()) == 0, words
"""


def test_commands_that_need_no_runtime(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 2, h, w] x) => (float[1, n] y) { y = Flatten(x) }")
    commands = (
        "inspect model.onnx",
        "convert model.onnx --no-verify",
        "optimize model.ncnn.param -o out --no-verify",
        "inspect out.param",
        "diff out.param out.param",
        "example model",
    )
    command = [sys.executable, "-c", WITHOUT_RUNTIMES, *commands]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_only_other_packages_import_is_loaded_once_it_is_needed(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 2, h, w] x) => (float[1, n] y) { y = Flatten(x) }")
    code = (
        "import sys; from onnx2ncnn_opt.cli.main import main; main(['convert', 'model.onnx', '--no-verify']);"
        "before = {'sympy.core', 'tarfile', 'argparse'} & {*sys.modules}; import onnx_ir, onnx;"
        "print(before, onnx_ir.SymbolicDim('n') + 1, 'sympy.core' in sys.modules, onnx.utils.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "set() n + 1 True onnx.utils"


def test_version_and_no_command(tmp_path: Path) -> None:
    ended = run_well(tmp_path, "--version")
    assert re.fullmatch(r"onnx2ncnn-opt, version \d+\.\d+\.\d+\n", ended.out)
    assert run(tmp_path, "nonsense").code == run(tmp_path).code == 2
    assert "..." not in run(tmp_path, "--help").out.split("Commands:")[1]  # helps of commands are not cut off


@pytest.mark.parametrize("name", ["convert", "optimize", "quantize", "verify"])
def test_help_has_every_option_once_under_a_heading(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, Grouped)
    context = click.Context(command)
    shown = [record for records in command.under_headings(context).values() for record in records]
    options = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    known = [record for option in options if (record := option.get_help_record(context))]
    assert sorted(shown) == sorted(known)
    if name == "convert":
        assert list(command.under_headings(context)) == [*HEADINGS]
        assert len(command.under_headings(context)["Most used"]) == 10


def test_the_installed_command_is_the_same() -> None:
    command = Path(sys.executable).with_name("onnx2ncnn-opt")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("Usage: onnx2ncnn-opt ")


def test_passes_are_listed_in_order_and_ops(tmp_path: Path) -> None:
    for command, expected in (
        ("passes", [[p.name, "bit-equal", "yes" if p.exact else "no", p.summary] for p in PASSES]),
        ("ops", [[op.qualified_name, "opset", str(op.since), op.summary] for op in all_ops()]),
    ):
        ended = run_well(tmp_path, command, PYTHONIOENCODING="utf-8")
        assert [line.split(maxsplit=3) for line in ended.out.splitlines()] == expected


def test_quiet_commands_print_nothing(small: Path) -> None:
    run_well(small, "convert", "model.onnx", "--no-verify")
    commands = (("passes",), ("ops",), ("inspect", "model.onnx"), ("example", "model"))
    assert [run_well(small, *words, "--quiet").out for words in commands] == [""] * 4


def test_a_reader_that_closes_the_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as out:
        done = subprocess.run([*COMMAND, "ops"], stdout=out, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(("redirection", "code", "message"), [("> /dev/full", 1, "Error: "), (">&-", 0, "")])
def test_an_output_that_cannot_be_written(redirection: str, code: int, message: str) -> None:
    shell = f"{shlex.join(COMMAND)} passes {redirection}"
    done = subprocess.run(["bash", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == code


def on_terminal(folder: Path, *args: str) -> tuple[int, str]:
    """Exit code and output of a command whose stdout and stderr are a terminal of 100 columns."""
    mine, its = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *args],
        cwd=folder,
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "COLUMNS": "100", "TERM": "xterm"},
    )
    os.close(its)
    output = b""
    try:
        while chunk := os.read(mine, 1 << 16):
            output += chunk
    except OSError:  # Linux' way to say that the other end is closed
        pass
    os.close(mine)
    return process.wait(timeout=60), output.decode()


def test_a_terminal_gets_tables_and_a_spinner(small: Path) -> None:
    code, output = on_terminal(small, "convert", "model.onnx", "-v")
    assert code == 0
    assert re.search(r"converting model\.onnx: \w+ ", output)  # which steps are seen depends on how long they take
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert text != output
    lines = [line.split() for line in text.splitlines()]
    assert ["pass", "rewrites"] in lines
    assert ["fuse_activation", "1"] in lines
    assert ["output", "result", "rule", "max", "error", "relative", "error", "allowed", "at"] in lines
    assert sum(line[:2] in (["y", "ok"], ["z", "ok"]) for line in lines) == 2


def test_errors_on_a_terminal(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { [det] y = Det(x) }")
    code, output = on_terminal(tmp_path, "convert", "model.onnx")
    assert code == 1
    assert "Error: cannot express 1 node in ncnn:" in output
    assert "Det 'det'" in output


def test_a_shell_completes(tmp_path: Path) -> None:
    asked = {"_ONNX2NCNN_OPT_COMPLETE": "bash_complete", "COMP_WORDS": "onnx2ncnn-opt conv", "COMP_CWORD": "1"}
    assert run(tmp_path, **asked).out == "plain,convert\n"


def test_odd_arguments(small: Path) -> None:
    for args, message in (
        (("--fp16", "--bf16"), "give one of them"),
        (("--ncnn", "20990101"), "20990101 is not known here"),
        (("-o", "-"), "a net is several files"),
    ):
        assert message in refused(small, "convert", "model.onnx", "--no-verify", *args)
    with (small / "model.onnx").open("rb") as model:  # which another process would not see under that name
        command = [*COMMAND, "convert", "/dev/stdin", "-o", "net"]
        done = subprocess.run(command, cwd=small, stdin=model, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "/dev/stdin is not a plain file" in done.stderr
    assert names(small) == {"model.onnx"}
    assert run(small, "convert", "model.onnx", "--no-verify", "-o", "x.ncnn").code == 0
    assert names(small) == {"model.onnx"} | net_files("x")
