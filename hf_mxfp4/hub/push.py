# SPDX-License-Identifier: Apache-2.0
"""Upload of a checkpoint folder: checked first, visible in one commit or not at all, never with more than it should.

`HfApi.upload_folder` and `upload_large_folder` make many commits (huggingface_hub 2.x both): between them a repository
holds a config without its weights, or shards of two models. Here all large files are uploaded first, which nobody sees
and which the Hub keeps (the same command after an interruption uploads only what is missing), and one commit then
adds all files, and removes the weights of an earlier checkpoint that the new one has no files of the same name for.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from hf_mxfp4.checkpoint_files import read_checkpoint, read_json
from hf_mxfp4.hub.card import is_ours, render_card
from hf_mxfp4.hub.errors import stale_reports
from hf_mxfp4.hub.files import PICKLES, File, list_files
from hf_mxfp4.hub.transport import no_token, persistently
from hf_mxfp4.streaming.journal import JOURNAL
from hf_mxfp4.verification import verify_checkpoint

_MAIN = "main"
# Files at the top of a repository that describe weights: those of an earlier checkpoint go if they have no successor.
_OF_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "hf_quant_config.json", "checksums.sha256"),
    *("evaluation.json", "error.json", "error.png"),
)
_AGAIN = "Nothing of it is visible; the same command goes on with what is already uploaded."
_EITHER = "All of it is visible, or nothing; the same command finds out, and goes on with what is already uploaded."


class Pushed(NamedTuple):
    """What was pushed, or would be.

    Attributes:
        repo_id, revision: where to.
        url: of the commit; `None` in a dry run.
        private: whether the repository is.
        files: what the commit holds.
        left_out: files of the folder that are not pushed, and why.
        deleted: files of an earlier checkpoint that the commit removes; not known in a dry run.
        card: text of README.md if it was made here, else `None`.
    """

    repo_id: str
    revision: str
    url: str | None
    private: bool
    files: tuple[File, ...]
    left_out: dict[str, str]
    deleted: tuple[str, ...] = ()
    card: str | None = None

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(file.nbytes for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        files = [file._asdict() for file in self.files]
        return self._asdict() | {"files": files, "deleted": list(self.deleted), "nbytes": self.nbytes}


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    revision: str | None = None,
    commit_message: str | None = None,
    card: bool = True,
    dry_run: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Pushed:
    """Upload a checkpoint to the Hub, in one commit. The folder is read and never written.

    The token is huggingface_hub's (HF_TOKEN, or `hf auth login`). Pickle files, hidden files and temporary ones are
    left out.

    Args:
        folder: of a checkpoint; every tensor of it is decoded and its checksums are compared before anything is sent.
        repo_id: `"user/name"`; made if it is not there.
        private: whether it is made private; an existing repository that is public is refused, so that nothing is
            published by accident.
        revision: a branch, made if it is not there; `main` if not given.
        commit_message: its first line.
        card: add a model card as README.md if the model is quantized, unless the folder or the repository has one
            that was not made here.
        dry_run: check, render and say what would be done, without any request.
        progress: of the check, as `verify_checkpoint` calls it: bytes done, bytes in all, name.

    Raises:
        ValueError: for a damaged folder, links out of it, a repository whose model is in full precision (but on a
            branch), and what the Hub does not accept.
        PermissionError: for a token that is missing, rejected, or may not write there.
        ConnectionError: when the Hub or the network fails again and again. Nothing is visible then, or all of it if
            the Hub failed while it was asked to commit.
    """
    folder = Path(folder)
    _check_name(repo_id)
    if not dry_run and get_token() is None:
        raise no_token(repo_id)
    if (folder / JOURNAL).exists():
        raise ValueError(
            f"{folder} is not finished: its quantization was interrupted. Run the same command again first."
        )
    paths, left_out = list_files(folder)
    _verify(folder, progress)
    quantization = read_checkpoint(folder).quantization
    for name in stale_reports(folder, quantization):
        if paths.pop(name, None) is not None:
            left_out[name] = "was measured on other weights than these"
    contents: dict[str, Path | bytes] = dict(paths)
    text = None
    is_quantized = quantization is not None
    if card and is_quantized and ("README.md" not in paths or is_ours(_text(paths["README.md"]))):
        text = str(render_card(folder, repo_id=repo_id))
        contents["README.md"] = text.encode()
    files = tuple(File.described(path, _size(contents[path])) for path in sorted(contents))
    plan = Pushed(repo_id, revision or _MAIN, None, private, files, left_out, card=text)
    if dry_run:
        return plan
    upload = _Upload(plan, contents, commit_message or f"Upload {folder.resolve().name} (hf_mxfp4)", is_quantized)
    return persistently(upload.attempt, repo_id, lambda: _EITHER if upload.is_committing else _AGAIN)


def _check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is not the name of a repository (user/name): {error}") from error
    if "/" not in repo_id:
        raise ValueError(f"{repo_id!r} is not the name of a repository: write whose it is, too (user/{repo_id}).")


def _verify(folder: Path, progress: Callable[[int, int, str], None] | None) -> None:
    found = verify_checkpoint(folder, progress=progress)
    if not found.ok:
        first = "; ".join(str(finding).removesuffix(".") for finding in found.findings[:5])
        raise ValueError(f"{folder} is damaged and was not pushed: {first}.")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


class _Upload:
    """One push. `attempt` may be called again after it failed at any point, a lost answer to the commit included."""

    def __init__(self, plan: Pushed, contents: dict[str, Path | bytes], message: str, is_quantized: bool):
        self.plan, self.contents, self.message, self.is_quantized = plan, contents, message, is_quantized
        self.api = HfApi()
        self.is_committing = False  # or it is done
        self.hashed: dict[str, CommitOperationAdd] = {}

    def attempt(self) -> Pushed:
        plan, api = self.plan, self.api
        api.create_repo(plan.repo_id, private=plan.private, exist_ok=True)
        if plan.revision != _MAIN and not plan.revision.startswith("refs/"):
            api.create_branch(plan.repo_id, branch=plan.revision, exist_ok=True)
        there = api.model_info(plan.repo_id, revision=plan.revision)
        if plan.private and not there.private:
            raise ValueError(
                f"{plan.repo_id} is public, and private=True asks for a private repository. Push with private=False "
                "(--public), or name another repository."
            )
        names = [sibling.rfilename for sibling in there.siblings or []]
        if self.is_quantized and plan.revision == _MAIN and self._is_full_precision(plan, there.sha, names):
            raise ValueError(
                f"{plan.repo_id} holds a model in full precision, whose weights this would replace. Name another "
                "repository, or a branch of it (revision=, --revision)."
            )
        contents = self.contents
        if plan.card is not None and "README.md" in names and not self._remote_card_is_ours(plan, there.sha):
            contents = {path: content for path, content in contents.items() if path != "README.md"}
            plan = plan._replace(card=None, left_out=plan.left_out | {"README.md": "the repository has one already"})
        stale = tuple(sorted(name for name in names if name not in contents and _describes_weights(name)))
        additions = [self._addition(path, content) for path, content in sorted(contents.items())]
        # A .gitignore in the repository would leave out files without a word.
        api.preupload_lfs_files(
            plan.repo_id, additions, revision=plan.revision, free_memory=False, gitignore_content="# none\n"
        )
        self.is_committing = True
        done = api.create_commit(
            plan.repo_id,
            [*additions, *(CommitOperationDelete(name, is_folder=False) for name in stale)],
            commit_message=self.message,
            revision=plan.revision,
            parent_commit=there.sha,
        )
        stored = {
            file.path: file
            for file in api.list_repo_tree(plan.repo_id, recursive=True, revision=done.oid)
            if isinstance(file, RepoFile)
        }
        files = tuple(_arrived(addition, stored, plan.repo_id) for addition in additions)
        return plan._replace(url=done.commit_url, private=bool(there.private), files=files, deleted=stale)

    def _is_full_precision(self, plan: Pushed, commit: str, names: list[str]) -> bool:
        patterns = ("*.safetensors", *PICKLES)
        if "config.json" not in names or not any(fnmatchcase(name, each) for name in names for each in patterns):
            return False
        try:
            config = read_json(Path(self.api.hf_hub_download(plan.repo_id, "config.json", revision=commit)))
        except ValueError as error:
            raise ValueError(
                f"{plan.repo_id} holds a config.json that is damaged, so what this would replace is not known. Name "
                "another repository or a branch of it (revision=, --revision), or remove that file there."
            ) from error
        says = config.get("quantization_config") or config.get("compression_config")
        return not says and "hf_quant_config.json" not in names

    def _remote_card_is_ours(self, plan: Pushed, commit: str) -> bool:
        return is_ours(_text(Path(self.api.hf_hub_download(plan.repo_id, "README.md", revision=commit))))

    def _addition(self, path: str, content: Path | bytes) -> CommitOperationAdd:
        """A fresh one in each attempt, as what is known of the repository changes; the file is hashed once."""
        if path not in self.hashed:
            self.hashed[path] = CommitOperationAdd(path, content)
        return copy.copy(self.hashed[path])


def _describes_weights(name: str) -> bool:
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in _OF_WEIGHTS)


def _arrived(addition: CommitOperationAdd, stored: dict[str, RepoFile], repo_id: str) -> File:
    """What the Hub holds of a file, after comparing it with what was sent."""
    path, size = addition.path_in_repo, addition.upload_info.size
    found = stored.get(path)
    if found is not None and found.lfs is not None:
        same = found.lfs.sha256 == addition.upload_info.sha256.hex()
    elif found is not None:
        with addition.as_file() as file:
            content = file.read()
        same = found.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    else:
        same = False
    if not same:
        raise ValueError(
            f"{repo_id}: {path} arrived otherwise than it is in the folder, which must not be written to while it is "
            "pushed. Push again."
        )
    return File(path, size, found.lfs is not None)
