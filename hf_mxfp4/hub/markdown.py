# SPDX-License-Identifier: Apache-2.0
"""Text that comes from names and configs, made safe for Markdown: nothing in it is markup, ends a fence or a row."""

from __future__ import annotations

import json
import re
from typing import Any

_MARKUP = re.compile(r"([\\`*_{}\[\]()#!|~$>:@])")
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{16,}")
_LINES = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\u202a-\u202e\u2066-\u2069]+")  # and what reverses text
_LONGEST = 300
_LONGEST_COMMAND = 4000


def one_line(value: Any, longest: int = _LONGEST) -> str:
    """Its text on one line, shortened."""
    text = _LINES.sub(" ", str(value).encode("utf-8", "replace").decode("utf-8")).strip()
    return text if len(text) <= longest else text[:longest] + " ..."


def command_line(value: Any) -> str:
    """A command, on one line and whole, without a token of the Hub."""
    return _TOKEN.sub("<token>", one_line(value, _LONGEST_COMMAND))


def plain(value: Any) -> str:
    """As running text."""
    text = one_line(value).replace("&", "&amp;").replace("<", "&lt;")
    return _MARKUP.sub(r"\\\1", text)


def code(value: Any) -> str:
    """As a code span, in a row of a table too."""
    return _span(one_line(value).replace("|", r"\|"))


def command(value: Any) -> str:
    """A command as a code span, outside of tables."""
    return _span(command_line(value))


def _span(text: str) -> str:
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if text[:1] == "`" or text[-1:] == "`" or not text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def fenced(text: str, language: str = "") -> str:
    """As a block of code."""
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def quoted(value: Any) -> str:
    """As a string of Python source."""
    return json.dumps(one_line(value), ensure_ascii=False)


def comment(facts: dict[str, Any]) -> str:
    """JSON that can stand in a comment of HTML."""
    return json.dumps(facts, sort_keys=True).replace("-", "\\u002d").replace(">", "\\u003e").replace("<", "\\u003c")
