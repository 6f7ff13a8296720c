# SPDX-License-Identifier: Apache-2.0
"""Rewards that a program can verify, and how scripts/grpo.py finds and checks reward functions.

A reward function takes `completions` (texts, or lists of messages), the data's columns as lists (`answer`), and
whatever else TRL passes; it returns one number for each completion, or `None` where it does not apply.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import re
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path

import torch

_NUMBER = re.compile(r"(?:\$-|(?<![\d)])-\$?|\$)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_NUMERATOR = re.compile(r"(?:\d\s*/\s*|frac(?:\{\S*\}\{?)?\s*)$")
_PLAIN = {"\u2212": "-", "{,}": ",", "\\,": "", "\\!": "", "\\$": "$"}  # minus sign, LaTeX
_STATED = re.compile(r"####[ \t]*([^\n]+)")


def exact_match(completions, answer, **columns) -> list[float]:
    """1 where the first line of the completion is the answer, letter for letter: generated arithmetic."""
    return [
        float(text.split("\n")[0].strip() == str(wanted).strip())
        for text, wanted in zip(_texts(completions), answer, strict=True)
    ]


def gsm8k(completions, answer, **columns) -> list[float]:
    """1 where the final number of the completion equals the answer's: after ####, in \\boxed{}, or the last one.

    `answer` is a number or a solution that ends in `#### number`, as in the data set openai/gsm8k.

    Raises:
        ValueError: for an answer without a number.
    """
    numbers = [final_number(str(wanted)) for wanted in answer]
    if None in numbers:
        raise ValueError(
            f"answer {answer[numbers.index(None)]!r} has no final number; is it the right column of the data?"
        )
    return [float(final_number(text) == number) for text, number in zip(_texts(completions), numbers, strict=True)]


def stated(completions, **columns) -> list[float]:
    """0.1 where the completion states a final number after #### or in \\boxed{}, once: a small reward for the form."""
    return [
        0.1 * (len(found := [*_STATED.findall(text), *_boxed(text)]) == 1 and _number(found[0]) is not None)
        for text in _texts(completions)
    ]


BUILT_IN = {function.__name__: function for function in (exact_match, gsm8k, stated)}


def final_number(text: str) -> Decimal | None:
    """The number a text ends in: after its last ####, else in its last \\boxed{}, else the last one; or `None`.

    Fractions are none: the denominator is not the answer.
    """
    stated = _STATED.findall(text) or _boxed(text)
    return _number(stated[-1]) if stated else _number(text)


def load(path: str) -> Callable:
    """A reward function by name (`BUILT_IN`), as `package.module:function` or as `file.py:function`.

    Raises:
        ValueError: if there is no such function, with what there is.
    """
    if path in BUILT_IN:
        return BUILT_IN[path]
    source, colon, name = path.rpartition(":")
    if not colon or not source or not name:
        raise ValueError(
            f"reward {path!r}; allowed: {', '.join(BUILT_IN)}, package.module:function, or file.py:function."
        )
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise ValueError(f"reward {path!r}: there is no file {source}.")
        spec = importlib.util.spec_from_file_location(f"reward_{Path(source).stem}", source)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look it up
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise ValueError(f"reward {path!r}: {error}. Is it installed, and on the import path?") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_")
        raise ValueError(f"reward {path!r}: {source} has no function {name}; it has {', '.join(there) or 'none'}.")
    return function


def checked(function: Callable, name: str | None = None) -> Callable:
    """A reward function whose exceptions and results name it.

    Returns:
        a function with the same arguments. It raises `RuntimeError` where `function` raises, `TypeError` for a result
        that is not a list of numbers or `None`, and `ValueError` for the wrong length, NaN or infinity.
    """
    name = name or getattr(function, "__name__", type(function).__name__)

    def failed(error: Exception) -> RuntimeError:
        return RuntimeError(f"reward function {name} raised {type(error).__name__}: {error}")

    if inspect.iscoroutinefunction(function):

        async def reward(completions, **columns):
            try:
                found = await function(completions=completions, **columns)
            except Exception as error:
                raise failed(error) from error
            return _checked(name, found, len(completions))

    else:

        def reward(completions, **columns):
            try:
                found = function(completions=completions, **columns)
            except Exception as error:
                raise failed(error) from error
            return _checked(name, found, len(completions))

    functools.update_wrapper(reward, function)
    reward.__name__ = name.rpartition(":")[2]  # in TRL's logs
    return reward


def score(function: Callable, **arguments) -> list[float | None]:
    """What a reward function, also an asynchronous one, gives."""
    found = function(**arguments)
    return asyncio.run(found) if inspect.isawaitable(found) else found


def _checked(name: str, found, count: int) -> list[float | None]:
    if isinstance(found, torch.Tensor):
        found = found.tolist()
    if hasattr(found, "tolist") and not isinstance(found, (list, tuple)):  # numpy
        found = found.tolist()
    if not isinstance(found, (list, tuple)):
        raise TypeError(
            f"reward function {name} returned {type(found).__name__}; it must return a list with a number for each of "
            f"the {count} completions."
        )
    if len(found) != count:
        raise ValueError(
            f"reward function {name} returned {len(found)} rewards for {count} completions; it must return one for "
            "each, None where it does not apply."
        )
    for index, value in enumerate(found):
        if value is not None and not isinstance(value, numbers.Real):
            raise TypeError(
                f"reward function {name} returned {value!r} for completion {index}; allowed: a number or None."
            )
        if value is not None and not math.isfinite(value):
            raise ValueError(f"reward function {name} returned {value} for completion {index}; rewards are finite.")
    return [None if value is None else float(value) for value in found]


def _texts(completions) -> list[str]:
    """Texts of completions; of messages, their contents."""
    return [
        text if isinstance(text, str) else "".join(str(message.get("content") or "") for message in text)
        for text in completions
    ]


def _boxed(text: str) -> list[str]:
    """What stands in each \\boxed{}, braces balanced."""
    found = []
    for match in re.finditer(r"\\boxed\{", text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                found.append(text[match.end() : end])
                break
    return found


def _number(text: str) -> Decimal | None:
    """The last number of a text, without thousands separators and dollar signs; `None` if it is a denominator."""
    for written, plain in _PLAIN.items():
        text = text.replace(written, plain)
    found = list(_NUMBER.finditer(text))
    if not found or _NUMERATOR.search(text[: found[-1].start()]):
        return None
    try:
        return Decimal(found[-1].group().replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None
