# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint folder is whole and sane: checksums, headers, every packed matrix decoded, every number finite,
and where the source is at hand, every weight compared with it. What is wrong is listed, not raised.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_mxfp4 import layouts
from hf_mxfp4.checkpoint_files import (
    Checkpoint,
    StoredTensor,
    TensorReader,
    read_checkpoint,
    read_headers,
    weight_files,
)
from hf_mxfp4.checkpoints import FULL_PRECISION, check_scales
from hf_mxfp4.inspection import FULL_PRECISION as FULL
from hf_mxfp4.layouts import Contents, PackedMatrix, PackedTensors
from hf_mxfp4.output_files import CHECKSUMS, sha256
from hf_mxfp4.packed import dense_copy
from hf_mxfp4.verification.source import dense_shape, originals

# Squared error of a matrix over its squares. Trained weights come to 0.003 to 0.03 in either format under any rule;
# a scale wrong by a factor of 2 gives 0.25 or 1, exchanged rows or codes give about 2.
LARGEST_ERROR = 0.1
_PIECE = 1 << 22  # weights decoded at once: 16 MB in float32
_UNMAP_EVERY = 1 << 29  # bytes read: pages of mapped files count as memory of this process
_MAY_CHANGE = ("README.md", "evaluation.json", "error.json", "error.png")  # reports, written after the checksums
_RECOMPUTED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints hold and models compute

Progress = Callable[[int, int, str], None]  # bytes read, bytes to read, the file or tensor last read


@dataclass
class Verification:
    """What was found.

    Attributes:
        findings: what is wrong, in sentences.
        notes: what is not wrong, but should be known.
        layout: of the checkpoint; `None` if it could not be told.
        checksums: number of files compared with `checksums.sha256`; `None` without that file.
        packed, plain: number of packed matrices decoded, and of other tensors read.
        errors: with a source: relative squared error of each packed matrix.
        worst: the name of the matrix with the largest.
    """

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layout: str | None = None
    checksums: int | None = None
    packed: int = 0
    plain: int = 0
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def worst(self) -> str | None:
        return max(self.errors, key=lambda name: self.errors[name], default=None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self), "worst": self.worst}


def verify_checkpoint(
    folder: str | Path, source: str | Path | None = None, progress: Progress | None = None
) -> Verification:
    """Check a checkpoint folder, packed in any layout or in full precision.

    Args:
        folder (`str` or `Path`): the checkpoint. Its files are compared with `checksums.sha256` if that is there.
        source (`str` or `Path`, *optional*): the full-precision checkpoint it was made from.
        progress: called with bytes read, bytes to read, and the file or tensor last read.

    Returns:
        `Verification`; damage is listed in `findings`.

    Raises:
        ValueError: for folders that do not exist, and a source that is damaged or not in full precision.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder.")
    original = None if source is None else _source(Path(source))
    result = Verification()
    listed = _listed(folder, result)
    checkpoint = _headers(folder, result)
    tensors = {} if checkpoint is None else checkpoint.tensors
    total = sum((folder / name).stat().st_size for name in listed) + sum(t.nbytes for t in tensors.values())
    counter = _Counter(total, progress)
    _compare_checksums(folder, listed, result, counter)
    if checkpoint is None:
        return result
    contents = _contents(checkpoint, result)
    with TensorReader(folder, tensors) as read:
        counter.readers.append(read)
        try:
            if original is None:
                _check_tensors(checkpoint, contents, read, result, counter, None)
            else:
                with TensorReader(original.folder, original.tensors) as read_source:
                    counter.readers.append(read_source)
                    _check_names(contents, checkpoint, read_source, result)
                    _check_tensors(checkpoint, contents, read, result, counter, read_source)
        except (ValueError, OSError) as error:
            result.findings.append(f"a file could not be read: {error}")
    return result


class _Counter:
    """Bytes read so far, told to the user; files are unmapped from time to time."""

    def __init__(self, total: int, progress: Progress | None):
        self.done, self.total, self.progress = 0, total, progress
        self.mapped = 0
        self.readers: list[TensorReader] = []

    def add(self, nbytes: int, name: str) -> None:
        self.done += nbytes
        self.mapped += nbytes
        if self.mapped > _UNMAP_EVERY:
            for reader in self.readers:
                reader.close()
            self.mapped = 0
        if self.progress is not None:
            self.progress(self.done, self.total, name)


# --- files -----------------------------------------------------------------------------------------------------------


def _source(source: Path) -> Checkpoint:
    original = read_checkpoint(source)
    if original.quantization is not None:
        raise ValueError(f"{source} is quantized itself; the source is the full-precision checkpoint.")
    return original


def _listed(folder: Path, result: Verification) -> dict[str, str]:
    """Files named in checksums.sha256 that are there, and their checksums."""
    path = folder / CHECKSUMS
    if not path.is_file():
        result.notes.append(f"there is no {CHECKSUMS}; files were not compared with it.")
        return {}
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_bytes().decode("utf-8", "surrogateescape").splitlines(), 1):
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)
        if match is None:
            result.findings.append(f"{CHECKSUMS}, line {number}: not a SHA-256 checksum and a file name.")
            continue
        digest, name = match.groups()
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts or "\\" in name:
            result.findings.append(f"{CHECKSUMS}, line {number}: {name!r} lies outside of the folder.")
        elif not _is_file(folder / name):
            result.findings.append(f"{name} is missing, and {CHECKSUMS} names it.")
        else:
            found[name] = digest.lower()
    unnamed = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in found)
    result.findings += [f"{name} is not named in {CHECKSUMS}." for name in unnamed if not name.startswith(".")]
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _compare_checksums(folder: Path, listed: dict[str, str], result: Verification, counter: _Counter) -> None:
    if not (folder / CHECKSUMS).is_file():
        return
    for name, expected in listed.items():
        path = folder / name
        try:
            found = sha256(path)
        except OSError as error:
            result.findings.append(f"{name} could not be read: {error}.")
            continue
        if found != expected:
            if name in _MAY_CHANGE:
                result.notes.append(f"{name} was written after {CHECKSUMS}.")
            else:
                result.findings.append(f"{name} is not the file that {CHECKSUMS} was made of.")
        counter.add(path.stat().st_size, name)
    result.checksums = len(listed)


def _headers(folder: Path, result: Verification) -> Checkpoint | None:
    """The checkpoint's headers, every damaged file named; `None` if there is damage."""
    before = len(result.findings)
    try:
        for name in weight_files(folder):
            try:
                read_headers([folder / name])
            except ValueError as error:
                result.findings.append(str(error))
        if len(result.findings) == before:
            return read_checkpoint(folder)
    except (ValueError, OSError) as error:
        result.findings.append(str(error))
    return None


def _contents(checkpoint: Checkpoint, result: Verification) -> Contents:
    """What the checkpoint holds; nothing packed if that cannot be told."""
    if not checkpoint.tensors:
        result.findings.append("the checkpoint holds no tensors.")
    nothing = Contents(FULL, "", {}, {})
    if checkpoint.quantization is None:
        result.layout = nothing.layout
        return nothing
    try:
        contents = layouts.read(checkpoint)
    except ValueError as error:
        result.findings.append(str(error))
        return nothing
    result.layout = contents.layout
    result.notes += contents.notes
    return contents


# --- tensors ---------------------------------------------------------------------------------------------------------


def _check_names(contents: Contents, checkpoint: Checkpoint, read_source: TensorReader, result: Verification) -> None:
    """Both hold weights of the same names and shapes."""
    own = {name: dense_shape(matrix) for name, matrix in contents.matrices.items()}
    own |= {name: tensor.shape for name, tensor in contents.plain(checkpoint.tensors).items()}
    found = {name: originals(name, matrix, read_source) for name, matrix in contents.matrices.items()}
    covered: Counter[str] = Counter()  # weights, of stacks that are stored expert by expert
    for name, places in found.items():
        for key in {key for original in places for key in original.keys}:
            covered[key] += math.prod(contents.matrices[name].shape)
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    for name, tensor in read_source.tensors.items():
        if name not in own:
            if name.endswith(_RECOMPUTED) or (tied and name == "lm_head.weight"):
                result.notes.append(f"{name} of the source is not stored: the model has it from elsewhere.")
            elif covered[name] < max(1, math.prod(tensor.shape)):
                result.findings.append(f"{name} of the source is missing.")
        elif own[name] != tensor.shape:
            result.findings.append(f"{name}: shape {list(own[name])}, and {list(tensor.shape)} in the source.")
    more = [name for name in own if name not in read_source.tensors and not found.get(name)]
    result.findings += [f"{name} is not in the source." for name in more]


def _check_tensors(
    checkpoint: Checkpoint,
    contents: Contents,
    read: TensorReader,
    result: Verification,
    counter: _Counter,
    read_source: TensorReader | None,
) -> None:
    counted: set[str] = set()  # matrices may share a tensor
    for name, matrix in contents.matrices.items():
        try:
            _check_matrix(name, matrix, read, result, read_source)
        except ValueError as error:
            message = str(error)
            result.findings.append(message if name.removesuffix(".weight") in message else f"{name}: {message}")
        counter.add(sum(checkpoint.tensors[key].nbytes for key in set(matrix.keys) - counted), name)
        counted.update(matrix.keys)
    for name, stored in contents.plain(checkpoint.tensors).items():
        if stored.dtype in FULL_PRECISION:
            tensor = read(name)
            bad = sum(int((~torch.isfinite(piece)).sum()) for piece in tensor.reshape(-1).split(_PIECE))
            if bad:
                result.findings.append(f"{name}: {bad} of {tensor.numel()} values are NaN or Inf.")
            if read_source is not None:
                _compare_plain(name, stored, tensor, read_source, result)
            result.plain += 1
        counter.add(stored.nbytes, name)


def _check_matrix(name: str, matrix: PackedMatrix, read, result: Verification, read_source) -> None:
    """Decode a matrix piece by piece; with a source, compare."""
    tensors = matrix.decode(read)
    check_scales(name, matrix.format, tensors.scale, tensors.global_scale)
    found = [] if read_source is None else originals(name, matrix, read_source)
    bad, errors, energies = 0, [0.0] * len(found), [0.0] * len(found)
    for expert, rows, piece in _pieces(matrix, tensors):
        bad += int((~torch.isfinite(piece)).sum())
        for index, original in enumerate(found):
            wanted = original.rows(expert, rows).double()
            errors[index] += float((piece.double() - wanted).square().sum())
            energies[index] += float(wanted.square().sum())
    if bad:
        result.findings.append(f"{name}: {bad} of {math.prod(matrix.shape)} weights decode to NaN or Inf.")
    if found:
        _judge(name, min(map(_relative, errors, energies)), result)
    result.packed += 1


def _judge(name: str, relative: float, result: Verification) -> None:
    """Note the relative squared error of a weight against the source; one too large is a finding."""
    result.errors[name] = relative
    if not relative <= LARGEST_ERROR:
        result.findings.append(
            f"{name}: relative squared error {relative:.3g} against the source, above {LARGEST_ERROR}, which no "
            "sound quantization of trained weights reaches: another model's weights, or damaged."
        )


def _relative(error: float, energy: float) -> float:
    return error / energy if energy else (0.0 if error == 0 else math.inf)


def _pieces(matrix: PackedMatrix, tensors: PackedTensors) -> Iterator[tuple[int | None, slice, torch.Tensor]]:
    """A matrix decoded in float32, some rows at a time: the expert (`None` for one matrix), the rows, `[rows, K]`."""
    *lead, n, k = matrix.shape
    for expert in range(lead[0]) if lead else (None,):
        divisors = tensors.global_scale
        if divisors is not None and expert is not None:
            divisors = divisors[expert]
        parts = 1 if divisors is None else divisors.numel()
        part_rows = n // parts
        step = max(1, _PIECE // max(1, k))
        for part in range(parts):
            for start in range(part * part_rows, (part + 1) * part_rows, step):
                rows = slice(start, min(start + step, (part + 1) * part_rows))
                yield expert, rows, _decoded(matrix, tensors, expert, rows, divisors, part, n)


def _decoded(matrix, tensors: PackedTensors, expert, rows: slice, divisors, part: int, n: int) -> torch.Tensor:
    place = rows if expert is None else (expert, rows)
    first = (expert or 0) * n + rows.start
    fields: dict[str, Any] = {"packed": tensors.packed[place], "scale": tensors.scale[place]}
    fields["global_scale"] = None if divisors is None else divisors[part : part + 1]
    fields["macro_scale"] = None if tensors.macro_scale is None else tensors.macro_scale[place]
    offsets = tensors.outlier_offsets
    if offsets is not None:
        fields["outlier_offsets"] = offsets[first : first + rows.stop - rows.start + 1]
    return dense_copy(matrix.format, torch.float32, **tensors._replace(**fields)._asdict(), backend="torch")


def _compare_plain(name: str, stored: StoredTensor, tensor: torch.Tensor, read_source, result: Verification) -> None:
    """Equal up to the dtype: what the source's value becomes in this one. In a model that is in full precision itself,
    matrices may have been quantized and decoded since (an export)."""
    if name not in read_source.tensors or read_source.tensors[name].shape != stored.shape:
        return  # told with the names
    original = read_source(name).to(tensor.dtype)
    pairs = zip(tensor.reshape(-1).split(_PIECE), original.reshape(-1).split(_PIECE), strict=True)
    other = sum(int(((one != two) & ~(one.isnan() & two.isnan())).sum()) for one, two in pairs)
    if other and tensor.ndim > 1 and result.layout == FULL:
        pairs = zip(tensor.reshape(-1).split(_PIECE), original.reshape(-1).split(_PIECE), strict=True)
        sums = [(float((one.double() - two).square().sum()), float(two.double().square().sum())) for one, two in pairs]
        _judge(name, _relative(*map(sum, zip(*sums, strict=True))), result)
    elif other:
        result.findings.append(f"{name}: {other} of {tensor.numel()} values are not the source's.")
