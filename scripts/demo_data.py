# SPDX-License-Identifier: Apache-2.0
"""What the demo checkpoints are trained and measured on: the running Python's library source, and arithmetic.

Scripts and tests import this module as a sibling (`scripts/` is on `sys.path` when a script of it runs).
"""

import hashlib
import math
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers

# Never trained on. All are pure Python and present in Python 3.10 to 3.14.
HELD_OUT_MODULES = (
    "calendar.py",
    "csv.py",
    "difflib.py",
    "fnmatch.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "json/decoder.py",
    "json/encoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "textwrap.py",
)
SKIPPED_FOLDERS = frozenset(
    "test tests idlelib site-packages dist-packages __pycache__ lib2to3 encodings pydoc_data".split()
)
# Generated tables; `_sysconfigdata*` also holds paths of the machine that built the interpreter.
SKIPPED_PREFIXES = ("_sysconfigdata", "html/entities.py")

VOCAB_SIZE = 2048
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
HELD_OUT_SHARE = 16  # one arithmetic problem in 16 is held out


def training_files() -> list[Path]:
    """Library files to train on, sorted by path relative to the library folder."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS.isdisjoint(name.split("/")) and not name.startswith((*SKIPPED_PREFIXES, *HELD_OUT_MODULES)):
            found.append(path)
    return found


def held_out_files() -> list[Path]:
    """Library files never trained on, in the order of `HELD_OUT_MODULES`."""
    root = Path(sysconfig.get_path("stdlib"))
    return [root / name for name in HELD_OUT_MODULES]


def read_texts(paths: list[Path]) -> list[str]:
    """Source text of each file; the few that are not UTF-8 are left out, as are empty ones."""
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.append(text)
    return texts


def train_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE that splits numbers into single digits and puts bos before a text."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def token_stream(tokenizer, texts: list[str]) -> torch.Tensor:
    """One int64 vector `[T]`: every text with the tokenizer's bos before it and eos behind it."""
    ids = [token for text in texts for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    return torch.tensor(ids)


def held_out_stream(tokenizer) -> torch.Tensor:
    """Token stream `[T]` of the held-out modules of the running Python."""
    return token_stream(tokenizer, read_texts(held_out_files()))


def windows(stream: torch.Tensor, seq: int, batch: int) -> Iterator[torch.Tensor]:
    """Cut a stream `[T]` into int64 batches `[<= batch, seq + 1]` that overlap by one token; the tail is dropped."""
    rows = stream.unfold(0, seq + 1, seq)
    yield from rows.split(batch)


@torch.no_grad()
def perplexity(model, stream: torch.Tensor, seq: int = 256, batch: int = 16) -> float:
    """Per-token perplexity of a causal LM on a stream `[T]`, in windows of `seq` predicted tokens."""
    total, count = 0.0, 0
    for rows in windows(stream, seq, batch):
        rows = rows.to(model.device)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        targets = rows[:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
        count += targets.numel()
    return math.exp(total / count)


def unigram_perplexity(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Perplexity of the held-out tokens under the add-one smoothed token frequencies of the training text."""
    counts = torch.bincount(train, minlength=VOCAB_SIZE).double() + 1
    return math.exp(-(counts / counts.sum()).log()[held_out].mean().item())


class Problem(NamedTuple):
    """A two-operand problem: `Problem(37, "+", 58)` asks `37+58=` and expects `95`."""

    a: int
    op: str
    b: int

    @property
    def prompt(self) -> str:
        """The question, up to and with the equals sign."""
        return f"{self.a}{self.op}{self.b}="

    @property
    def answer(self) -> str:
        """The digits that follow the equals sign (a newline ends them)."""
        return str({"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.op])

    @property
    def held_out(self) -> bool:
        """Whether the problem is kept out of training; `a+b` and `b+a` always share a side."""
        a, b = (self.a, self.b) if self.op == "-" else sorted((self.a, self.b))
        return hashlib.sha256(f"{a}{self.op}{b}".encode()).digest()[0] % HELD_OUT_SHARE == 0


def sample_problem(rng: random.Random, held_out: bool = False) -> Problem:
    """Draw a problem from one side of the split: `+` and `-` (never below zero) to 3 digits, `*` to 2 digits."""
    while True:
        op = rng.choice("+-*")
        a, b = (rng.randrange(10 ** rng.randint(1, 2 if op == "*" else 3)) for _ in range(2))
        problem = Problem(max(a, b), op, min(a, b)) if op == "-" else Problem(a, op, b)
        if problem.held_out == held_out:
            return problem


def held_out_problems(count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct held-out problems, the same for the same seed."""
    rng = random.Random(seed)
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[sample_problem(rng, held_out=True)] = None
    return list(problems)


def arithmetic_document(rng: random.Random, max_lines: int = 4) -> str:
    """One to `max_lines` solved training problems, one a line."""
    problems = (sample_problem(rng) for _ in range(rng.randint(1, max_lines)))
    return "".join(f"{problem.prompt}{problem.answer}\n" for problem in problems)


@torch.no_grad()
def arithmetic_accuracy(model, tokenizer, count: int = 500) -> dict[str, float]:
    """Greedy exact-match share on held-out problems, over all (`all`) and for each operator."""
    problems = held_out_problems(count)
    inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True, padding_side="left")
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    hits = [text.split("\n")[0] == problem.answer for text, problem in zip(texts, problems, strict=True)]
    share = {"all": sum(hits) / count}
    for op in "+-*":
        of_op = [hit for hit, problem in zip(hits, problems, strict=True) if problem.op == op]
        share[op] = round(sum(of_op) / len(of_op), 4)
    return share
