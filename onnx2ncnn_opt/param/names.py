"""Names that ncnn can read back: no white space, at most 255 bytes of UTF-8, and unique among the blobs."""

import re
from collections.abc import Iterable
from functools import lru_cache

from onnx2ncnn_opt.ir.names import NamePool, shortened

MAX_NAME_BYTES = 255

# White space (C's, not Unicode's) ends a name for ncnn's parser, NUL ends its strings; a surrogate has no UTF-8 form.
_UNSAFE = re.compile(r"[\0\t\n\v\f\r \ud800-\udfff]")


@lru_cache(2**16)  # writers clean each name several times
def clean_name(name: str, instead: str = "unnamed") -> str:
    """Return the name with ``_`` for characters that ncnn cannot read, at most 255 bytes; `instead` if it is empty."""
    return shortened(_UNSAFE.sub("_", name), MAX_NAME_BYTES) or instead


def safe_names(wanted: Iterable[str], pool: NamePool) -> list[str]:
    """Take a name that ncnn can read for each wanted one; wanted names that are safe and free stay as they are."""
    wanted = list(wanted)
    kept = {
        name: i for i, name in reversed(list(enumerate(wanted))) if name not in pool and clean_name(name, "") == name
    }
    kept.pop("", None)
    pool.update(kept)
    return [name if kept.get(name) == i else pool.take(clean_name(name, "blob")) for i, name in enumerate(wanted)]
