# SPDX-License-Identifier: Apache-2.0
"""Requests to the Hub: what is tried again and for how long, and what errors say. No error holds the token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers

Result = TypeVar("Result")

# huggingface_hub 1.x raises errors of httpx, 2.x those of httpx2; its own have the common base first.
_HTTP_ERROR = HfHubHTTPError.__bases__[0]
TRANSIENT = (408, 412, 429, 500, 502, 503, 504)  # 412: somebody else committed in between
_LOST = {"TimeoutException", "NetworkError", "RemoteProtocolError", "ConnectionError"}
ATTEMPTS = 5
LONGEST_WAIT = 330  # seconds; the Hub counts requests in windows of five minutes


def persistently(
    function: Callable[[], Result],
    repo_id: str,
    way_out: Callable[[], str] = lambda: "Try again later.",
    token: str | None = None,
) -> Result:
    """The result of requests that are made again, up to `ATTEMPTS` times, when the Hub or the network fails.

    huggingface_hub does so for parts of its requests only: not for creating repositories, commits, reading headers.
    Between attempts lie 1, 2, 4, 8 seconds, or what the Hub asks for.

    Args:
        function: without arguments; must be right to call again after it failed anywhere.
        repo_id: for messages.
        way_out: what to do when the Hub or the network failed each time, asked for then.
        token: that the requests carry; huggingface_hub's own if not given. No message holds it.

    Raises:
        PermissionError: for a token that is missing, rejected or not allowed to.
        ConnectionError: when the Hub or the network failed each time.
        ValueError: for repositories, revisions and files that are not there, and requests the Hub refuses.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return function()
        except (_HTTP_ERROR, OSError, ValueError, RuntimeError) as error:
            root = _root(error)
            wait = _wait(root, attempt)
            if attempt == ATTEMPTS or wait is None or wait > LONGEST_WAIT:
                explained = _explained(root, repo_id, attempt, way_out(), token or get_token())
                if explained is None:
                    raise
                raise explained from _presentable(error, token or get_token())
        time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _root(error: BaseException) -> BaseException:
    """What stopped an upload or a download, which huggingface_hub wraps."""
    while isinstance(error, RuntimeError | LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _wait(error: BaseException, attempt: int) -> float | None:
    """Seconds before the next attempt; `None` if there is no sense in one."""
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in TRANSIENT:
            return None
        asked = error.response.headers.get("Retry-After", "")
        limit = parse_ratelimit_headers(error.response.headers)
        if limit is not None and limit.remaining == 0:
            return limit.reset_in_seconds + 1
        return int(asked) + 1 if asked.isascii() and asked.isdigit() else 2.0 ** (attempt - 1)
    return 2.0 ** (attempt - 1) if _is_lost(error) else None


def _is_lost(error: BaseException) -> bool:
    """Whether no answer came, or a page in place of JSON: from a proxy, or a Hub that is being restarted."""
    if isinstance(error, OfflineModeIsEnabled):
        return False
    if type(error) is RuntimeError:  # hf_xet's word for whatever fails on the way to its storage
        return True
    return isinstance(error, json.JSONDecodeError) or bool(_LOST & {base.__name__ for base in type(error).__mro__})


def _explained(error: BaseException, repo_id: str, attempts: int, way_out: str, token: str | None) -> Exception | None:
    """The error to raise, in words for the user; `None` for one that speaks for itself."""
    said = _clean((getattr(error, "server_message", None) or str(error)).strip().rstrip("."), token)
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, HFValidationError):
        return ValueError(f"{repo_id!r} is not the name of a repository (user/name): {said}.")
    if isinstance(error, OfflineModeIsEnabled):
        return ConnectionError(f"{repo_id}: HF_HUB_OFFLINE is set, so the Hub is not asked. Unset it.")
    if isinstance(error, RevisionNotFoundError):
        return ValueError(f"{repo_id} has no such revision. Name a branch, tag or commit of it.")
    if isinstance(error, GatedRepoError):
        return PermissionError(
            f"{repo_id} is gated: accept its conditions on its page on the Hub, with the account whose token you use."
        )
    if isinstance(error, RepositoryNotFoundError):
        if token is None:
            return ValueError(
                f"{repo_id} is not on the Hub, or is private, and there is no token. Check the name, or log in "
                "(`hf auth login`, or set HF_TOKEN)."
            )
        return ValueError(
            f"{repo_id} is not on the Hub, or is private and the token may not read it. Check the name and the token."
        )
    if isinstance(error, LocalTokenNotFoundError) or (status in (401, 403) and token is None):
        return no_token(repo_id)
    if status == 401:
        return PermissionError(
            f"{repo_id}: the Hub rejected the token: {said}. Log in again (`hf auth login`), or correct HF_TOKEN."
        )
    if status in (402, 403, 413, 507):
        return PermissionError(
            f"{repo_id}: the Hub refused: {said}. To push, the token needs write permission there (a fine-grained "
            "one: for this repository or its owner), and its owner free storage."
        )
    if status in TRANSIENT or _is_lost(error):
        found = f"answered {status}" if status else f"could not be reached ({type(error).__name__})"
        return ConnectionError(f"{repo_id}: the Hub {found}, {attempts} times: {said}. {way_out}")
    if status is not None:
        return ValueError(f"{repo_id}: the Hub answered {status}: {said}.")
    if isinstance(error, _HTTP_ERROR) or _clean(repr(error), token) != repr(error):
        return ConnectionError(
            f"{repo_id}: the Hub could not be asked: {said}. Check HF_TOKEN and HF_ENDPOINT for stray characters."
        )
    return None


def no_token(repo_id: str) -> PermissionError:
    """The error for a request that needs a token where there is none."""
    return PermissionError(f"{repo_id}: the Hub wants a token. Log in with `hf auth login`, or set HF_TOKEN.")


def _clean(text: str, token: str | None) -> str:
    """Text without the token, which errors of malformed headers quote."""
    return text.replace(token, "<token>") if token else text


def _presentable(error: BaseException, token: str | None) -> BaseException | None:
    """The error, to be shown as the cause, unless it or what caused it quotes the token."""
    link: BaseException | None = error
    while link is not None:
        if _clean(f"{link}{link!r}", token) != f"{link}{link!r}":
            return None
        link = link.__cause__ or link.__context__
    return error
