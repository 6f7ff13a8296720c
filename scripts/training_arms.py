# SPDX-License-Identifier: Apache-2.0
"""What scripts/benchmark_training.py compares: how each arm loads and adapts a model, a training step, and its bytes.

    python scripts/training_arms.py '{"arm": "nvfp4", "folder": "scripts/demo_lm", ...}'

is one arm in a process of its own: it prints what it measured as a line of JSON, then the seconds of one more step for
each line `step` it reads.
"""

import ctypes
import gc
import importlib
import importlib.util
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.initialization import no_init_weights

DEMO = Path(__file__).parent / "demo_lm"
RANK = 16
FORWARD = "forward of a training step"  # a name in the profile


class Arm(NamedTuple):
    """One way to train: what is kept of the model's weights, and what of them learns."""

    label: str
    config: dict | None = None  # fields of FP4Config, for a packed base
    library: str | None = None  # what must be installed
    prepare: bool = False  # by PEFT's prepare_model_for_kbit_training
    lora: bool = True  # or all weights learn


ARMS = {
    "bf16": Arm("bf16, LoRA"),
    "nvfp4": Arm("NVFP4, LoRA", {"format": "nvfp4"}),
    "mxfp4": Arm("MXFP4, LoRA", {"format": "mxfp4"}),
    "macro": Arm("MXFP4 with macro-blocks, LoRA", {"format": "mxfp4", "macro_block": "static"}),
    "nf4": Arm("NF4, LoRA", library="bitsandbytes"),
    "qlora": Arm("NF4 as PEFT prepares it, LoRA", library="bitsandbytes", prepare=True),
    "full": Arm("bf16, all weights", lora=False),
}
BASE = "bf16"


def why_absent(arm: Arm) -> str | None:
    """Why an arm cannot run here, `None` if it can."""
    if arm.library is None or importlib.util.find_spec(arm.library) is not None:
        return None
    return f"{arm.library} is not installed"


# --- the model -------------------------------------------------------------------------------------------------------


def random_model(folder: Path, **changes) -> None:
    """Write a model of Qwen2.5-0.5B's shape (but for `changes`) with random weights."""
    config = transformers.Qwen2Config(
        **{
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        | changes
    )
    with no_init_weights():
        model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1)
    model.tie_weights()
    model.save_pretrained(folder)


def load(arm: Arm, folder: str, device: torch.device, checkpointing: bool) -> torch.nn.Module:
    """The model of an arm, ready to learn. `folder` holds packed weights if the arm has a packed base."""
    options = {}
    if arm.library == "bitsandbytes":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": device}, **options
    )
    how = {"use_reentrant": False}
    if arm.prepare:
        model = prepare_model_for_kbit_training(model, checkpointing, how)
    elif checkpointing:
        model.gradient_checkpointing_enable(how)
    if arm.lora:
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    return model.train()


class Training:
    """Steps of AdamW on random tokens `[batch, length]`, under bf16 autocast, as Trainer does with `bf16=True`."""

    def __init__(self, model: torch.nn.Module, batch: int, length: int):
        self.model, self.device = model, next(model.parameters()).device
        self.learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.learning, lr=1e-4)
        vocabulary = model.config.vocab_size
        self.ids = torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
        self.ids = self.ids.to(self.device)
        self.after_forward = 0  # bytes allocated, CUDA only

    def step(self) -> float:
        """One step; its loss."""
        with record_function(FORWARD), torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        if self.device.type == "cuda":
            self.after_forward = torch.cuda.memory_allocated(self.device)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def seconds(self) -> float:
        """Seconds of a step; on a CPU with one thread those it computed, whatever else the machine did."""
        clock = time.process_time if self.device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        gc.collect()
        start = clock()
        self.step()  # which reads the loss, so a GPU is done
        return clock() - start


# --- bytes -----------------------------------------------------------------------------------------------------------


def storage_bytes(tensors) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def weight_bytes(training: Training) -> dict[str, int]:
    """Bytes between steps: of weights that stay as they are, of those that learn, of the optimizer's states."""
    model, learning = training.model, training.learning
    states = [value for state in training.optimizer.state.values() for value in state.values()]
    own = storage_bytes(learning)
    # bitsandbytes keeps its scales in no parameter or buffer
    hidden = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    return {
        "frozen": storage_bytes([*model.parameters(), *model.buffers(), *_quant_states(hidden)]) - own,
        "learning": own,
        "optimizer": storage_bytes([state for state in states if isinstance(state, torch.Tensor)]),
    }


def _quant_states(states):
    """Tensors of bitsandbytes' `QuantState`s, nested ones too."""
    for state in states:
        if state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            yield from _quant_states([getattr(state, "state2", None)])


def step_bytes(training: Training) -> dict[str, int]:
    """Bytes a step allocates on top of what is there between steps: the peak, and what waits after the forward for
    the backward. As torch's allocators count them; a library's own workspaces (oneDNN's on CPUs) are not seen."""
    if training.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(training.device)
        before = torch.cuda.memory_allocated(training.device)
        training.step()
        peak = torch.cuda.max_memory_allocated(training.device)
        return {"peak": peak - before, "kept": training.after_forward - before}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        training.step()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    end = next(event.start_ns() + event.duration_ns() for event in events if event.name() == FORWARD)
    now = peak = kept = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
            kept = now if event.start_ns() <= end else kept
    return {"peak": peak, "kept": kept}


def resident(field: str) -> int | None:
    """VmRSS, or VmHWM (its peak since `reset_peak`), of this process in bytes; `None` where Linux does not say it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def reset_peak() -> bool:
    """Give back what was freed, and let VmHWM begin anew; whether that worked."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return False
    return True


def measure(arm: Arm, folder: str, device: torch.device, checkpointing: bool, batch: int, length: int):
    """Load an arm and take two steps. Returns its `Training`, and what was measured."""
    for library in [arm.library] if arm.library else ["hf_mxfp4"] if arm.config else []:
        importlib.import_module(library)  # hf_mxfp4 registers itself; other arms run without it
    imported = resident("VmRSS")
    start = time.perf_counter()
    training = Training(load(arm, folder, device, checkpointing), batch, length)
    loaded = time.perf_counter() - start
    loss = training.step()  # and the optimizer has its states
    found = {"loss": loss, "load_seconds": loaded, **weight_bytes(training)}
    began = reset_peak() if device.type == "cpu" else False
    found |= step_bytes(training)
    found["resident"] = resident("VmHWM") - imported if began else None
    frozen = [p for p in training.model.parameters() if not p.requires_grad]
    found["gradients_of_frozen"] = sum(p.grad is not None for p in frozen)
    return training, found


def main(text: str) -> None:
    """Measure, then a step for each line that is read."""
    options = json.loads(text)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    torch.manual_seed(0)
    device = torch.device(options["device"])
    with nullcontext() if device.type == "cpu" else torch.cuda.device(device):
        training, found = measure(
            ARMS[options["arm"]],
            options["folder"],
            device,
            options["checkpointing"],
            options["batch"],
            options["length"],
        )
        print("\n" + json.dumps(found), flush=True)
        for _ in sys.stdin:
            print("\n" + json.dumps({"seconds": training.seconds()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
