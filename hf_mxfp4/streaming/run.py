# SPDX-License-Identifier: Apache-2.0
"""`quantize_checkpoint`: checks, workers, and what is written once all files are there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from hf_mxfp4 import __version__
from hf_mxfp4.checkpoint_files import Checkpoint, read_checkpoint
from hf_mxfp4.checkpoint_writer import total_size, write_index
from hf_mxfp4.config import FP4Config
from hf_mxfp4.output_files import (
    PARTIAL,
    check_output,
    copy_others,
    other_files,
    sha256,
    write_checksums,
    write_file,
)
from hf_mxfp4.streaming import processes
from hf_mxfp4.streaming.journal import FINISHED, JOURNAL, Done, Journal
from hf_mxfp4.streaming.plan import StreamPlan, make_plan
from hf_mxfp4.streaming.progress import Progress, Report
from hf_mxfp4.streaming.skeleton import Skeleton, build
from hf_mxfp4.streaming.source import Source
from hf_mxfp4.streaming.work import Worker

POLL = 0.5  # seconds between two looks at what other processes have done
HEADROOM = 1 << 24  # bytes beside tensors: headers, index, tokenizer
MADE_ANEW = ("generation_config.json",)  # by save_pretrained; see `output_files.other_files`


class Summary(NamedTuple):
    """What `quantize_checkpoint` did.

    Attributes:
        output: the folder.
        shards: names of its safetensors files.
        source_bytes, output_bytes: sizes of all tensors before and after.
        packed: how many linears and fused-expert modules are packed.
        kept: names of linears in full precision, and why.
        ignored: stored tensors that the model does not use, and which were left out.
        resumed: files that were finished before this run began.
    """

    output: Path
    shards: tuple[str, ...]
    source_bytes: int
    output_bytes: int
    packed: int
    kept: dict[str, str]
    ignored: tuple[str, ...]
    resumed: int


def quantize_checkpoint(
    source: str | Path,
    output: str | Path,
    config: FP4Config,
    *,
    workers: int = 1,
    device: str = "cpu",
    max_shard_size: str | int = "5GB",
    trust_remote_code: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Quantize a checkpoint folder without loading the model: memory does not grow with the model.

    The files are those of `from_pretrained(source, quantization_config=config)` and `save_pretrained(output,
    max_shard_size=max_shard_size)`, byte for byte, and with them the tokenizer and `checksums.sha256`. A run that was
    interrupted, be it by `kill -9`, goes on when it is started again, and several processes (on one machine, or on
    several that share a file system) may be started with one output: they divide the files among them.

    Args:
        source (`str` or `Path`): folder with safetensors files in full precision and a config.json.
        output (`str` or `Path`): a new or empty folder, or one that such a run has left.
        config (`FP4Config`): as for `from_pretrained`; without `outlier_fallback`, `error_feedback`,
            `channel_weights` and `dequantize`.
        workers (`int`): processes. Memory is needed for each.
        device (`str`): where weights are quantized: `"cpu"`, `"cuda"`, `"cuda:1"`.
        max_shard_size (`str` or `int`): most bytes of a file.
        trust_remote_code (`bool`): run the code in `source` that defines the model.
        progress (`Callable[[Progress], None]`, *optional*): called after each unit of work.

    Returns:
        `Summary`.

    Raises:
        ValueError: for what cannot be done, before anything is written; for a source that changes meanwhile.
        OSError: if the disk is full or fails. The same command then goes on where it stopped.
    """
    _check_arguments(config, workers, device)
    job = Job(str(source), str(output), config, device, max_shard_size, trust_remote_code)
    checkpoint = read_source(source)
    run = Run(job, checkpoint)
    if not run.begin():
        return run.summary(len(run.sizes))
    before = len(run.finished())
    if workers > 1 and len(run.plan.shards) > 1:
        processes.work(job, run, min(workers, len(run.plan.shards)), progress)
    else:
        run.work(Report(run.sizes, run.finished, progress))
    run.finish()
    return run.summary(before)


def _check_arguments(config: FP4Config, workers: int, device: str) -> None:
    if not isinstance(config, FP4Config):
        raise TypeError(f"config is a {type(config).__name__}; pass an FP4Config.")
    for name in ("outlier_fallback", "error_feedback", "channel_weights"):
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)!r} needs the whole model at once. Load the model with "
                "from_pretrained(source, quantization_config=config) and save_pretrained it, or leave this out."
            )
    if config.dequantize:
        raise ValueError("dequantize=True gives a model in full precision. Leave it out.")
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"workers={workers!r}; allowed: an int, at least 1.")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'device={device!r}; allowed: "cpu", "cuda", "cuda:1" and so on.') from error
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f'device={device!r}; allowed: "cpu", "cuda", "cuda:1" and so on.')
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
        raise ValueError(f'device={device!r}, and torch sees {found}. Use device="cpu".')


def read_source(source: str | Path) -> Checkpoint:
    """A checkpoint in full precision."""
    checkpoint = read_checkpoint(source)
    if not checkpoint.config:
        raise ValueError(f"{source} has no config.json, which says what model it is. Download the checkpoint again.")
    if checkpoint.quantization is not None:
        method = checkpoint.quantization.get("quant_method")
        raise ValueError(
            f"{source} is quantized already (quant_method {method!r}). Quantize the original checkpoint in "
            "full precision."
        )
    if not checkpoint.tensors:
        raise ValueError(f"{source} holds no tensors. Download the checkpoint again.")
    return checkpoint


class Job(NamedTuple):
    """The arguments, as they travel to worker processes."""

    source: str
    output: str
    config: FP4Config
    device: str
    max_shard_size: str | int
    trust_remote_code: bool


class Run:
    """One process's view of a job."""

    def __init__(self, job: Job, checkpoint: Checkpoint):
        self.job, self.checkpoint, self.output = job, checkpoint, Path(job.output)
        self.source = Source(checkpoint)
        self.skeleton: Skeleton = build(self.source, job.config, job.trust_remote_code)
        self.plan: StreamPlan = make_plan(self.skeleton, self.source, job.max_shard_size)
        self.journal = Journal(self.output.resolve())
        self.sizes = {shard.name: self.plan.nbytes(shard.name) for shard in self.plan.shards}

    def begin(self) -> bool:
        """Check the output folder, and open its journal. Whether anything is left to be done."""
        manifest = self._manifest()
        if self.journal.is_complete(manifest):
            return False
        needed = sum(shard.nbytes for shard in self.plan.shards) + HEADROOM
        needed += sum(path.stat().st_size for path in other_files(self.checkpoint.folder, MADE_ANEW))
        begun = self.journal.exists
        if begun:
            self.resume(manifest)
            needed -= sum(shard.nbytes for shard in self.plan.shards if shard.name in self.finished())
        try:
            check_output(self.job.source, self.job.output, needed, force=begun, own=(JOURNAL, FINISHED))
        except ValueError:
            if begun or not self.journal.exists:  # else another process has begun just now
                raise
        if not begun:
            with contextlib.suppress(FileNotFoundError):  # another process has just finished all
                self.journal.open(manifest)
        return True

    def resume(self, manifest: dict[str, Any] | None = None) -> None:
        """Check that this is the job that was begun. Should another process just finish it, there is nothing to do."""
        with contextlib.suppress(FileNotFoundError):
            self.journal.check(manifest or self._manifest())

    def _manifest(self) -> dict[str, Any]:
        """What must be the same for two runs to be one job."""
        headers = sorted((n, t.dtype, list(t.shape), t.file) for n, t in self.checkpoint.tensors.items())
        config = {key: _readable(value) for key, value in self.job.config.to_dict().items() if key != "stored"}
        files = {name: list(stamp) for name, stamp in self.source.stamps.items()}
        plan = [[s.name, [[n, str(t.dtype), list(t.shape)] for n, t in s.tensors.items()]] for s in self.plan.shards]
        return {
            "version": 1,
            "config": config,
            "source": {"files": files, "tensors": _digest(headers), "config": _digest(self.checkpoint.config)},
            "max_shard_size": str(self.job.max_shard_size),
            "plan": _digest(plan),
            "versions": {"hf_mxfp4": __version__, "transformers": transformers.__version__},
        }

    def finished(self) -> dict[str, Done]:
        """Records of finished files, by name."""
        records = {shard.name: self.journal.done(shard.name) for shard in self.plan.shards}
        return {name: record for name, record in records.items() if record is not None}

    def work(self, report: Report) -> None:
        """Make files until all are there, whoever makes them."""
        worker = Worker(self.skeleton, self.source, self.plan, self.job.device)
        try:
            with self._going_on():
                while waiting := [shard for shard in self.plan.shards if self.journal.done(shard.name) is None]:
                    if self._is_over():
                        return
                    if not any([self._make(worker, shard, report) for shard in waiting]):
                        report.look()
                        time.sleep(POLL)
        finally:
            self.source.close()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Errors of the file system say what to do. Files may be gone once another process has finished all."""
        try:
            yield
        except FileNotFoundError:
            if not self._is_over():
                raise
        except OSError as error:
            place = error.filename or self.output
            message = f"{error.strerror or error}: {place}. The same command goes on where this one stopped"
            raise OSError(error.errno, message) from error

    def _is_over(self) -> bool:
        """Whether another process has finished the whole job."""
        return not self.journal.exists and (self.output / "config.json").exists()

    def _make(self, worker: Worker, shard, report: Report) -> bool:
        lock = self.journal.claim(shard.name)
        if lock is None:
            return False
        with lock:
            if self.journal.done(shard.name) is not None:
                return False
            self.journal.clear_partial(shard.name)
            temporary = f".{shard.name}.{secrets.token_hex(4)}{PARTIAL}"
            try:
                worker.write(self.output, shard, temporary, report.advance)
            except FileNotFoundError:
                if lock.held:
                    raise
                return False  # this process was thought to be gone, and its file was taken away
            path = self.output / shard.name
            self.journal.record(shard.name, Done(path.stat().st_size, sha256(path)))
        report.shard(shard.name)
        return True

    # --- when all files are there ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write everything else, config.json last, and remove the journal. One process does, the others wait."""
        while not self._is_over():
            with self._going_on():
                lock = self.journal.claim("finish")
                if lock is None:
                    time.sleep(POLL)
                    continue
                with lock:
                    try:
                        if self.journal.exists:
                            self._write_others()
                            self.journal.remove()
                    except FileNotFoundError:
                        if lock.held:
                            raise  # else this process was thought to be gone, and another one finishes

    def _write_others(self) -> None:
        for path in self.output.glob(f".*{PARTIAL}"):
            path.unlink(missing_ok=True)
        copy_others(self.checkpoint.folder, self.output, MADE_ANEW)
        shards, model = self.plan.shards, self.skeleton.model
        write_index(self.output, shards, model.num_parameters(), total_size(self.plan.tensors))
        with tempfile.TemporaryDirectory() as folder:
            model.state_dict = dict  # save_pretrained then writes all but the weights
            model.save_pretrained(folder)
            del model.state_dict
            made = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
        config = made.pop("config.json")
        for name, content in made.items():
            write_file(self.output / name, content)
        known = {name: record.sha256 for name, record in self.finished().items()}
        known["config.json"] = hashlib.sha256(config).hexdigest()  # not there yet
        write_checksums(self.output, known)
        write_file(self.output / "config.json", config)

    def summary(self, before: int) -> Summary:
        plan = self.skeleton.plan
        return Summary(
            self.output,
            tuple(shard.name for shard in self.plan.shards),
            sum(tensor.nbytes for tensor in self.checkpoint.tensors.values()),
            sum(shard.nbytes for shard in self.plan.shards),
            len(plan.linears) + len(plan.experts),
            dict(plan.kept),
            tuple(self.skeleton.ignored),
            before,
        )


def _readable(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
