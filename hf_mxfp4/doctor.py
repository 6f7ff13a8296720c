# SPDX-License-Identifier: Apache-2.0
"""What `hf-mxfp4 doctor` reports: versions, and which implementation runs on each device of this machine, and why."""

from __future__ import annotations

import importlib.metadata
import platform
import warnings
from pathlib import Path

import torch

from hf_mxfp4 import dispatch

PACKAGES = ("hf-mxfp4", "torch", "triton", "transformers", "accelerate", "safetensors")


def report() -> dict:
    """Plain values, for JSON. `cpu["path"]` and `devices[i]["kernels"]` say what runs, `why_not` why nothing faster.

    Returns:
        `dict` with `python`, `platform`, `packages` (version or `None`), `cpu`, `devices` (those of CUDA or ROCm), and
        `no_devices`, why there are none, or `None`.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "no_devices": _why_no_devices(),
    }


def lines(found: dict) -> list[tuple[str, str]]:
    """A report as (name, text) in the order in which they are read."""
    packages = [(name, version or "not installed") for name, version in found["packages"].items()]
    cpu = found["cpu"]
    runs = f"C, {cpu['path']}" if cpu["path"] else f"plain torch, slower: {cpu['why_not']}"
    sets = ", ".join(name if usable else f"{name} (not on this CPU)" for name, usable in cpu["paths"].items())
    rows = [
        *(("python", found["python"]), ("platform", found["platform"]), *packages, ("CPU", cpu["name"])),
        *(("CPU runs", runs), ("compiled for", sets or "nothing"), ("CPU threads", str(cpu["threads"]))),
    ]
    if cpu["path"]:
        rows.append(("OpenMP", cpu["openmp"] or "torch's was not found: C runs on one thread"))
    if found["no_devices"]:
        rows.append(("GPU", found["no_devices"]))
    for device in found["devices"]:
        kernels = "triton kernels" if device["kernels"] else f"plain torch, slow: {device['why_not']}"
        rows.append((f"GPU {device['index']}", f"{device['name']} ({device['capability']})"))
        rows.append((f"GPU {device['index']} runs", kernels))
        if device["kernels"]:
            rows.append(("tuning table", device["table"] or "none: heuristics choose; `hf-mxfp4 tune` measures one"))
        rows += [("stale table", f"{path}: of another triton or other kernels") for path in device["stale_tables"]]
        rows += [("warning", text) for text in device["warnings"]]
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict:
    from hf_mxfp4.kernels import cpu

    try:
        path, why_not = cpu.path(), cpu.why_not()
    except ValueError as error:  # the environment variable
        path, why_not = None, str(error)
    return {
        "name": _cpu_name(),
        "path": path,
        "why_not": why_not,
        "paths": cpu.paths(),
        "threads": torch.get_num_threads(),
        "openmp": cpu.openmp() if path else None,
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _device(index: int) -> dict:
    device = torch.device("cuda", index)
    why_not = dispatch._why_no_kernels(device)
    found = {
        "index": index,
        "name": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "kernels": why_not is None,
        "why_not": why_not,
        "table": None,
        "stale_tables": [],
        "warnings": [],
    }
    if why_not is None:
        from hf_mxfp4.kernels import tuning

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            table = tuning.load_table(found["name"])
        found["table"] = str(table.path) if table else None
        found["stale_tables"] = [str(path) for path in tuning.stale_tables(found["name"])]
        found["warnings"] = [str(warning.message) for warning in caught]
    return found


def _why_no_devices() -> str | None:
    if torch.cuda.device_count():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"none: torch {torch.__version__} was built without CUDA and ROCm"
    return f"none: torch {torch.__version__} was built for GPUs and sees none; nvidia-smi or rocm-smi may say why"
