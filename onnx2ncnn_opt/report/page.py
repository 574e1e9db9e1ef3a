"""Records as one self-contained HTML file: no network, no framework, and no script except its own."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from onnx2ncnn_opt.report.record import NetRecord
from onnx2ncnn_opt.report.words import data_file, json_value

FORMAT = 1


def page(records: Sequence[NetRecord], *, title: str, tool: str) -> str:
    """Return the page for one or more nets; `tool` is the program that wrote it, with its version.

    The names in models are untrusted text. They reach the page as JSON in an element that no browser runs. Characters
    that could end the element are escaped, and the script shows names as text. A content security policy allows only
    this one script and style sheet.
    """
    style, script = (data_file(f"page.{kind}") for kind in ("css", "js"))
    data = json.dumps(
        {"format_version": FORMAT, "tool": tool, "nets": [json_value(asdict(record), str) for record in records]},
        allow_nan=False,
        separators=(",", ":"),
    )
    parts = {
        "policy": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        "title": escape(title),
        "style": style,
        "script": script,
        "data": data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
    }
    pieces = enumerate(data_file("page.html").split("@@"))  # in one pass, because inserted text may contain @@
    return "".join(parts[piece] if number % 2 else piece for number, piece in pieces)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
