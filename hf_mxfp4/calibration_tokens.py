# SPDX-License-Identifier: Apache-2.0
"""Tokens to calibrate with: sampled from the model itself, random, from text, an earlier run or a data set."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_mxfp4.calibration_files import load_statistics

PROVIDERS = "hf_mxfp4.calibration"  # entry points, see `_from_provider`
_TOKENS_AT_ONCE = 16384  # rows x length that `generate` works on; its key-value cache grows with it
_OTHERS = (
    'give a text file, a list of strings, "random" (uniform token ids), a calibration.safetensors of this model, or a '
    "data set's name"
)


def calibration_tokens(
    model: nn.Module, source="self", tokenizer=None, samples: int = 128, length: int = 512, seed: int = 0
) -> torch.Tensor:
    """Token ids to run through a model; the same for the same arguments, whatever the state of the generators.

    Args:
        model: a transformers model in full precision; its generators are left as they are found.
        source (`str`, `Path` or `list[str]`):
            `"self"`: sampled from the model after its BOS token (if it has one) and a random token, which spreads the
            samples over what it knows; special tokens suppressed. `"random"`: uniform ids, special tokens left out. A
            utf-8 text file or a list of strings: windows spread evenly over the text, special tokens of the tokenizer
            around each. A `.safetensors` file of `save_statistics`: its tokens as they are (`samples`, `length` and
            `seed` do not apply). Any other string: a data set known to an installed provider (entry points of the
            group `hf_mxfp4.calibration`).
        tokenizer (*optional*): needed for text and data sets.
        samples (`int`): rows, S.
        length (`int`): tokens in a row, L.
        seed (`int`): of everything drawn at random.

    Returns:
        int64 `[S, L]` on CPU.

    Raises:
        ValueError: for sources that do not exist, do not fit the model or hold too little.
        TypeError: for other types.
    """
    for name, value in {"samples": samples, "length": length}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}; allowed: an int from 1.")
    is_name = isinstance(source, str)
    if not is_name and not isinstance(source, Path):
        if not isinstance(source, (list, tuple)) or not all(isinstance(text, str) for text in source):
            raise TypeError(f'calibration={source!r}; allowed: "self", or {_OTHERS}.')
        tokens = _from_text(source, tokenizer, samples, length)
    elif is_name and source == "self":
        tokens = _from_model(model, tokenizer, samples, _allowed_length(model, length), seed)
    elif is_name and source == "random":
        ids = _ordinary_ids(model, tokenizer)
        tokens = ids[torch.randint(len(ids), (samples, length), generator=torch.Generator().manual_seed(seed))]
    elif Path(source).is_file():
        if Path(source).suffix == ".safetensors":
            tokens = load_statistics(source, model).tokens
        else:
            tokens = _from_text([_read(source)], tokenizer, samples, length)
    elif is_name:
        tokens = _from_provider(source, tokenizer, samples, length, seed)
    else:
        raise ValueError(f"calibration={str(source)!r}: there is no such file.")
    _allowed_length(model, tokens.shape[1])
    size = _vocabulary(model)
    if int(tokens.max()) >= size or int(tokens.min()) < 0:
        raise ValueError(
            f"calibration has token ids from {int(tokens.min())} to {int(tokens.max())}, the model has {size} tokens; "
            "the tokenizer or the data belong to another model."
        )
    return tokens


def _vocabulary(model: nn.Module) -> int:
    return model.get_input_embeddings().weight.shape[0]


def _configs(model: nn.Module) -> list:
    """The model's config, its text part where that is another, and how it generates."""
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    return [config for config in (model.config, text, getattr(model, "generation_config", None)) if config is not None]


def _allowed_length(model: nn.Module, length: int) -> int:
    longest = getattr(_configs(model)[1], "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(f"calibration rows of {length} tokens; the model reads at most {longest}. Use shorter rows.")
    return length


def _special_ids(model: nn.Module, tokenizer) -> set[int]:
    """Ids that stand for no text: BOS, EOS and the like, and places of images."""
    found = set(getattr(tokenizer, "all_special_ids", ()))
    for config in _configs(model):
        for name, value in config.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                values = value if isinstance(value, (list, tuple)) else [value]
                found |= {i for i in values if isinstance(i, int) and not isinstance(i, bool)}
    return found


def _ordinary_ids(model: nn.Module, tokenizer) -> torch.Tensor:
    size = _vocabulary(model)
    if tokenizer is not None:
        size = min(size, len(tokenizer))  # embeddings are often padded beyond the vocabulary
    special = _special_ids(model, tokenizer)
    return torch.tensor([i for i in range(size) if i not in special])


def _from_model(model: nn.Module, tokenizer, samples: int, length: int, seed: int) -> torch.Tensor:
    can = getattr(model, "can_generate", lambda: False)()
    if not can or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f'calibration="self": {type(model).__name__} does not generate text by itself; {_OTHERS}.')
    first = next((c.bos_token_id for c in _configs(model)[::-1] if getattr(c, "bos_token_id", None) is not None), None)
    if isinstance(first, (list, tuple)):
        first = first[0]
    ids = _ordinary_ids(model, tokenizer)
    start = ids[torch.randint(len(ids), (samples, 1), generator=torch.Generator().manual_seed(seed))]
    if first is not None:
        start = torch.cat((torch.full((samples, 1), first), start), 1)[:, :length]
    if start.shape[1] == length:
        return start
    # The model's own generation config (top_k, penalties, stop tokens) must not bend its distribution. EOS is
    # suppressed, not passed over: else short documents fill the samples (KL divergence of scripts/demo_lm to the
    # original in NVFP4 with error feedback 0.047, not 0.023; without error feedback 0.037).
    config = type(model.generation_config)(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=length - start.shape[1],
        pad_token_id=0,
        suppress_tokens=sorted(i for i in _special_ids(model, tokenizer) if 0 <= i < _vocabulary(model)) or None,
    )
    rows, training = [], [module for module in model.modules() if module.training]
    own_config, model.generation_config = model.generation_config, config
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = range(torch.accelerator.device_count()) if accelerator else ()
    try:
        model.eval()
        with (
            torch.random.fork_rng(devices, device_type=accelerator.type if accelerator else "cuda"),
            tqdm(total=samples, desc="Calibration text", unit="sample", leave=False) as bar,
        ):
            torch.manual_seed(seed)
            for prompt in start.split(max(1, _TOKENS_AT_ONCE // length)):
                prompt = prompt.to(model.device)
                out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
                rows.append(out.cpu())
                bar.update(len(prompt))
    finally:
        model.generation_config = own_config
        for module in training:
            module.training = True
    return torch.cat(rows)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in utf-8: {error}.") from error


def _from_text(texts: Iterable[str], tokenizer, samples: int, length: int) -> torch.Tensor:
    """Windows spread evenly over all texts in a row, the tokenizer's special tokens before and after each."""
    if tokenizer is None:
        raise ValueError("calibration from text needs a tokenizer; pass the model's.")
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    before, after = ([], []) if at is None else (whole[:at], whole[at + len(plain) :])
    inside = length - len(before) - len(after)
    ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    if inside < 1 or len(ids) < samples * inside:
        raise ValueError(
            f"the calibration text has {len(ids)} tokens; {samples} samples of {length} tokens (of which "
            f"{length - inside} special) need {samples * max(inside, 1)}. Give more text or ask for less."
        )
    step = (len(ids) - inside) / max(samples - 1, 1)
    starts = [int(i * step) for i in range(samples)]
    return torch.tensor([before + ids[start : start + inside] + after for start in starts])


def _from_provider(name: str, tokenizer, samples: int, length: int, seed: int) -> torch.Tensor:
    """Rows of a data set from the first provider that knows it.

    A provider is a function of `(name, tokenizer, samples, length, seed)` that returns S rows of L token ids, or
    raises `LookupError` (it does not know the name) or `ImportError` (what it needs is not installed).
    """
    answers = []
    for entry in importlib.metadata.entry_points(group=PROVIDERS):
        try:
            provider = entry.load()
            if tokenizer is None:
                raise ValueError(f"calibration={name!r}: a data set needs a tokenizer; pass the model's.")
            rows = provider(name, tokenizer, samples, length, seed)
        except (LookupError, ImportError) as error:
            answers.append(f"{entry.name}: {error.args[0] if error.args else error}")
            continue
        tokens = torch.stack([torch.as_tensor(row).reshape(-1) for row in rows]).to(torch.int64).cpu()
        if tokens.shape != (samples, length):
            raise ValueError(f"{entry.name} gave tokens {list(tokens.shape)} for {name!r}, not [{samples}, {length}].")
        return tokens
    raise ValueError(
        f'calibration={name!r} is neither "self" nor "random", there is no such file, and no data set provider knows '
        f"it ({'; '.join(answers) or 'none is installed'}). Otherwise {_OTHERS}."
    )
