"""Safe copies of PyTorch's .pt2 files.

torch.export.load runs code from such a file: pickles that are not plain tensors, expressions that sympy evaluates, any
function below the module torch as an operator, compiled libraries, guards in Python. So torch gets a copy of the graph
and the weights. Each field of the copy has a form that can only be data.
"""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from onnx2ncnn_opt.errors import ModelError

_PLAIN = ("archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id")
_DATA = re.compile(r"data/(weights|constants)/((weight|tensor)_\d+|\w+_config\.json)")
_MODEL = re.compile(r"models/(\w+)\.json")
_SAMPLES = re.compile(r"data/sample_inputs/(\w+)\.pt")
_IGNORED = re.compile(r"extra/.*|\.format_version|.*/")

_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|torchvision)\.\w+(\.\w+)?|torch\.ops\.higher_order\.(cond|wrap_with_set_grad_enabled)|"
    r"torch\.sym_(float|int|ite|max|min|not|sum)|math\.(ceil|floor|trunc)|"
    r"_operator\.(add|and_|eq|floordiv|ge|getitem|gt|le|lt|mod|mul|ne|neg|or_|pos|sub|truediv)"
)
_FILES = re.compile(r"torch\.ops\.aten\.(from_file|save|load).*")  # operators that open files
_TEXT = re.compile(r"[\w ,.:>+-]*")  # names, versions, modes, equations of einsum
# The form of sympy's srepr, evaluated as Python: Add(Symbol('s77', positive=True, integer=True), Integer(1)).
_SYMBOL = r"Symbol\('[a-z]+\d+'(, (integer|nonnegative|positive)=(True|False))*\)"
_EXPRESSION = re.compile(
    rf"({_SYMBOL}|Integer\(-?\d+\)|Pow\({_SYMBOL}, Integer\(\d\)\)|[(), ]|true|false|"
    r"(Add|And|CeilDiv|CeilToInt|CleanDiv|"
    r"Equality|Unequality|FloatTrueDiv|FloorDiv|FloorToInt|GreaterThan|Identity|IntTrueDiv|LessThan|Max|Min|Mod|"
    r"ModularIndexing|Mul|Not|Or|PythonMod|StrictGreaterThan|StrictLessThan|ToFloat|TruncToInt|Where|floor|"
    r"ceiling)(?=\())*"
)
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
_LONGEST = 1000  # characters of an expression or name


def write_safe_copy(path: Path, to: IO[bytes]) -> None:
    """Copy the graph and weights of a .pt2 file to another file; raise ModelError if a record is not plain data."""
    try:
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as copy:
            _Copy(path, source, copy).write()
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError) as error:
        raise ModelError(f"{path}: not a .pt2 file of torch.export.save, or truncated: {error}") from None


class _Copy:
    def __init__(self, path: Path, source: zipfile.ZipFile, copy: zipfile.ZipFile) -> None:
        self._path, self._source, self._copy = path, source, copy

    def write(self) -> None:
        models = []
        for entry in self._source.infolist():
            top, _, name = entry.filename.partition("/")
            if _IGNORED.fullmatch(name):
                continue
            if entry.compress_type != zipfile.ZIP_STORED or not re.fullmatch(r"[\w.-]+", top):
                self._refuse(f"'{entry.filename}' is compressed, or of a strange name")
            if model := _MODEL.fullmatch(name):
                models.append(model[1])
                data = self._json(entry, self._graph)
            elif _SAMPLES.fullmatch(name):
                data = b""  # pickles, which the export does not need
            elif name in _PLAIN or _DATA.fullmatch(name):
                data = self._json(entry, self._payloads) if name.endswith(".json") else self._source.read(entry)
            else:
                self._refuse(f"it has '{entry.filename}', which is neither a graph nor a weight")
            self._copy.writestr(entry.filename, data)
        if len(models) != 1:
            self._refuse(f"it has {len(models)} graphs, not one")

    def _json(self, entry: zipfile.ZipInfo, check: Callable[[str, Any], Any]) -> bytes:
        try:
            return json.dumps(check("", json.loads(self._source.read(entry)))).encode()
        except (ValueError, RecursionError) as error:
            self._refuse(f"'{entry.filename}' is not JSON: {error}")

    def _payloads(self, _: str, data: Any) -> Any:
        config = data.get("config") if isinstance(data, dict) else None
        if not isinstance(config, dict):
            self._refuse("its list of weights is broken")
        for name, payload in config.items():
            if not isinstance(payload, dict) or payload.get("use_pickle") is not False:
                self._refuse(f"'{name}' is a pickle")
            if not re.fullmatch(r"(weight|tensor)_\d+", str(payload.get("path_name"))):
                self._refuse(f"'{name}' is in the file {payload.get('path_name')!r:.80}")
        return data

    def _graph(self, key: str, value: Any) -> Any:
        """Return a part of the graph without comments and guards; raise ModelError unless it is plain data."""
        if isinstance(value, dict):
            for name in value:
                if name in ("as_operator", "as_custom_obj", "custom_obj") or len(name) > _LONGEST:
                    self._refuse(f"it holds an object ({name:.80})")
                if not _TEXT.fullmatch(name):
                    self._refuse(f"it holds the name {name!r:.80}")
            return {name: {} if name == "metadata" else self._graph(name, part) for name, part in value.items()}
        if isinstance(value, list):
            return [] if key == "guards_code" else [self._graph(key, part) for part in value]
        if isinstance(value, str):
            if key in ("in_spec", "out_spec"):
                self._containers(json.loads(value) if value else None)
            elif key == "target" and (not _OPERATOR.fullmatch(value) or _FILES.fullmatch(value)):
                self._refuse(f"the operator {value!r:.80} is not one of aten's")
            elif key == "expr_str" and (len(value) > _LONGEST or not _EXPRESSION.fullmatch(value)):
                self._refuse(f"the size {value!r:.80} is not an expression of sizes")
            elif key not in ("target", "expr_str") and (len(value) > _LONGEST or not _TEXT.fullmatch(value)):
                self._refuse(f"it holds the text {value!r:.80}")
        return value

    def _containers(self, spec: Any) -> None:
        """Check the nesting of inputs or outputs: torch imports the types named there."""
        if isinstance(spec, dict):
            if spec.get("type") not in _CONTAINERS:
                self._refuse(f"an input or output is a {spec.get('type')!r:.80}; give tensors, tuples, lists or dicts")
            if not re.fullmatch(r'null|\[("\w+"(, )?)*\]', str(spec.get("context") or "null")):
                self._refuse(f"an input or output has the fields {spec.get('context')!r:.80}")
            spec = [*spec.get("children_spec", ())]
        for part in spec if isinstance(spec, list) else ():
            self._containers(part)

    def _refuse(self, reason: str) -> NoReturn:
        hint = "open it with torch.export.load and convert what that gives from Python, or export to .onnx"
        problem = f"{reason}, which could run code when it is opened; where you trust the file"
        raise ModelError(f"{self._path}: {problem}, {hint}")
