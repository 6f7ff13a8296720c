# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint on the Hub holds, without its weights: configs, index, and the headers of its files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import SafetensorsParsingError

from hf_mxfp4.checkpoint_files import INDEX, SINGLE, Checkpoint, StoredTensor, quantization_of, read_json, weight_map
from hf_mxfp4.hub.transport import Result, persistently

_SMALL = ("config.json", "hf_quant_config.json", INDEX)
_THREADS = 8


def read_remote(repo_id: str, revision: str | None = None, token: str | None = None) -> Checkpoint:
    """A checkpoint on the Hub as `checkpoint_files.read_checkpoint` gives one on disk; `folder` is `None`.

    Of safetensors files, only headers are downloaded (huggingface_hub asks for the first 100 kB, and for more where a
    header is longer). A file that lacks fewer bytes than its header has is not noticed; loading it is refused.

    Args:
        repo_id: such as `"user/name"`.
        revision: branch, tag or commit; the branch `main` if not given.
        token: for huggingface_hub; its own (HF_TOKEN, `hf auth login`) if not given.

    Raises:
        ValueError: for what is not there or is damaged: repository, revision, safetensors files, index, headers.
        PermissionError, ConnectionError: see `transport.persistently`.
    """
    api = HfApi(token=token)

    def ask(function: Callable[[], Result]) -> Result:
        return persistently(function, repo_id, token=token)

    info = ask(lambda: api.model_info(repo_id, revision=revision, files_metadata=True))
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or []}
    small = {
        name: Path(ask(lambda name=name: api.hf_hub_download(repo_id, name, revision=info.sha)))
        for name in _SMALL
        if name in sizes
    }
    config = read_json(small["config.json"]) if "config.json" in small else {}
    quantization = quantization_of(config, next(iter(small.values())).parent) if small else None
    named = weight_map(small[INDEX]) if INDEX in small else None
    names = _weight_files(repo_id, sizes, named)

    def header(name: str):
        return ask(lambda: api.parse_safetensors_file_metadata(repo_id, name, revision=info.sha, timeout=60))

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            headers = dict(zip(names, pool.map(header, names), strict=True))
    except SafetensorsParsingError as error:
        raise ValueError(f"{repo_id} holds a damaged safetensors file: {error}") from error
    tensors: dict[str, StoredTensor] = {}
    for file, found in headers.items():
        for name, tensor in found.tensors.items():
            first, last = tensor.data_offsets
            if name in tensors:
                raise ValueError(f"{repo_id}: {name} stands in {tensors[name].file} and in {file}.")
            if sizes[file] is not None and last + 8 > sizes[file]:
                raise ValueError(f"{repo_id}: {file} is truncated: {sizes[file]} bytes, and its header promises more.")
            tensors[name] = StoredTensor(str(tensor.dtype), tuple(tensor.shape), file, last - first)
    if named is not None and {name: tensor.file for name, tensor in tensors.items()} != named:
        raise ValueError(f"{repo_id}: {INDEX} names other tensors than its files hold.")
    metadata = {file: dict(found.metadata) for file, found in headers.items()}
    return Checkpoint(config, quantization, tensors, metadata)


def _weight_files(repo_id: str, sizes: dict[str, int | None], named: dict[str, str] | None) -> list[str]:
    if named is not None:
        names = sorted(set(named.values()))
        for name in names:
            if name not in sizes or "/" in name or not name.endswith(".safetensors"):
                raise ValueError(f"{repo_id}: {INDEX} names {name!r}, which is not a safetensors file beside it.")
        return names
    if SINGLE in sizes:
        return [SINGLE]
    names = sorted(name for name in sizes if "/" not in name and name.endswith(".safetensors"))
    if not names:
        raise ValueError(f"{repo_id} holds no safetensors file. Pickle files can run code and are never read.")
    return names
