# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 quantize`, and the same as a command of optimum."""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoConfig

from hf_mxfp4.checkpoint_files import read_checkpoint
from hf_mxfp4.cli import recipe
from hf_mxfp4.cli.common import (
    MODEL_FILES,
    Json,
    Source,
    TrustRemoteCode,
    byte_bar,
    check_choice,
    device_of,
    local_folder,
    print_json,
    quiet_libraries,
    say,
)
from hf_mxfp4.cli.errors import Command
from hf_mxfp4.config import FP4Config
from hf_mxfp4.inspection import inspect_checkpoint
from hf_mxfp4.output_files import PARTIAL, check_output, copy_others, write_checksums
from hf_mxfp4.streaming import Progress, quantize_checkpoint
from hf_mxfp4.streaming.run import MADE_ANEW, Job, Run, read_source
from hf_mxfp4.streaming.skeleton import model_class

DTYPES = ("auto", "bfloat16", "float16", "float32")


def quantize(
    source: Source,
    output: Annotated[Path, typer.Argument(help="A new folder, or that of an interrupted run.", show_default=False)],
    format: recipe.Format = None,
    rule: recipe.Rule = None,
    search: recipe.Search = None,
    global_scale: recipe.GlobalScale = None,
    iterations: recipe.Iterations = None,
    macro_block: recipe.MacroBlock = None,
    outliers: recipe.Outliers = None,
    error_feedback: recipe.ErrorFeedback = False,
    channel_weights: recipe.ChannelWeights = False,
    calibration: recipe.Calibration = None,
    calibration_samples: recipe.Samples = None,
    calibration_length: recipe.Length = None,
    calibration_seed: recipe.Seed = None,
    calibration_dir: recipe.Dir = None,
    calibration_device: recipe.Device = None,
    skip: recipe.Skip = None,
    override: recipe.Override = None,
    activation: recipe.Activation = None,
    on_unsupported: recipe.OnUnsupported = None,
    layout: recipe.Layout = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"Of what is not packed: one of {', '.join(DTYPES)}.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of a file.")] = "5GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be written.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Quantize a model to FP4, file by file; it need not fit into memory.

    An interrupted run goes on where it was when it is started again, and
    several machines may share one output folder. --outliers, --error-feedback,
    --channel-weights and --dtype need the whole model in memory. Examples:

    hf-mxfp4 quantize Qwen/Qwen3-0.6B ./qwen3-nvfp4
    hf-mxfp4 quantize ./Qwen3-8B ./out --format mxfp4 --macro-block search
    hf-mxfp4 quantize ./Qwen3-8B ./out --workers 8 --override 'down_proj$=mxfp4'
    hf-mxfp4 quantize ./Qwen3-8B ./out --error-feedback --calibration-device cuda
    """
    config = recipe.config_of({name: value for name, value in locals().items() if name in recipe.OPTIONS})
    check_choice("--dtype", dtype, DTYPES)
    device = device_of(device)
    if calibration_device is not None:
        device_of(calibration_device, "--calibration-device")
    whole = _why_whole(config, dtype)
    if whole and workers > 1:
        raise typer.BadParameter(f"{whole}: this is done by one process.", param_hint="--workers")
    folder = local_folder(source, *MODEL_FILES)
    if dry_run:
        found = _plan(folder, output, config, max_shard_size, trust_remote_code)
        print_json(found) if as_json else _print_plan(found)
        return
    rest = {"device": device, "max_shard_size": max_shard_size}
    if whole:
        say(f"{whole}: this takes the whole model in memory")
        _whole(folder, output, config, dtype=dtype, trust=trust_remote_code, **rest)
    else:
        _stream(folder, output, config, workers=workers, trust_remote_code=trust_remote_code, **rest)
    _report(output, as_json)


def _why_whole(config: FP4Config, dtype: str) -> str:
    names = {"--outliers": config.outlier_fallback, "--error-feedback": config.error_feedback}
    names |= {"--channel-weights": config.channel_weights, "--dtype": dtype != "auto"}
    return ", ".join(name for name, given in names.items() if given)


def _stream(folder: Path, output: Path, config: FP4Config, **options: Any) -> None:
    with byte_bar("quantizing") as tell, quiet_libraries():

        def show(progress: Progress) -> None:
            tell(progress.done_bytes, progress.total_bytes, f"file {progress.shards_done}/{progress.shards_total}")

        try:
            done = quantize_checkpoint(folder, output, config, **options, progress=show)
        except KeyboardInterrupt:
            say(f"stopped; the same command goes on with what is in {output}")
            raise
    if done.resumed:
        say(f"{done.resumed} of {len(done.shards)} files were there from an earlier run")
    for name in done.ignored:
        say(f"left out, since the model does not use it: {name}")


def _whole(
    folder: Path, output: Path, config: FP4Config, *, dtype: str, device: str, max_shard_size: str, trust: bool
) -> None:
    """Load the model, quantized, and save it: in a folder beside the output, which gets its name when it is done."""
    checkpoint = read_source(folder)
    # Half of 16 bits is more than any recipe needs.
    output = check_output(folder, output, sum(tensor.nbytes for tensor in checkpoint.tensors.values()) // 2)
    cls = model_class(AutoConfig.from_pretrained(folder, trust_remote_code=trust), folder, trust)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with quiet_libraries():
            place = None if device == "cpu" else device
            model = cls.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map=place)
            model.save_pretrained(temporary, max_shard_size=max_shard_size)
        copy_others(folder, temporary, MADE_ANEW)
        write_checksums(temporary)
        os.replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _plan(folder: Path, output: Path, config: FP4Config, max_shard_size: str, trust: bool) -> dict[str, Any]:
    """What would be written, by headers alone, as JSON. Outliers, which the weights decide on, are not counted."""
    parts = ("outlier_fallback", "error_feedback", "channel_weights")
    plain = FP4Config(**{name: getattr(config, name) for name in config.given if not name.startswith(_CALIBRATED)})
    job = Job(str(folder), str(output), plain, "cpu", max_shard_size, trust)
    with quiet_libraries():
        run = Run(job, read_source(folder))
        done = run.summary(0)
    check_output(folder, output, done.output_bytes, force=run.journal.exists)
    return done._asdict() | {"output": str(output), "without": [name for name in parts if getattr(config, name)]}


_CALIBRATED = ("outlier_fallback", "error_feedback", "channel_weights", "calibration")


def _print_plan(found: dict[str, Any]) -> None:
    for name, why in found["kept"].items():
        say(f"stays in full precision: {name}: {why}")
    for name in found["ignored"]:
        say(f"left out, since the model does not use it: {name}")
    sizes = f"{found['source_bytes']:,} bytes become {found['output_bytes']:,}"
    beside = f", and what {', '.join(found['without'])} adds" if "outlier_fallback" in found["without"] else ""
    print(f"{found['output']}: {found['packed']} modules packed, {sizes} in {len(found['shards'])} files{beside}")


def _report(output: Path, as_json: bool) -> None:
    """What was written, read from its headers."""
    found = inspect_checkpoint(read_checkpoint(output)).to_dict()
    if as_json:
        print_json({"output": str(output)} | found)
        return
    packed = ", ".join(f"{count} modules in {format}" for format, count in found["modules"].items())
    bits = f"{found['bits_per_weight']:.3f} bits a weight"
    print(f"{output}: {packed}, {bits}, {found['nbytes']:,} bytes in {found['files']} files")


def as_export(words: list[str]) -> None:
    """`optimum-cli export fp4`: `quantize` with the model as -m, as optimum's other exports have it."""
    signature = inspect.signature(quantize, eval_str=True)
    model = Annotated[str, typer.Option("--model", "-m", help="A folder, or a model on the Hub.", show_default=False)]
    parameters = dict(signature.parameters)
    parameters["source"] = parameters["source"].replace(annotation=model)

    @functools.wraps(quantize)
    def export(**options: Any) -> None:
        quantize(**options)

    export.__signature__ = signature.replace(parameters=list(parameters.values()))
    export.__doc__ = (quantize.__doc__ or "").replace("hf-mxfp4 quantize ", "optimum-cli export fp4 -m ")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=Command)(export)
    app(words, prog_name="optimum-cli export fp4")
