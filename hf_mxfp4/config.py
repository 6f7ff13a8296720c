# SPDX-License-Identifier: Apache-2.0
"""FP4Config: what to quantize and how. Validated at construction, stored in config.json, read back without loss."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_mxfp4.checkpoints import HF_MXFP4_KEY, WRITTEN
from hf_mxfp4.formats import FORMATS, QuantizedTensor
from hf_mxfp4.outliers import MAX_FRACTION
from hf_mxfp4.recipe import RECIPE_KEYS, Recipe, check_choice, check_recipe, check_regex, unknown_names
from hf_mxfp4.scales import SCALE_RULES, ScaleOptions

QUANT_METHOD = "hf_mxfp4"
FOREIGN_KEY = "foreign"  # in memory only: the quantization_config of another tool, to be loaded by us
FORMAT_VERSION = 1  # of the fields below as stored in config.json
_COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CALIBRATION_KEYS = (
    *("calibration", "calibration_samples", "calibration_length", "calibration_seed", "calibration_dir"),
    "calibration_device",
)
_OWN_KEYS = ("ignore", "transposed", "transforms")  # beside the fields in layout `own`, see `quantizer`
_WHOLE_MODEL_KEYS = ("outlier_fallback", "error_feedback", "channel_weights")


class FP4Config(QuantizationConfigMixin):
    """How `from_pretrained` quantizes a model to 4-bit floating point, or how a checkpoint was quantized.

    Args:
        format (`str`, defaults to `"nvfp4"`):
            `"nvfp4"` (blocks of 16, E4M3 scales, 4.5 bits a weight) or `"mxfp4"` (blocks of 32, power-of-two scales,
            4.25 bits).
        scale_rule (`str`, defaults to `"soar"`):
            How block scales are chosen: a key of `hf_mxfp4.scales.SCALE_RULES` that works for the format.
        search (`str` or `int`, defaults to `"full"`):
            For `soar`: `"full"` finds the best representable scale of every block; an int looks at that many scales
            either side of the closed-form one.
        global_scale (`str`, defaults to `"power_of_two"`):
            For `soar` with NVFP4: the tensor scale is a power of two, or `"free"` (closed form).
        iterations (`int`, defaults to 10): most rounds of `soar`.
        macro_block (`str`, *optional*):
            For MXFP4: a further factor for each 128 weights (0.0625 bits a weight), `"static"` (from their maximum) or
            `"search"` (the best one, together with the block scales).
        outlier_fallback (`float`, defaults to 0.0):
            Fraction of all packed weights, at most 0.1, kept in 16 bits: those that lower the model's squared error
            most. 0.005 is typical.
        error_feedback (`bool`, defaults to `False`):
            Quantize column by column and let later columns make up for the errors of earlier ones, as the inputs of
            each layer weigh them (GPTQ). Needs calibration, see below.
        channel_weights (`bool`, defaults to `False`):
            Weigh squared errors by the mean square of each input channel when scales are searched; the diagonal form
            of `error_feedback`, and cheaper. Needs calibration.
        calibration (`str` or `list[str]`, defaults to `"self"`):
            Tokens to calibrate on: `"self"` (sampled from the model itself), `"random"`, a text file, a list of texts,
            a `calibration.safetensors` of an earlier run, or a data set that optimum knows (`"wikitext2"`, `"c4"`).
        calibration_samples (`int`, defaults to 32): sequences to calibrate on.
        calibration_length (`int`, defaults to 256): tokens of a sequence.
        calibration_seed (`int`, defaults to 0): of the sampling.
        calibration_dir (`str`, *optional*):
            Folder that keeps finished layers, from which an interrupted run with the same config goes on, and
            `calibration.safetensors`: the tokens and statistics.
        calibration_device (`str`, *optional*):
            Device to calibrate on, one block of the model at a time (`"cuda"` for a model that is loaded into CPU
            memory); where the model is if not given.
        activation_format (`str`, *optional*):
            `"same"`: round activations to each layer's own format as they come (W4A4). May be given beside a quantized
            checkpoint too.
        modules_to_not_convert (`list[str]`, *optional*):
            Modules to leave in full precision, beside those always left: output head, tied embeddings, routers,
            modules the model keeps in float32. Names, name prefixes, suffixes or regexes, as in transformers.
        overrides (`dict[str, dict | str]`, *optional*):
            Regex over module names (`re.search`, first match wins) to `"skip"`, or to a dict of other values for
            `format`, `scale_rule`, `search`, `global_scale`, `iterations`. `{}` packs a module that would be left.
        compute_dtype (`torch.dtype` or `str`, *optional*):
            Dtype in which packed layers multiply (bfloat16, float16, float32); the activations' own if not given.
        layout (`str`, defaults to `"auto"`):
            How `save_pretrained` stores: `"portable"` (compressed-tensors, read by vLLM and plain transformers too),
            `"own"`, or `"auto"`: portable wherever every reader gets the right numbers.
        on_unsupported (`str`, defaults to `"error"`):
            Modules that cannot be packed: `"error"`, or `"keep"` them in full precision and warn with their list.
        dequantize (`bool`, defaults to `False`): load a quantized checkpoint as a plain full-precision model.
        backend (`str`, defaults to `"auto"`):
            `"triton"`, `"torch"`, or `"auto"`: Triton on GPUs, C on CPUs where it was compiled (else torch).
        fuse_projections (`bool`, defaults to `False`):
            Compute q, k and v by one product, and gate and up by another, where no gradient is needed. May be given
            beside a quantized checkpoint, and is not stored. Projections that get an adapter are computed on their own
            again, and so are their siblings.
        origin (`str`, *optional*):
            Of a model that another tool quantized: the tool, as its checkpoint says (`"modelopt 0.33.0"`); not for
            users to give. `scale_rule` and its options, `modules_to_not_convert` and the calibration then say nothing.

    Raises:
        ValueError: for unknown names and impossible combinations, with what is allowed.
        TypeError: for unknown arguments.

    Example:
        >>> config = FP4Config(format="mxfp4", overrides={r"layers\\.0\\.": {"format": "nvfp4"}, "lm_head": "skip"})
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", quantization_config=config)
    """

    def __new__(cls, *args, **kwargs):
        config = super().__new__(cls)
        config.given = {*FIELDS[: len(args)], *kwargs}  # arguments a caller spelled out, defaults or not
        return config

    def __init__(
        self,
        format: str = "nvfp4",
        scale_rule: str = "soar",
        search: str | int = "full",
        global_scale: str = "power_of_two",
        iterations: int = 10,
        macro_block: str | None = None,
        outlier_fallback: float = 0.0,
        error_feedback: bool = False,
        channel_weights: bool = False,
        calibration: str | list[str] = "self",
        calibration_samples: int = 32,
        calibration_length: int = 256,
        calibration_seed: int = 0,
        calibration_dir: str | None = None,
        calibration_device: str | None = None,
        activation_format: str | None = None,
        modules_to_not_convert: list[str] | None = None,
        overrides: dict[str, dict | str] | None = None,
        compute_dtype: torch.dtype | str | None = None,
        layout: str = "auto",
        on_unsupported: str = "error",
        dequantize: bool = False,
        backend: str = "auto",
        fuse_projections: bool = False,
        origin: str | None = None,
        **unknown,
    ):
        if unknown:
            raise TypeError(unknown_names("FP4Config got unknown arguments", unknown, FIELDS))
        self.quant_method = QUANT_METHOD
        self.format, self.scale_rule = format, scale_rule
        self.search, self.global_scale, self.iterations = search, global_scale, iterations
        self.macro_block, self.outlier_fallback = macro_block, outlier_fallback
        self.error_feedback, self.channel_weights = error_feedback, channel_weights
        self.calibration, self.calibration_seed = copy.deepcopy(calibration), calibration_seed
        self.calibration_samples, self.calibration_length = calibration_samples, calibration_length
        self.calibration_dir = None if calibration_dir is None else str(calibration_dir)
        self.calibration_device = None if calibration_device is None else str(calibration_device)
        self.activation_format = activation_format
        # Copies: nothing may change a config once it is checked. JSON keeps the order of pairs, not of keys.
        self.modules_to_not_convert = copy.deepcopy(modules_to_not_convert)
        pairs = isinstance(overrides, (list, tuple)) and all(isinstance(p, (list, tuple)) for p in overrides)
        self.overrides = copy.deepcopy(dict(overrides) if pairs else overrides)
        self.compute_dtype = _COMPUTE_DTYPES[compute_dtype] if compute_dtype in [*_COMPUTE_DTYPES] else compute_dtype
        self.layout, self.on_unsupported = layout, on_unsupported
        self.dequantize, self.backend, self.fuse_projections = dequantize, backend, fuse_projections
        self.origin = origin
        self.stored: dict | None = None  # of a model's checkpoint: what stands beside our fields, see `to_dict`
        self.foreign: dict | None = None  # the quantization_config of a checkpoint by another tool, until it is read
        self.requested: FP4Config | None = None  # what a user passed beside a quantized checkpoint
        self.post_init()

    def post_init(self) -> None:
        """Check every field; see the class docstring for what is allowed."""
        check_choice("format", self.format, FORMATS)
        check_choice("layout", self.layout, ("auto", *WRITTEN))
        check_choice("on_unsupported", self.on_unsupported, ("error", "keep"))
        check_choice("backend", self.backend, ("auto", "triton", "torch"))
        for name in ("dequantize", "error_feedback", "channel_weights", "fuse_projections"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a bool.")
        if self.origin is not None and not isinstance(self.origin, str):
            raise ValueError(f"origin={self.origin!r} is not a string.")
        if self.activation_format not in (None, "same"):
            raise ValueError(f"activation_format={self.activation_format!r}; allowed: None, same.")
        if self.compute_dtype is not None and self.compute_dtype not in [*_COMPUTE_DTYPES.values()]:
            raise ValueError(f"compute_dtype={self.compute_dtype!r}; allowed: None, {', '.join(_COMPUTE_DTYPES)}.")
        skip = self.modules_to_not_convert
        if skip is not None and not (isinstance(skip, (list, tuple)) and all(isinstance(name, str) for name in skip)):
            raise ValueError(f"modules_to_not_convert={skip!r} is not a list of strings.")
        for name in skip or ():
            check_regex("modules_to_not_convert", name)
        self.modules_to_not_convert = None if skip is None else list(skip)
        check_recipe(**{key: getattr(self, key) for key in RECIPE_KEYS})
        self._check_calibration()
        self._recipe({})
        if self.overrides is not None and not isinstance(self.overrides, dict):
            raise ValueError(f'overrides={self.overrides!r} is not a dict of regex to "skip" or a dict.')
        for pattern, override in (self.overrides or {}).items():
            self._check_override(pattern, override)

    def _check_calibration(self) -> None:
        budget = self.outlier_fallback
        number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
        if not number or not 0 <= budget <= MAX_FRACTION:
            raise ValueError(f"outlier_fallback={budget!r}; allowed: a fraction of weights from 0 to {MAX_FRACTION}.")
        if self.layout == "portable" and (budget or self.macro_block):
            raise ValueError(
                'layout="portable" cannot hold macro-blocks or outliers, which no other reader knows. Use '
                'layout="auto" or "own", or quantize without them.'
            )
        if self.error_feedback and self.channel_weights:
            raise ValueError("error_feedback weighs channels already; leave channel_weights out.")
        for name, lowest in (("calibration_samples", 1), ("calibration_length", 2), ("calibration_seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ValueError(f"{name}={value!r}; allowed: an int, at least {lowest}.")
        texts = isinstance(self.calibration, list) and all(isinstance(text, str) for text in self.calibration)
        if not (self.calibration and (texts or isinstance(self.calibration, str))):
            raise ValueError(f"calibration={self.calibration!r} is not a string or a list of strings, or is empty.")
        if not self.needs_calibration:
            defaults = {name: _signature.parameters[name].default for name in _CALIBRATION_KEYS}
            unused = [name for name, default in defaults.items() if getattr(self, name) != default]
            if unused:
                raise ValueError(f"{', '.join(unused)}: only for error_feedback=True or channel_weights=True.")

    @property
    def needs_calibration(self) -> bool:
        """Whether inputs of layers are needed to quantize."""
        return self.error_feedback or self.channel_weights

    @property
    def needs_whole_model(self) -> bool:
        """Whether weights can only be quantized once all of them are loaded."""
        return self.needs_calibration or self.outlier_fallback > 0

    def _check_override(self, pattern: str, override: dict | str) -> None:
        check_regex("overrides", pattern)
        if override == "skip":
            return
        if not isinstance(override, dict):
            raise ValueError(f'overrides[{pattern!r}]={override!r}; allowed: "skip" or a dict of {RECIPE_KEYS}.')
        unknown = set(override) - set(RECIPE_KEYS)
        if unknown:
            raise ValueError(unknown_names(f"overrides[{pattern!r}] has unknown keys", unknown, RECIPE_KEYS))
        self._recipe(override)

    def _recipe(self, override: dict) -> Recipe:
        """The config's recipe with an override's changes; what another format lacks falls to its default."""
        values = {key: getattr(self, key) for key in RECIPE_KEYS} | override
        check_choice("format", values["format"], FORMATS)
        check_choice("scale_rule", values["scale_rule"], SCALE_RULES)
        rule = SCALE_RULES.get(values["scale_rule"])
        if "scale_rule" not in override and values["format"] not in rule.formats:
            values["scale_rule"] = "soar"
        if "global_scale" not in override and not FORMATS[values["format"]].has_global_scale:
            values["global_scale"] = "power_of_two"
        needs_soar = values["macro_block"] == "search" and values["scale_rule"] != "soar"
        if "macro_block" not in override and (needs_soar or FORMATS[values["format"]].has_global_scale):
            values["macro_block"] = None
        if "scale_rule" in override and override["scale_rule"] != "soar":
            for key, default in ScaleOptions()._asdict().items():
                values[key] = override.get(key, default)
        check_recipe(**values)
        soar = (values["scale_rule"], values["search"], values["global_scale"])
        if self.needs_calibration and soar != ("soar", "full", "power_of_two"):
            name = "error_feedback" if self.error_feedback else "channel_weights"
            raise ValueError(
                f'{name}=True works with scale_rule="soar", search="full" and global_scale="power_of_two", not with '
                "{!r}, {!r} and {!r}.".format(*soar)
            )
        options = ScaleOptions(values["search"], values["global_scale"], values["iterations"])
        return Recipe(FORMATS[values["format"]], values["scale_rule"], options, values["macro_block"])

    def recipe(self, *module_names: str) -> Recipe | None:
        """The recipe for a module (by any of its names), after `overrides`; `None` if an override says `"skip"`."""
        override = self.override(*module_names)
        return None if override == "skip" else self._recipe(override or {})

    def override(self, *module_names: str) -> dict | str | None:
        """The first override whose regex is found in one of a module's names, or `None`."""
        for pattern, override in (self.overrides or {}).items():
            if any(re.search(pattern, name) for name in module_names):
                return override
        return None

    def __eq__(self, other) -> bool:
        return isinstance(other, FP4Config) and self.to_dict() == other.to_dict()

    __hash__ = None

    def to_dict(self) -> dict[str, Any]:
        """As stored in config.json.

        A model's checkpoint has more than our fields: in layout `own` the list `ignore` of linears left in full
        precision, `transposed` of experts whose dense weight is transposed, and `transforms` of inputs; in layout
        `portable` all that compressed-tensors writes, with our fields under one key.
        """
        fields: dict[str, Any] = {"version": FORMAT_VERSION}
        for name in FIELDS:
            value = copy.deepcopy(getattr(self, name))
            fields[name] = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        fields["calibration_dir"] = fields["calibration_device"] = None  # of the machine that quantized
        del fields["fuse_projections"]  # of the run: the checkpoint is the same
        if isinstance(self.calibration, list):
            fields["calibration"] = f"{len(self.calibration)} texts"
        if self.overrides is not None:
            fields["overrides"] = [[pattern, override] for pattern, override in fields["overrides"].items()]
        if self.is_portable:
            return {**copy.deepcopy(self.stored), HF_MXFP4_KEY: fields}
        return {"quant_method": QUANT_METHOD, **copy.deepcopy(self.stored or {}), **fields}

    @property
    def is_portable(self) -> bool:
        """Whether this is the config of a checkpoint in the portable layout."""
        return self.stored is not None and self.stored["quant_method"] != QUANT_METHOD

    def to_diff_dict(self) -> dict[str, Any]:
        """The same as `to_dict`: a checkpoint must not change its meaning when a default does."""
        return self.to_dict()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """The config of a checkpoint's `quantization_config`, ours or a portable one of ours.

        Raises:
            ValueError: for fields this version does not know, naming them.
        """
        if FOREIGN_KEY in config_dict:
            if not isinstance(config_dict[FOREIGN_KEY], dict):
                raise ValueError(f"quantization_config: {FOREIGN_KEY}={config_dict[FOREIGN_KEY]!r} is not an object.")
            config = cls()
            config.foreign = config_dict[FOREIGN_KEY]
            return (config, kwargs) if return_unused_kwargs else config
        if HF_MXFP4_KEY in config_dict:
            fields = dict(config_dict[HF_MXFP4_KEY])
            stored = {key: value for key, value in config_dict.items() if key != HF_MXFP4_KEY}
        else:
            fields = {key: value for key, value in config_dict.items() if key not in ("quant_method", *_OWN_KEYS)}
            stored = {key: config_dict[key] for key in _OWN_KEYS if config_dict.get(key) is not None}
            stored = {"quant_method": QUANT_METHOD, **stored} if stored else None
        version = fields.pop("version", FORMAT_VERSION)
        unknown = set(fields) - set(FIELDS)
        if unknown or version != FORMAT_VERSION:
            raise ValueError(
                unknown_names(f"quantization_config (version {version}) has fields unknown here", unknown, FIELDS)
                + f" This hf_mxfp4 reads version {FORMAT_VERSION}; the checkpoint needs a newer one."
            )
        unused = {key: kwargs.pop(key) for key in list(kwargs) if key not in FIELDS}
        config = cls(**fields | kwargs)
        config.stored = stored
        return (config, unused) if return_unused_kwargs else config

    @property
    def module_options(self) -> dict[str, Any]:
        """Keyword arguments of FP4Linear and FP4Experts that come from here."""
        names = ("compute_dtype", "backend", "activation_format")
        return {name: getattr(self, name) for name in names}

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a config passed beside a quantized checkpoint may change; the rest must agree (checked on load)."""
        names = ["dequantize", "backend", "compute_dtype", "fuse_projections"]
        names += ["activation_format"] if "activation_format" in self.given else []
        return {name: getattr(self, name) for name in names} | {"requested": self}

    def contradictions(self, requested: FP4Config) -> list[str]:
        """Fields that `requested` spells out with other values than this (a checkpoint's) config has."""
        return [
            f"{name}={getattr(requested, name)!r} (the checkpoint: {self._says(name)})"
            for name in (*RECIPE_KEYS, *_WHOLE_MODEL_KEYS, "modules_to_not_convert", "overrides")
            if name in requested.given and f"{getattr(requested, name)!r}" != self._says(name)
        ]

    def _says(self, name: str) -> str:
        """A field as errors show it; what another tool did is not known."""
        unknown = self.origin is not None and name in RECIPE_KEYS[1:]
        return f"made by {self.origin}" if unknown else f"{getattr(self, name)!r}"


_signature = inspect.signature(FP4Config.__init__)
_parameters = [parameter for name, parameter in _signature.parameters.items() if name not in ("self", "unknown")]
FP4Config.__signature__ = inspect.Signature(_parameters)  # `__new__` would hide it from help() and editors
FIELDS = tuple(parameter.name for parameter in _parameters)


def quantize(weight: torch.Tensor, config: FP4Config | None = None) -> QuantizedTensor:
    """Quantize one weight as `from_pretrained` would.

    Args:
        weight (`torch.Tensor`): bfloat16, float16 or float32 `[..., K]`; K a multiple of the format's block size.
        config (`FP4Config`, *optional*): NVFP4 with SOAR scales if not given.

    Returns:
        `QuantizedTensor`: `packed` uint8 `[..., K/2]`, `scale` `[..., K/B]`, `global_scale` float32 or `None`; decode
        it with `hf_mxfp4.dequantize`.

    Raises:
        TypeError: for integer or float8 weights.
        ValueError: for NaN or Inf, or K that is not a multiple of the block size.
    """
    return (config or FP4Config()).recipe().quantize(weight)
