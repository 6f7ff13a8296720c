# SPDX-License-Identifier: Apache-2.0
"""LoRA fine-tuning on a packed base: any causal model, any text; here on the demo model in minutes.

    python scripts/sft_lora.py --config scripts/configs/sft_demo.yaml
    python scripts/sft_lora.py --config scripts/configs/sft_demo.yaml --format bf16 --output_dir runs/sft_bf16
    accelerate launch scripts/sft_lora.py --config scripts/configs/sft_qwen2.5_3b.yaml --data my.jsonl
    accelerate launch --multi_gpu --num_processes 2 scripts/sft_lora.py --config ... --use_cpu true  # DDP on CPUs

The arguments are those below and trl's SFTConfig, on the command line or in the YAML file. Stopped anywhere, the same
command with --resume goes on from the last checkpoint. OUTPUT_DIR gets the adapter, `sft.json` (held-out loss before
and after, versions) and, with --merge, `merged/`, a full model.
"""

import dataclasses
import datetime
import json
import os
import platform
import random
import sys
from pathlib import Path

import datasets
import peft
import torch
import transformers
import trl
from accelerate import PartialState
from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

import training_memory
from hf_mxfp4 import FP4Config, load
from hf_mxfp4.cli.common import for_records
from hf_mxfp4.integrations.peft import PackedBaseCheck, StopOnNaN, prepare_fp4_for_training
from hf_mxfp4.integrations.peft.merging import merge_to_bf16

DEMO_MODEL = Path(__file__).parent / "demo_lm"
FORMATS = ("nvfp4", "mxfp4", "bf16")
MERGES = ("none", "fp4", "bf16")
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass
class ModelArguments:
    """What is trained: a base, how it is packed, and LoRA."""

    model: str = dataclasses.field(metadata={"help": "folder, name on the Hub, or `demo` (scripts/demo_lm)"})
    format: str | None = dataclasses.field(
        default=None,
        metadata={"help": "nvfp4 (if not given), mxfp4, or bf16 (not packed); leave it out for a packed checkpoint"},
    )
    fp4: dict | str | None = dataclasses.field(default=None, metadata={"help": "further fields of FP4Config (JSON)"})
    dtype: str = dataclasses.field(default="bfloat16", metadata={"help": "of what is not packed"})
    lora_r: int = dataclasses.field(default=16, metadata={"help": "rank"})
    lora_alpha: float = dataclasses.field(default=32, metadata={"help": "scaling is alpha / r"})
    lora_dropout: float = 0.0
    lora_targets: list[str] = dataclasses.field(
        default_factory=lambda: ["all-linear"], metadata={"help": "module names, or all-linear"}
    )
    lora_parameters: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "expert projections, such as mlp.experts.gate_up_proj (target_parameters)"}
    )
    lora: dict | str | None = dataclasses.field(default=None, metadata={"help": "further fields of LoraConfig (JSON)"})

    def __post_init__(self):
        if self.format not in (None, *FORMATS):
            raise ValueError(f"format={self.format!r}; allowed: {', '.join(FORMATS)}, or none given.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}; allowed: {', '.join(DTYPES)}.")
        self.fp4, self.lora = as_dict("fp4", self.fp4), as_dict("lora", self.lora)
        if self.format == "bf16" and self.fp4:
            raise ValueError("fp4 has fields of FP4Config, and format=bf16 packs nothing; leave one of them out.")
        if self.model == "demo":
            self.model = str(DEMO_MODEL)

    def base(self) -> transformers.PreTrainedModel:
        """The base on this process's device, packed as asked for."""
        device = PartialState().device
        where = {} if device.type == "cpu" else {"device_map": {"": device}}
        stored = getattr(transformers.AutoConfig.from_pretrained(self.model), "quantization_config", None)
        if stored is not None:
            if self.format is not None or self.fp4:
                raise ValueError(
                    f"{self.model} is quantized already; leave format and fp4 out to train on it as it is."
                )
            return load(self.model, dtype=getattr(torch, self.dtype), **where)
        config = None if self.format == "bf16" else FP4Config(**{"format": self.format or "nvfp4"} | self.fp4)
        auto = transformers.AutoModelForCausalLM
        return auto.from_pretrained(self.model, dtype=getattr(torch, self.dtype), quantization_config=config, **where)

    def lora_config(self) -> peft.LoraConfig:
        targets = self.lora_targets[0] if self.lora_targets == ["all-linear"] else self.lora_targets
        given = {"r": self.lora_r, "lora_alpha": self.lora_alpha, "lora_dropout": self.lora_dropout}
        given |= {"target_modules": targets, "target_parameters": self.lora_parameters, "task_type": "CAUSAL_LM"}
        return peft.LoraConfig(**given | self.lora)


@dataclasses.dataclass
class RunArguments:
    """What it is trained on, and what becomes of it."""

    data: str = dataclasses.field(
        default="demo", metadata={"help": "jsonl, text file, data set on the Hub, or `demo` (torch's own source)"}
    )
    eval_data: str | None = dataclasses.field(default=None, metadata={"help": "held-out data, given like data"})
    held_out: float = dataclasses.field(default=0.05, metadata={"help": "share of rows held out without eval_data"})
    max_documents: int = dataclasses.field(default=0, metadata={"help": "take so many documents only; 0: all"})
    resume: bool = dataclasses.field(default=False, metadata={"help": "go on from the last checkpoint"})
    merge: str = dataclasses.field(default="none", metadata={"help": "also write a full model: fp4 or bf16"})

    def __post_init__(self):
        if self.merge not in MERGES:
            raise ValueError(f"merge={self.merge!r}; allowed: {', '.join(MERGES)}.")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out}; allowed: a share of rows between 0 and 1.")

    def splits(self) -> tuple[datasets.Dataset, datasets.Dataset]:
        """Rows to train on and rows held out."""
        rows = documents(self.data)
        if self.max_documents:
            rows = rows.select(range(min(self.max_documents, len(rows))))
        if self.eval_data is not None:
            return rows, documents(self.eval_data)
        if len(rows) < 2:
            raise ValueError(f"{self.data} has {len(rows)} rows: nothing can be held out of it. Give eval_data too.")
        parts = rows.train_test_split(max(1, round(self.held_out * len(rows))), seed=0)
        return parts["train"], parts["test"]


def as_dict(name: str, value: dict | str | None) -> dict:
    """A mapping of YAML, or JSON of the command line."""
    try:
        value = json.loads(value) if isinstance(value, str) else value or {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={value!r} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f'{name}={value!r} is not a mapping, such as {{"scale_rule": "amax"}}.')
    return value


def documents(source: str) -> datasets.Dataset:
    """Rows of a data set: with `text`, or what trl understands (`messages`, `prompt` and `completion`)."""
    path = Path(source)
    if source == "demo":
        return demo_documents()
    if path.is_file() and not path.stat().st_size:
        raise ValueError(f"{source} is empty.")
    if path.suffix in (".json", ".jsonl"):
        rows = datasets.load_dataset("json", data_files=str(path), split="train")
    elif path.is_file():  # one document a paragraph
        rows = datasets.load_dataset("text", data_files=str(path), sample_by="paragraph", split="train")
        rows = rows.filter(lambda row: bool(row["text"].strip()))
    else:
        rows = datasets.load_dataset(source, split="train")
    if not len(rows):
        raise ValueError(f"{source} has no rows.")
    return rows


def demo_documents() -> datasets.Dataset:
    """Source files of the installed torch, which the demo model has never seen, in a fixed random order."""
    root = Path(torch.__file__).parent
    files = sorted(path for path in root.rglob("*.py") if 2_000 < path.stat().st_size < 40_000)
    random.Random(0).shuffle(files)
    return datasets.Dataset.from_dict({"text": [path.read_text(encoding="utf-8") for path in files]})


def last_checkpoint(output: Path) -> str | None:
    """The last checkpoint that was written to its end: the Trainer writes trainer_state.json last."""
    found = {int(file.parent.name[11:]): file.parent for file in output.glob("checkpoint-[0-9]*/trainer_state.json")}
    return str(found[max(found)]) if found else None


def checkpoint_to_resume(output: Path, resume: bool) -> str | None:
    """The last checkpoint, if this run is to go on from it; an error if there is none, or one that is not wanted."""
    last = last_checkpoint(output)
    if resume and last is None:
        raise ValueError(f"{output} has no checkpoint to resume from; leave --resume out to start.")
    if last is not None and not resume:
        raise ValueError(
            f"{output} has {Path(last).name} of an earlier run: add --resume, or give another output_dir."
        )
    return last


def train_to_the_end(trainer: transformers.Trainer, checkpoint: str | None) -> TrainOutput | None:
    """Train, from a checkpoint if one is given. A run that has all of its steps is loaded only, and gives `None`: the
    Trainer would take one more."""
    state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json") if checkpoint else TrainerState()
    if not 0 < trainer.args.max_steps <= state.global_step:
        return trainer.train(resume_from_checkpoint=checkpoint)
    PackedBaseCheck().on_train_begin(trainer.args, state, trainer.control, model=trainer.model)
    peft.set_peft_model_state_dict(trainer.model, peft.load_peft_weights(checkpoint, device="cpu"))
    trainer.state = state
    return None


def save_json(path: Path, record: dict) -> None:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(partial, path)


def save_merged(model, tokenizer, how: str, folder: Path) -> None:
    """The full model: packed anew by each layer's own rule, or in bfloat16."""
    full = merge_to_bf16(model) if how == "bf16" else model.merge_and_unload()
    full.config.use_cache = True
    full.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def describe(model, given: ModelArguments, options: RunArguments, config: trl.SFTConfig, arguments: list[str]) -> dict:
    """What sft.json says of a run before it has begun."""
    return {
        "command": for_records(["python", "scripts/sft_lora.py", *arguments]),
        "model": Path(given.model).name if Path(given.model).is_dir() else given.model,
        "format": given.format or "nvfp4",
        "fp4": given.fp4,
        "data": options.data,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "max_steps": config.max_steps,
        "seed": config.seed,
        "device": PartialState().device.type,
        "threads": torch.get_num_threads(),
        "processes": PartialState().num_processes,
        "python": platform.python_version(),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft, trl)},
    }


def train(given: ModelArguments, options: RunArguments, config: trl.SFTConfig, arguments: list[str]) -> dict:
    """Train, measure before and after, save; returns what sft.json holds."""
    output = Path(config.output_dir)
    checkpoint = checkpoint_to_resume(output, options.resume)
    PartialState(cpu=config.use_cpu)  # once and for all
    train_rows, held_out = options.splits()
    model = given.base()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    if given.format != "bf16":
        prepare_fp4_for_training(model, config.gradient_checkpointing, config.gradient_checkpointing_kwargs)
    transformers.set_seed(config.seed)  # adapters are drawn by it
    trainer = trl.SFTTrainer(
        model,
        config,
        train_dataset=train_rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=given.lora_config(),
        callbacks=[PackedBaseCheck(), StopOnNaN()],
    )
    work = training_memory.Work(
        batch=config.per_device_train_batch_size,
        sequence=config.max_length,
        optimizer=config.optim,
        gradient_checkpointing=config.gradient_checkpointing,
        autocast=torch.bfloat16 if config.bf16 else None,
        fused_head=config.loss_type == "nll",
    )
    parts = training_memory.estimate(trainer.model, work)
    main = PartialState().is_main_process
    if main:
        print(training_memory.describe(parts))
    record_file = output / "sft.json"
    if checkpoint is not None and record_file.is_file():
        record = json.loads(record_file.read_text())
    else:
        record = describe(trainer.model, given, options, config, arguments) | {"memory_estimate": parts}
        record["held_out_loss_before"] = trainer.evaluate()["eval_loss"]
        if main:
            save_json(record_file, record)
    result = train_to_the_end(trainer, checkpoint)
    record["held_out_loss_after"] = trainer.evaluate()["eval_loss"]
    if result is not None:
        record |= {"train_loss": result.training_loss, "train_seconds": round(result.metrics["train_runtime"], 1)}
    record |= {"steps": trainer.state.global_step, "date": datetime.date.today().isoformat()}
    trainer.save_model(str(output))
    if main:
        save_json(record_file, record)
        if options.merge != "none":
            save_merged(trainer.accelerator.unwrap_model(trainer.model), tokenizer, options.merge, output / "merged")
    return record


def main(arguments: list[str]) -> int:
    parser = trl.TrlParser([ModelArguments, RunArguments, trl.SFTConfig], description=__doc__.split("\n")[0])
    try:
        record = train(*parser.parse_args_and_config(arguments), arguments)
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if PartialState().is_main_process:
        print(f"held-out loss {record['held_out_loss_before']:.4f} -> {record['held_out_loss_after']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
