# SPDX-License-Identifier: Apache-2.0
"""What the headers of a checkpoint say of the model it is loaded into: names, kept modules, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from hf_mxfp4 import conversion
from hf_mxfp4.checkpoint_files import StoredTensor, read_header
from hf_mxfp4.checkpoints import FULL_PRECISION, OUTLIER_ENDINGS, PACKED_ENDINGS, Expected, check_stored
from hf_mxfp4.config import FP4Config
from hf_mxfp4.packed import TRANSFORMS
from hf_mxfp4.packing import Plan


def read_headers(files: Iterable[str] | None) -> dict[str, StoredTensor]:
    """What the headers of a checkpoint's files say, by name.

    Raises:
        ValueError: for other files than safetensors.
    """
    headers: dict[str, StoredTensor] = {}
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: FP4 checkpoints are read from safetensors only, never from pickle files.")
        headers.update(read_header(file))
    return headers


def names_in_model(model: PreTrainedModel, keys: Iterable[str], quantizer=None) -> dict[str, tuple[str, str | None]]:
    """Where stored tensors load: by key the name in the model, and the pattern of the converter that merges or splits
    the tensor on its way (`None` if there is none)."""
    mapping = get_model_conversion_mapping(model, None, quantizer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, names = model.state_dict(), {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:  # as the loader does: the key was right as it was
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        names[key] = (name, pattern)
    return names


def check_sources(model: PreTrainedModel, weight_names: set[str], headers: dict[str, StoredTensor]) -> None:
    """Weights to be quantized must be stored in full precision: the loader would cast anything to the dtype."""
    for key, (name, _) in names_in_model(model, headers).items():
        if name in weight_names and headers[key].dtype not in FULL_PRECISION:
            raise ValueError(
                f"{key}: dtype {headers[key].dtype} in {headers[key].file} cannot be quantized; "
                f"allowed: {', '.join(FULL_PRECISION)}. Load the original full-precision checkpoint; one that another "
                "tool packed loads with hf_mxfp4.load."
            )


def adapt_plan(model: PreTrainedModel, plan: Plan, config: FP4Config, headers: dict[str, StoredTensor]) -> None:
    """Fit the plan to a checkpoint saved from another head's point of view: pack what is stored packed though it
    is kept here by default, and leave new heads, of which nothing is stored, in full precision."""
    stored = {name for name, _ in names_in_model(model, headers).values()}
    for name in [name for name in plan.kept if f"{name}.weight_scale" in stored]:
        recipe = config.recipe(*conversion.aliases(model, name))
        if recipe is not None and type(model.get_submodule(name)) is nn.Linear:
            plan.linears[name] = recipe
            del plan.kept[name]
    modules = {name.rpartition(".")[0] for name in stored}
    for name in [name for name in plan.linears if headers and name not in modules]:
        conversion.keep_new_head(model, plan, name)


def add_transforms(model: PreTrainedModel, plan: Plan, config: FP4Config, headers: dict[str, StoredTensor]) -> None:
    """Give packed linears the input transforms that a checkpoint of ours holds for them, empty.

    Raises:
        ValueError: if its config.json names others.
    """
    listed = {(name, leaf) for name, leaves in (config.stored or {}).get("transforms", {}).items() for leaf in leaves}
    stored = {key: tensor for key, tensor in headers.items() if key.rpartition(".")[2] in TRANSFORMS}
    for key, (name, _) in names_in_model(model, stored).items():
        path, _, leaf = name.rpartition(".")
        # The loader settles prefixes by names in the model, which this one is not yet.
        for module in conversion.aliases(model, path) & plan.linears.keys():
            linear = model.get_submodule(module)
            linear._register_transforms(linear.in_features, "meta", **{leaf: stored[key].empty()})
            listed -= {(alias, leaf) for alias in conversion.aliases(model, module)}
    absent = [(name, leaf) for name, leaf in listed if conversion.aliases(model, name) & plan.linears.keys()]
    if absent:
        raise ValueError(
            f"the checkpoint holds no {'.'.join(min(absent))}, an input transform that its quantization_config "
            "promises. Its config.json and safetensors files do not belong together, or were edited; download or "
            "quantize it again."
        )


def check_headers(model: PreTrainedModel, plan: Plan, headers: dict[str, StoredTensor], quantizer) -> None:
    """Every tensor of a packed module must be in the checkpoint with its exact dtype and shape, and nothing
    packed may be stored for modules that are not."""
    found: dict[str, list[tuple[str, StoredTensor]]] = {}
    names = names_in_model(model, headers, quantizer)
    for key, (name, _) in names.items():
        found.setdefault(name, []).append((key, headers[key]))
    split = {name for name, pattern in names.values() if pattern is not None}
    expected, state = {}, model.state_dict()
    for path in (*plan.linears, *plan.experts):
        module = model.get_submodule(path)
        _size_outliers(module, path, found)
        for leaf, _ in module.named_parameters():
            expected[f"{path}.{leaf}"] = Expected(None, tuple(module.get_parameter(leaf).shape))
        for leaf, buffer in module.named_buffers(recurse=False):
            name, shape = f"{path}.{leaf}", tuple(buffer.shape)
            if name in split:
                merged = 2 if "gate_up_proj" in leaf else 1
                each = (1,) if leaf.endswith("global_scale") else (shape[1] // merged, shape[2])
                expected[name] = Expected(buffer.dtype, each, shape[0] * merged)
            else:
                expected[name] = Expected(buffer.dtype, shape)
    check_stored(expected, found)
    modules = {name for name, _ in model.named_modules()}
    for name in found:
        if name not in state and name.endswith(PACKED_ENDINGS) and name.rpartition(".")[0] in modules:
            raise ValueError(
                f"the checkpoint holds packed tensors (such as {found[name][0][0]}) for modules that its "
                "quantization_config leaves in full precision. Its config.json was edited or belongs to another "
                "checkpoint; download or quantize it again."
            )


def _size_outliers(module: nn.Module, path: str, found: dict[str, list[tuple[str, StoredTensor]]]) -> None:
    """Give a packed module's outlier buffers the lengths the checkpoint has (and their values its dtype)."""
    for leaf, buffer in list(module.named_buffers(recurse=False)):
        for _, stored in found.get(f"{path}.{leaf}", ()) if leaf.endswith(OUTLIER_ENDINGS) else ():
            tensor = stored.empty()
            if len(stored.shape) == 1 and tensor.is_floating_point() == buffer.is_floating_point():
                setattr(module, leaf, tensor if tensor.is_floating_point() else tensor.to(buffer.dtype))
