# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning on a packed model: LoRA and TRL's GRPO, with verifiable rewards and quantization noise.

    python scripts/grpo.py --config scripts/configs/grpo_demo.yaml
    accelerate launch scripts/grpo.py --config scripts/configs/grpo_qwen2.5_3b.yaml --learning_rate 5e-6
    python scripts/grpo.py --config my.yaml --reward my_rewards.py:tests_pass --data problems.jsonl --dry_run

Arguments are the fields of `Arguments` below and those of `trl.GRPOConfig`, in the YAML or on the command line. A run
that was stopped goes on with --resume from the last whole checkpoint; bit for bit as if it had not been stopped, where
that is of the first epoch and the next step begins with a rollout (TRL stores none, and draws later epochs anew).
The adapter and grpo.json (held-out rewards before and after) are written to --output_dir.
"""

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm
from trl import GRPOConfig, GRPOTrainer, TrlParser

import demo_data
import rewards
import sft_lora
import training_memory
from hf_mxfp4.integrations.peft import PackedBaseCheck, StopOnNaN
from hf_mxfp4.integrations.trl import AdaptiveQuantizationNoise, check_grpo_config

RESULT = "grpo.json"


@dataclass
class Arguments(sft_lora.ModelArguments):
    """What to train, as scripts/sft_lora.py has it, and on what; the rest is `trl.GRPOConfig`."""

    model: str = field(default="demo", metadata={"help": "folder or name on the Hub, packed or not; demo"})
    noise: bool = field(default=True, metadata={"help": "adaptive quantization noise (AQN) in rollouts"})
    sigma_start: float = field(default=1e-2, metadata={"help": "AQN: of its first stage"})
    sigma_end: float = field(default=1e-4, metadata={"help": "AQN: of its last stage"})
    noise_stages: int = field(default=10, metadata={"help": "AQN: stages, the first without noise"})
    noise_seed: int = field(default=0, metadata={"help": "AQN: seed"})
    reward: list[str] = field(
        default_factory=lambda: ["exact_match"],
        metadata={"help": "exact_match, gsm8k, stated, package.module:function or file.py:function; their sum"},
    )
    data: str = field(default="arithmetic", metadata={"help": "arithmetic (generated), a .jsonl, or a data set"})
    data_config: str | None = field(default=None, metadata={"help": "configuration of a data set, as main"})
    train_split: str = field(default="train", metadata={"help": "split of a data set"})
    held_out_split: str = field(default="test", metadata={"help": "split to measure on before and after"})
    held_out_data: str | None = field(default=None, metadata={"help": ".jsonl to measure on, beside a .jsonl in data"})
    prompt_column: str = field(default="prompt", metadata={"help": "column of questions"})
    answer_column: str = field(default="answer", metadata={"help": "column of answers, which rewards get"})
    template: str = field(default="{prompt}", metadata={"help": "text around a question, which stands for {prompt}"})
    problems: int = field(default=2000, metadata={"help": "arithmetic: how many to train on"})
    held_out: int = field(default=200, metadata={"help": "at most so many rows to measure on; 0: do not"})
    system_prompt: str | None = field(default=None, metadata={"help": "for models with a chat template"})
    stop: str | None = field(default=None, metadata={"help": "a further token that ends a completion, as a newline"})
    resume: bool = field(default=False, metadata={"help": "go on from the last checkpoint in output_dir"})
    dry_run: bool = field(default=False, metadata={"help": "load, print the memory estimate, and stop"})

    def __post_init__(self):
        super().__post_init__()
        if "{prompt}" not in self.template:
            raise ValueError(f"template={self.template!r} does not contain {{prompt}}.")
        for name, least in (("problems", 1), ("held_out", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least {least}.")


class Progress(transformers.TrainerCallback):
    """A bar with reward, entropy and sigma; a line for each log where there is no terminal."""

    SHOWN = {"reward": "reward", "entropy": "entropy", "aqn/sigma": "sigma", "kl": "kl"}

    def on_train_begin(self, args, state, control, **kwargs):
        hidden = not state.is_world_process_zero
        terminal = sys.stderr.isatty()
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=hidden or not terminal)
        self.lines = not hidden and not terminal

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(state.global_step - self.bar.n if not self.bar.disable else 0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {name: float(logs[key]) for key, name in self.SHOWN.items() if logs and logs.get(key) is not None}
        text = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self.bar.set_postfix_str(text)
        if self.lines and shown:
            print(f"step {state.global_step}/{state.max_steps}: {text}", flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def load_model(arguments: Arguments, config: GRPOConfig):
    """Model and tokenizer, told what else ends a completion."""
    model = arguments.base()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    if arguments.stop is not None:
        ids = tokenizer(arguments.stop, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"stop={arguments.stop!r} is {len(ids)} tokens of this model; it must be one.")
        # TRL reads the ends of completions here, both to generate and to mask what follows.
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends if ends is not None else tokenizer.eos_token_id]
        model.generation_config.eos_token_id = [*ends, *ids]
    return model, tokenizer


def load_data(arguments: Arguments, chat: bool) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Training rows and held-out rows, with columns prompt, answer and what else the data has."""
    if arguments.data == "arithmetic":
        rng = random.Random(0)
        drawn = [demo_data.sample_problem(rng) for _ in range(arguments.problems)]
        sides = [drawn, demo_data.held_out_problems(arguments.held_out)]
        sides = [[{"prompt": p.prompt, "answer": p.answer} for p in problems] for problems in sides]
        found = [datasets.Dataset.from_list(rows) if rows else None for rows in sides]
    elif arguments.data.endswith((".jsonl", ".json")):
        files = [arguments.data, arguments.held_out_data]
        missing = [file for file in files if file and not Path(file).is_file()]
        if missing:
            raise ValueError(f"data: there is no file {missing[0]}.")
        found = [file and datasets.load_dataset("json", data_files=file, split="train") for file in files]
    else:
        wanted = [arguments.train_split, arguments.held_out_split if arguments.held_out else None]
        found = [
            split and datasets.load_dataset(arguments.data, arguments.data_config, split=split) for split in wanted
        ]
    train, held_out = (rows and as_prompts(rows, arguments, chat) for rows in found)
    if not train or not len(train):
        raise ValueError(f"data={arguments.data!r} has no rows to train on.")
    if held_out and len(held_out) > arguments.held_out:
        held_out = held_out.select(range(arguments.held_out))
    return train, held_out if arguments.held_out else None


def as_prompts(rows: datasets.Dataset, arguments: Arguments, chat: bool) -> datasets.Dataset:
    names = {arguments.prompt_column: "prompt", arguments.answer_column: "answer"}
    missing = [name for name in names if name not in rows.column_names]
    if missing:
        raise ValueError(
            f"the data has no column {missing[0]!r}; it has {', '.join(rows.column_names)}. Name the right ones with "
            "prompt_column and answer_column."
        )
    for old, new in names.items():
        if old != new:
            rows = rows.rename_column(old, new)
    system = [{"role": "system", "content": arguments.system_prompt}] if arguments.system_prompt else []

    odd = [text for text in rows["prompt"] if not isinstance(text, str)]
    if odd:
        raise ValueError(f"prompt_column={arguments.prompt_column!r} must hold texts; found {odd[0]!r}.")

    def prompt(row):
        text = arguments.template.replace("{prompt}", row["prompt"])
        return {"prompt": [*system, {"role": "user", "content": text}] if chat else text}

    # All rows anew: a mapped column keeps its type, and messages are not text.
    return datasets.Dataset.from_list([row | prompt(row) for row in rows])


def tokenize(tokenizer, prompts: list, config: GRPOConfig):
    """Texts or messages as the trainer tokenizes them, padded on the left."""
    chat = not isinstance(prompts[0], str)
    if chat:
        options = {"tokenize": False, "add_generation_prompt": True} | (config.chat_template_kwargs or {})
        prompts = [tokenizer.apply_chat_template(prompt, **options) for prompt in prompts]
    options = {"return_tensors": "pt", "padding": True, "padding_side": "left", "add_special_tokens": not chat}
    inputs = tokenizer(prompts, **options)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def ended(tokens: torch.Tensor, model) -> list[list[int]]:
    """Ids of completions to the first that ends one, as TRL hands them on."""
    ends = torch.tensor(model.generation_config.eos_token_id, device=tokens.device)
    past = torch.isin(tokens, ends).cumsum(1).roll(1, 1)
    past[:, 0] = 0
    return [row[~over].tolist() for row, over in zip(tokens, past.bool(), strict=True)]


@torch.no_grad()
def held_out_rewards(model, tokenizer, rows: datasets.Dataset, functions: dict, config: GRPOConfig) -> dict:
    """Mean reward of greedy completions, by function; each process takes its share of the rows."""
    rows = rows.select(range(PartialState().process_index, len(rows), PartialState().num_processes))
    training, totals = model.training, {name: [] for name in functions}
    model.eval()
    try:
        size = config.per_device_train_batch_size
        for start in tqdm(range(0, len(rows), size), desc="held-out", leave=False, disable=not sys.stderr.isatty()):
            batch = rows.select(range(start, min(start + size, len(rows)))).to_dict()
            inputs = {k: v.to(model.device) for k, v in tokenize(tokenizer, batch["prompt"], config).items()}
            tokens = model.generate(**inputs, max_new_tokens=config.max_completion_length, do_sample=False)
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
            done = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            prompts = batch.pop("prompt")
            if not isinstance(prompts[0], str):  # messages, as TRL hands them on
                done = [[{"role": "assistant", "content": text}] for text in done]
            columns = {"prompts": prompts, "completions": done, "completion_ids": ended(tokens, model), **batch}
            for name, function in functions.items():
                found = rewards.score(function, **columns)
                totals[name] += [value for value in found if value is not None]
    finally:
        model.train(training)
    totals = {name: gather_object(values) for name, values in totals.items()}
    return {name: sum(values) / len(values) if values else None for name, values in totals.items()}


def last_checkpoint(arguments: Arguments, output: Path) -> str | None:
    """Where to go on from; an error if that is not what was asked for."""
    found = sft_lora.last_checkpoint(output)
    if arguments.resume and found is None:
        raise ValueError(f"--resume: there is no checkpoint in {output}. Leave it out to start.")
    if found and not arguments.resume and not arguments.dry_run:
        raise ValueError(f"{output} has checkpoints of an earlier run: add --resume to go on, or name another folder.")
    return found if arguments.resume else None


def memory(trainer: GRPOTrainer, config: GRPOConfig, prompt: int) -> dict[str, int]:
    rows = config.per_device_train_batch_size
    work = training_memory.Work(
        batch=rows,
        sequence=prompt + config.max_completion_length,
        optimizer=str(getattr(config.optim, "value", config.optim)),
        gradient_checkpointing=config.gradient_checkpointing,
        autocast=torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None,
        fused_head=True,
        generation_rows=rows * config.steps_per_generation,
    )
    return training_memory.estimate(trainer.model, work)


def run(argv: list[str]) -> dict:
    arguments, config = TrlParser((Arguments, GRPOConfig)).parse_args_and_config(argv)
    PartialState(cpu=config.use_cpu)  # once and for all
    output = Path(config.output_dir)
    checkpoint = last_checkpoint(arguments, output)
    functions = {name: rewards.checked(rewards.load(name), name) for name in arguments.reward}
    aqn = None
    if arguments.noise:
        schedule = (arguments.sigma_start, arguments.sigma_end, arguments.noise_stages, arguments.noise_seed)
        aqn = AdaptiveQuantizationNoise(*schedule)
    model, tokenizer = load_model(arguments, config)
    check_grpo_config(config, model)
    train, held_out = load_data(arguments, chat=tokenizer.chat_template is not None)
    trainer = GRPOTrainer(
        model,
        list(functions.values()),
        config,
        train_dataset=train,
        processing_class=tokenizer,
        peft_config=arguments.lora_config(),
        callbacks=[PackedBaseCheck(), StopOnNaN(), *([aqn] if aqn else []), Progress()],
    )
    if aqn:  # first, so that trackers are told its values
        trainer.callback_handler.callbacks.insert(0, trainer.pop_callback(aqn))
    for callback in (transformers.trainer_callback.PrinterCallback, transformers.trainer_callback.ProgressCallback):
        trainer.remove_callback(callback)
    main = trainer.is_world_process_zero()
    longest = tokenize(tokenizer, train[:256]["prompt"], config)["input_ids"].shape[1]
    if main:
        print(training_memory.describe(memory(trainer, config, longest)), flush=True)
    if arguments.dry_run:
        return {}
    result = {}
    if main and checkpoint and (output / RESULT).is_file():
        result = json.loads((output / RESULT).read_text())
    result = broadcast_object_list([result])[0]
    if held_out and "before" not in result:
        result["before"] = held_out_rewards(trainer.model, tokenizer, held_out, functions, config)
        if main:
            sft_lora.save_json(output / RESULT, result)
            print("held-out rewards before:", result["before"], flush=True)
    try:
        sft_lora.train_to_the_end(trainer, checkpoint)
    except BaseException:
        kept = sft_lora.last_checkpoint(output)
        print(f"stopped; {f'{kept} stays: go on with --resume' if kept else 'no checkpoint yet'}.", file=sys.stderr)
        raise
    finally:
        if aqn:
            aqn.detach()
    trainer.save_model()
    if held_out:
        result["after"] = held_out_rewards(trainer.model, tokenizer, held_out, functions, config)
    shown = ("step", "reward", "entropy", "kl", "aqn/sigma", "aqn/changed")
    logged = [row for row in trainer.state.log_history if "reward" in row]
    result["steps"] = [{name: row[name] for name in shown if name in row} for row in logged]
    if main:
        sft_lora.save_json(output / RESULT, result)
        if held_out:
            print("held-out rewards after:", result["after"], flush=True)
    return result


def main(argv: list[str]) -> int:
    try:
        run(argv)
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
