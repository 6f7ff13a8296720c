# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint is loaded, by whom: the examples of a model card."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.checkpoints import SIBLINGS, WRITTEN
from hf_mxfp4.hub.markdown import fenced, one_line, quoted
from hf_mxfp4.inspection import Inspection


class Task(NamedTuple):
    """A head of transformers' models: its pipeline on the Hub, its auto class, what prepares its input."""

    pipeline: str
    auto_class: str
    processor: str = "AutoTokenizer"


# By the ending of an architecture's name.
_TASKS = {
    "ForCausalLM": Task("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": Task("text-generation", "AutoModelForCausalLM"),
    "ForMaskedLM": Task("fill-mask", "AutoModelForMaskedLM"),
    "ForSequenceClassification": Task("text-classification", "AutoModelForSequenceClassification"),
    "ForTokenClassification": Task("token-classification", "AutoModelForTokenClassification"),
    "ForQuestionAnswering": Task("question-answering", "AutoModelForQuestionAnswering"),
    "ForImageClassification": Task("image-classification", "AutoModelForImageClassification", "AutoImageProcessor"),
    "ForSpeechSeq2Seq": Task("automatic-speech-recognition", "AutoModelForSpeechSeq2Seq", "AutoProcessor"),
    "WhisperForConditionalGeneration": Task(
        "automatic-speech-recognition", "AutoModelForSpeechSeq2Seq", "AutoProcessor"
    ),
}
_SEES = Task("image-text-to-text", "AutoModelForImageTextToText", "AutoProcessor")


def task_of(config: dict[str, Any]) -> Task | None:
    """What a model is for, by its architecture; `None` if that does not say."""
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if name.endswith("ForConditionalGeneration") and "vision_config" in config:
        return _SEES
    return next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)


def is_portable(checkpoint: Checkpoint) -> bool:
    """Whether it is in compressed-tensors' layout, which vLLM and transformers read."""
    return (checkpoint.quantization or {}).get("quant_method") == WRITTEN["portable"].quant_method


def has_experts(checkpoint: Checkpoint) -> bool:
    """Whether packed weights of experts are among its tensors."""
    return any(".experts." in name and tensor.dtype == "U8" for name, tensor in checkpoint.tensors.items())


def mixed_siblings(checkpoint: Checkpoint) -> str:
    """Linears that vLLM makes one layer of and that are not all in one format here, which it refuses; else nothing."""
    kinds = {}
    for name, tensor in checkpoint.tensors.items():
        module, _, last = name.rpartition(".")
        if last in ("weight", "weight_scale"):
            kinds[module] = tensor.dtype if last == "weight_scale" else "plain"
    parents = {module.rpartition(".")[0] for module in kinds}
    for group in SIBLINGS:
        for parent in parents:
            if len({kinds[name] for leaf in group if (name := f"{parent}.{leaf}") in kinds}) > 1:
                return ", ".join(group[:-1]) + f" and {group[-1]}"
    return ""


def usage(checkpoint: Checkpoint, inspection: Inspection, name: str) -> dict[str, str]:
    """Blocks of code: `ours`, and where this layout works there, `vllm` and `alone` (else empty)."""
    task = task_of(checkpoint.config) or Task("", "AutoModel")
    classes = f"from transformers import {task.auto_class}, {task.processor}"
    load = f"{task.auto_class}.from_pretrained({quoted(name)}"
    prepare = f"tokenizer = {task.processor}.from_pretrained({quoted(name)})"
    if task.processor != "AutoTokenizer":
        prepare = f"processor = {task.processor}.from_pretrained({quoted(name)})"
    if inspection.recipe is not None:
        ours = f"import hf_mxfp4  # registers the format with transformers\n{classes}\n\nmodel = {load}"
    else:
        ours = f"import hf_mxfp4\nfrom transformers import {task.processor}\n\nmodel = hf_mxfp4.load({quoted(name)}"
    ours += f', device_map="auto")\n{prepare}'
    if task.pipeline == "text-generation":
        ours += '\ninputs = tokenizer("The sun", return_tensors="pt").to(model.device)\n'
        ours += "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))"
    served = is_portable(checkpoint) and task.pipeline in ("text-generation", "image-text-to-text")
    served = served and not mixed_siblings(checkpoint)
    alone = is_portable(checkpoint) and not has_experts(checkpoint)
    return {
        "ours": fenced(ours, "python"),
        "vllm": fenced(f"vllm serve {shlex.quote(one_line(name))}", "sh") if served else "",
        "alone": fenced(f'{classes}\n\nmodel = {load}, device_map="auto")\n{prepare}', "python") if alone else "",
    }
