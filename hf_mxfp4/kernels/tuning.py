# SPDX-License-Identifier: Apache-2.0
"""What was measured on a device: which way a product is fastest there, and with which launch options.

A table is a JSON file, `tables/<device>.json` of this package, or the user's own, which `hf-mxfp4 tune` writes to
`cache_folder()` and which comes first. Each row is one measured product; `choose` takes the nearest one of the same
kernel, format and dtype. Where no row is near it answers `None`, and the heuristics of the kernels decide. Nothing is
measured here, and files are read once per device.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

VERSION = 1  # of the file's layout
FOLDER = Path(__file__).parent
TABLES = FOLDER / "tables"
# The kernels that tables are about; a table is stale once one of these files changes.
SOURCES = ("decode", "dequantize", "gemm", "gemm_grad", "permuted", "scratch")
# A row as far away as this, in octaves, still says more than a heuristic. Tiles follow the tokens most of all.
NEAR = {"tokens": 0.6, "n": 2.0, "k": 2.0}
MOST_TOKENS = 4096  # nothing changes beyond
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHORT = {dtype: short for short, dtype in DTYPES.items()}


class Row(NamedTuple):
    """A measured product. Times are medians in microseconds; `None` stands for what was not measured or failed."""

    kernel: str  # "linear", "linear_grad"
    format: str
    dtype: str  # a key of DTYPES
    macro: bool
    tokens: int
    n: int
    k: int
    options: dict[str, int] | None  # of the fastest fused kernel
    us: float | None
    chunk: int | None  # weights decoded at once on the fastest way through cuBLAS
    chunk_us: float | None


class Choice(NamedTuple):
    """How to compute a product: in chunks of so many weights, or with these launch options of the fused kernel."""

    options: dict[str, int] | None
    chunk: int | None


class Table(NamedTuple):
    """A file's rows, and what its head says."""

    path: Path
    head: dict
    rows: list[Row]


# --- files -----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where the user's tables are: `HF_MXFP4_CACHE`, or `hf_mxfp4` in `XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("HF_MXFP4_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_mxfp4"


@functools.cache
def source_hash() -> str:
    """Of the files in `SOURCES`, 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in SOURCES:
        file = FOLDER / f"{name}.py"
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:12]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def file_name(device: str, triton: str, sources: str) -> str:
    """A user's table: another version of triton or of the kernels has a file of its own."""
    return f"{_slug(device)}-triton{triton}-{sources}.json"


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def user_table(device: str) -> Path:
    """The user's table for a device under the installed versions; it need not exist."""
    import triton

    return cache_folder() / file_name(device, triton.__version__, source_hash())


def own_table(device: str) -> list[Path]:
    """`user_table`, or nothing for a user without a home folder (a container's, often)."""
    try:
        return [user_table(device)]
    except RuntimeError:
        return []


def stale_tables(device: str) -> list[Path]:
    """Tables of the user for this device that other versions of triton or of the kernels were measured for."""
    return [
        file
        for current in own_table(device)
        for file in sorted(current.parent.glob(f"{_slug(device)}-triton*.json"))
        if file != current
    ]


def read_table(path: Path) -> Table:
    """Read and check a table.

    Raises:
        ValueError: naming what is wrong, for anything but a sound table of this layout.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"it cannot be read as JSON ({error})") from error
    if not isinstance(data, dict) or data.get("version") != VERSION or not isinstance(data.get("rows"), list):
        raise ValueError(f"it is no table of version {VERSION}")
    head = {key: value for key, value in data.items() if key != "rows"}
    for key in ("device", "sources"):
        if not isinstance(head.get(key), str):
            raise ValueError(f"its {key} is {head.get(key)!r}, expected a string")
    return Table(path, head, [_row(i, row) for i, row in enumerate(data["rows"])])


def _row(index: int, data) -> Row:
    def check(name: str, sound: bool) -> None:
        if not sound:
            raise ValueError(f"row {index}: {name} is {data.get(name)!r}")

    if not isinstance(data, dict) or set(data) != set(Row._fields):
        raise ValueError(f"row {index}: expected the fields {', '.join(Row._fields)}")
    for name in ("kernel", "format"):
        check(name, isinstance(data[name], str))
    check("dtype", data["dtype"] in DTYPES)
    check("macro", isinstance(data["macro"], bool))
    for name in ("tokens", "n", "k"):
        check(name, type(data[name]) is int and data[name] > 0)
    check("chunk", data["chunk"] is None or (type(data["chunk"]) is int and data["chunk"] > 0))
    for name in ("us", "chunk_us"):
        check(name, data[name] is None or (isinstance(data[name], int | float) and 0 < data[name] < math.inf))
    options = data["options"]
    check("options", options is None or (isinstance(options, dict) and all(type(v) is int for v in options.values())))
    check("us", (options is None) == (data["us"] is None))
    check("chunk_us", (data["chunk"] is None) == (data["chunk_us"] is None))
    return Row(**data)


def head_of(device: torch.device) -> dict:
    """What a new table says of a CUDA device and of the versions that it is measured with."""
    import triton

    from hf_mxfp4 import __version__

    major, minor = torch.cuda.get_device_capability(device)
    return {
        "version": VERSION,
        "device": device_name(device),
        "capability": f"{major}.{minor}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "hf_mxfp4": __version__,
        "sources": source_hash(),
        "date": datetime.date.today().isoformat(),
    }


def load_table(device: str) -> Table | None:
    """The table in use for a device: the user's, else the package's, else `None`.

    A file that is damaged or belongs to another device is named in a warning, and not used.
    """
    for path in (*own_table(device), TABLES / f"{_slug(device)}.json"):
        if not os.path.isfile(path):  # False in a folder that may not be read, where `Path.is_file` raises
            continue
        try:
            table = read_table(path)
            if table.head["device"] != device:
                raise ValueError(f"it was measured on {table.head['device']}, not on {device}")
            if table.head["sources"] != source_hash():
                raise ValueError("it was measured with other kernels than those of this version")
            return table
        except ValueError as error:
            warnings.warn(
                f"hf_mxfp4: the tuning table {path} is not used: {error}. `hf-mxfp4 tune` writes a new one; until "
                "then heuristics choose.",
                stacklevel=2,
            )
    return None


# --- look-up ---------------------------------------------------------------------------------------------------------


@functools.cache
def _rows_of(device: torch.device) -> dict[tuple, list[Row]]:
    """Rows of the table in use, by kernel, format, dtype and macro factors."""
    table = load_table(device_name(device)) if device.type == "cuda" else None
    rows: dict[tuple, list[Row]] = {}
    for row in table.rows if table else ():
        rows.setdefault((row.kernel, row.format, row.dtype, row.macro), []).append(row)
    return rows


def nearest(rows: list[Row], tokens: int, n: int, k: int) -> Row | None:
    """The row nearest to a product by the sum of distances in octaves; `None` if none is as near as `NEAR`."""
    wanted = {"tokens": min(tokens, MOST_TOKENS), "n": n, "k": k}

    def distances(row: Row) -> dict[str, float]:
        found = {"tokens": min(row.tokens, MOST_TOKENS), "n": row.n, "k": row.k}
        return {name: abs(math.log2(found[name] / wanted[name])) for name in wanted}

    near = [(sum(d.values()), i) for i, d in enumerate(map(distances, rows)) if all(d[x] <= NEAR[x] for x in d)]
    return rows[min(near)[1]] if near else None


def choice_of(row: Row) -> Choice:
    """Whatever was faster."""
    in_chunks = row.chunk is not None and (row.us is None or row.chunk_us < row.us)
    return Choice(row.options, row.chunk if in_chunks else None)


@functools.lru_cache(maxsize=1 << 16)
def choose(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    format_name: str,
    tokens: int,
    n: int,
    k: int,
    macro: bool = False,
) -> Choice | None:
    """How a product `[tokens, K] x [N, K]` is fastest on a device; `None` where no measurement is near."""
    rows = _rows_of(device)
    if not rows or not tokens or dtype not in SHORT:
        return None
    row = nearest(rows.get((kernel, format_name, SHORT[dtype], macro), []), tokens, n, k)
    return None if row is None else choice_of(row)


def forget() -> None:
    """Read tables again when they are asked for next."""
    for cache in (_rows_of, choose, source_hash):
        cache.cache_clear()
