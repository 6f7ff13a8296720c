# SPDX-License-Identifier: Apache-2.0
"""The Hub: model cards, uploads that are seen whole or not at all, and what a repository holds without its weights."""

from __future__ import annotations

from hf_mxfp4.hub.card import render_card, write_card
from hf_mxfp4.hub.push import Pushed, push
from hf_mxfp4.hub.remote import read_remote

__all__ = ["Pushed", "push", "read_remote", "render_card", "write_card"]
