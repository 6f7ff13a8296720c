# SPDX-License-Identifier: Apache-2.0
"""One run of `rl_ablation.py`: LoRA and GRPO on a causal LM, quantized as an arm says, measured on the way.

The task is the demo's arithmetic in a spelling that the model never saw (a space before the problem): of these it
solves few at first, though it solves most in the spelling it knows. Rewards are exact matches.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import timing
from ablation_measures import Batch, accuracy, compare_gradients, copy_adapter, is_right, weight_errors
from demo_data import held_out_problems, sample_problem
from hf_mxfp4 import FP4Config
from hf_mxfp4.evaluation import bits_per_weight
from hf_mxfp4.integrations.trl import AdaptiveQuantizationNoise

PROBES = (0, 1, 5)  # steps after which gradients and weights are looked at, and the last one
NEWLINE = "\n"


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        title: in tables.
        config: arguments of `FP4Config`; `None` for bf16.
        noise: whether rollouts have AQN, with its default schedule.
    """

    title: str
    config: dict | None
    noise: bool = False

    def __str__(self) -> str:
        words = ["bf16" if self.config is None else " ".join(f"{k}={v}" for k, v in self.config.items())]
        return " + ".join(words + ["AQN 1e-2 to 1e-4"] * self.noise)


_NAIVE = {"format": "mxfp4", "scale_rule": "amax"}
_MACRO, _OUTLIERS = {"macro_block": "static"}, {"outlier_fallback": 0.005}
_SEARCHED = {"format": "mxfp4", "scale_rule": "soar", "macro_block": "search"}
ARMS = {
    "bf16": Arm("bf16", None),
    "naive": Arm("MXFP4 amax", _NAIVE),
    "macro": Arm("+ macro-blocks", _NAIVE | _MACRO),
    "outliers": Arm("+ outliers", _NAIVE | _OUTLIERS),
    "aqn": Arm("+ AQN", _NAIVE, noise=True),
    "all": Arm("all three", _NAIVE | _MACRO | _OUTLIERS, noise=True),
    "nvfp4": Arm("NVFP4 soar", {"format": "nvfp4", "scale_rule": "soar"}),
    # Beyond the ablation, not among the default arms: all three on the best MXFP4 there is.
    "searched": Arm("all three, searched", _SEARCHED | _OUTLIERS, noise=True),
}


@dataclass(frozen=True)
class Settings:
    """What all runs of a grid share.

    Attributes:
        model: folder or id of a causal LM.
        prefix: put before each problem.
        steps: optimizer steps, each on `prompts` times `generations` fresh completions of at most `new_tokens`.
        learning_rate, rank: of the LoRA adapters, on all linear layers; constant rate, alpha is twice the rank.
        problems: held out, for the accuracy, which is measured every `every` steps.
        device: "cpu" or "cuda".
    """

    model: str = str(Path(__file__).resolve().parent / "demo_lm")
    prefix: str = " "
    steps: int = 60
    prompts: int = 16
    generations: int = 8
    new_tokens: int = 6
    learning_rate: float = 5e-4
    rank: int = 16
    problems: int = 512
    every: int = 10
    device: str = "cpu"


def run(arm: str, seed: int, settings: Settings) -> dict:
    """Train one arm from one seed.

    Returns:
        `dict`: of JSON: `curves`, one list for each name with one value for each step; `evaluations`; `probes`;
        `merged_accuracy`, at the end with the adapter merged.
    """
    started, cpu = time.perf_counter(), time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    (newline,) = tokenizer(NEWLINE, add_special_tokens=False)["input_ids"]
    twin = make_policy(settings, None, [tokenizer.eos_token_id, newline], seed)
    policy = make_policy(settings, ARMS[arm].config, [tokenizer.eos_token_id, newline], seed)
    copy_adapter(twin, policy)
    recorder = Recorder(policy, twin, tokenizer, settings, seed)
    noise = AdaptiveQuantizationNoise(seed=seed) if ARMS[arm].noise else None
    rng = random.Random(seed)
    problems = [sample_problem(rng) for _ in range(settings.steps * settings.prompts)]
    columns = {"prompt": [settings.prefix + p.prompt for p in problems], "answer": [p.answer for p in problems]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=right_answers,
            args=_arguments(settings, seed, folder),
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            callbacks=[recorder] if noise is None else [recorder, noise],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    names = {"reward": "reward", "entropy": "entropy", "gradient_norm": "grad_norm"}
    names |= {"sigma": "aqn/sigma", "norms_changed": "aqn/changed"}
    return {
        "arm": arm,
        "seed": seed,
        "settings": dataclasses.asdict(settings) | {"model": Path(settings.model).name},
        "config": str(ARMS[arm]),
        "bits_per_weight": 16.0 if ARMS[arm].config is None else bits_per_weight(policy),
        "curves": {name: [round(float(row.get(key, 0.0)), 6) for row in rows] for name, key in names.items()},
        "evaluations": recorder.evaluations,
        "probes": recorder.probes,
        "merged_accuracy": recorder.merged_accuracy(),
        "seconds": round(time.perf_counter() - started, 1),
        "seconds_measuring": round(recorder.seconds, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "machine": machine(settings.device),
    }


def right_answers(completions: list[str], answer: list[str], **_) -> list[float]:
    return [float(is_right(*pair)) for pair in zip(completions, answer, strict=True)]


def make_policy(settings: Settings, config: dict | None, ends: list[int], seed: int):
    """The model with a fresh adapter, which starts at zero."""
    quantization = {} if config is None else {"quantization_config": FP4Config(**config)}
    options = {"dtype": torch.bfloat16, "device_map": settings.device}
    model = AutoModelForCausalLM.from_pretrained(settings.model, **options, **quantization)
    model.generation_config.eos_token_id = ends  # TRL reads it: for generation, and for what it trains on
    torch.manual_seed(seed)
    lora = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear")
    return get_peft_model(model, lora)


def _arguments(settings: Settings, seed: int, folder: str) -> GRPOConfig:
    """Plain GRPO: no reference model, one update for each batch of completions, prompts in the data's order."""
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    # transformers 5.23 has another name for it, and warns of the one that 5.17 knows.
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    return GRPOConfig(
        output_dir=folder,
        seed=seed,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.prompts * settings.generations,
        num_generations=settings.generations,
        max_completion_length=settings.new_tokens,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=settings.device == "cpu",
        bf16=False,  # the weights are; the adapters stay in float32
        **{name: False},
    )


class Recorder(TrainerCallback):
    """Measures a policy while it trains, and leaves no trace in the training."""

    def __init__(self, policy, twin, tokenizer, settings: Settings, seed: int):
        self.policy, self.twin, self.tokenizer, self.settings = policy, twin, tokenizer, settings
        self.evaluations, self.probes, self.seconds = [], [], 0.0
        held_out = held_out_problems(settings.problems)
        self.prompts, self.answers = [settings.prefix + p.prompt for p in held_out], [p.answer for p in held_out]
        rng = random.Random(f"probe {seed}")
        self.batch, self.other = (self._sample(rng, seed) for _ in range(2))
        with torch.no_grad():
            self.reference = self.batch.log_probabilities(twin)

    def _sample(self, rng: random.Random, seed: int) -> Batch:
        """Training problems that the bf16 model answers before training.

        Only those of its groups that have right and wrong answers tell something.
        """
        problems = [sample_problem(rng) for _ in range(self.settings.prompts)]
        prompts = [self.settings.prefix + problem.prompt for problem in problems]
        sizes = (self.settings.generations, self.settings.new_tokens, rng.getrandbits(31))

        def reward(index: int, text: str) -> float:
            return float(is_right(text, problems[index].answer))

        return Batch(self.twin, self.tokenizer, prompts, reward, *sizes)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def on_train_begin(self, args, state, control, **_):
        self._measure(state)

    def on_step_end(self, args, state, control, **_):
        self._measure(state)

    def _measure(self, state) -> None:
        step, last = state.global_step, state.global_step == state.max_steps
        with self._clock():
            if step % self.settings.every == 0 or last:
                self.evaluations.append(self._evaluate(step))
            if step in PROBES or last:
                self.probes.append(self._probe(step))

    def accuracy(self) -> float:
        return accuracy(self.policy, self.tokenizer, self.prompts, self.answers, self.settings.new_tokens)

    def merged_accuracy(self) -> float:
        """With the adapter merged into the base, by its own rule; it is taken out again."""
        self.policy.merge_adapter()
        try:
            return self.accuracy()
        finally:
            self.policy.unmerge_adapter()

    def _evaluate(self, step: int) -> dict:
        return {"step": step, "accuracy": self.accuracy(), **self.batch.divergence(self.policy, self.reference)}

    def _probe(self, step: int) -> dict:
        copy_adapter(self.policy, self.twin)
        expected = self.batch.gradients(self.twin)
        return {
            "step": step,
            "gradient": compare_gradients(self.batch.gradients(self.policy), expected),
            # How far a gradient is from that of other problems: what an error of it is to be held against.
            "other_problems": compare_gradients(self.other.gradients(self.twin), expected),
            "weights": weight_errors(self.policy, self.twin),
        }


def machine(device: str) -> dict:
    """Where a run ran."""
    name = timing.processor(torch.device(device)) + ("" if device == "cuda" else f", {os.cpu_count()} CPUs")
    names = ("hf-mxfp4", "transformers", "peft", "trl")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {each: importlib.metadata.version(each) for each in names}
    return {"device": name, "threads": torch.get_num_threads(), "versions": versions}


def write(arm: str, seed: int, settings: Settings, path: Path) -> bool:
    """Run, and write the result to `path`, or if that fails the traceback beside it. Whether it went well."""
    failure = path.with_suffix(".error.txt")
    try:
        result = run(arm, seed, settings)
    except Exception:
        failure.write_text(traceback.format_exc(), encoding="utf-8")
        return False
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1), encoding="utf-8")
    part.replace(path)
    failure.unlink(missing_ok=True)
    return True


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    task = json.loads(sys.argv[1])
    sys.exit(not write(task["arm"], task["seed"], Settings(**task["settings"]), Path(task["path"])))
