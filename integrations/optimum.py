# SPDX-License-Identifier: Apache-2.0
"""Data sets of optimum (those of the GPTQ paper), by name: FP4Config(calibration="wikitext2"), evaluate --text."""

from __future__ import annotations

import random

import numpy
import torch

DATA_SETS = ("wikitext2", "c4", "c4-new")  # of optimum 2.3, `optimum/gptq/data.py`


def token_rows(name: str, tokenizer, samples: int, length: int, seed: int, split: str = "train") -> list[torch.Tensor]:
    """Token ids of `samples` random pieces of a data set; the generators are left as they are found.

    Args:
        name: one of `DATA_SETS`.
        tokenizer: the model's.
        samples: S.
        length: L.
        seed: of the choice of pieces.
        split: `"train"`, or `"validation"` (of wikitext2 the test split).

    Returns:
        S tensors int64 `[L]`.

    Raises:
        LookupError: for other names.
        ImportError: if optimum or datasets is not installed.
    """
    if name not in DATA_SETS:
        raise LookupError(f"optimum knows {', '.join(DATA_SETS)}")
    states = random.getstate(), numpy.random.get_state()
    try:
        from optimum.gptq.data import get_dataset

        with torch.random.fork_rng():
            rows = get_dataset(name, tokenizer, nsamples=samples, seqlen=length, seed=seed, split=split)
    except ImportError as error:
        raise ImportError("optimum or datasets is missing; run `pip install optimum datasets`") from error
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
    return [row["input_ids"].reshape(-1) for row in rows]
