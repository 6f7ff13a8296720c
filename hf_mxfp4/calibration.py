# SPDX-License-Identifier: Apache-2.0
"""Runs a model over calibration tokens and hands what its modules read to whoever packs them.

`walk` goes block by block: run a block, pack it, run it again to see what the packed one gives to the next (as GPTQ,
arXiv 2210.17323). Only this block needs to be on the compute device. `input_statistics` takes one pass over the whole
model and packs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_mxfp4.calibration_chain import WAY_OUT, Chain, device_of, evaluating, find_chains, on_device
from hf_mxfp4.calibration_files import Block, Job, Statistics, fingerprint, load_statistics, save_statistics
from hf_mxfp4.calibration_inputs import input_names, input_statistics, listening, statistics_of
from hf_mxfp4.calibration_tokens import calibration_tokens
from hf_mxfp4.error_feedback import Hessian

_ENOUGH = 0.125  # tokens for each input channel; a Hessian of fewer is not used, see `damping`
_LEAST = 32  # tokens; a diagonal of fewer is not used


class Known(NamedTuple):
    """What a statistics file knows of one input; stands for a `Hessian` where only the diagonal is needed."""

    diagonal: torch.Tensor
    tokens: int


def damping(hessian: Hessian) -> float:
    """What to add to a Hessian's diagonal, as a fraction of its mean: more, the fewer tokens it was made of.

    A fixed fraction fits the noise of few tokens. Squared error on tokens held out, relative to that without error
    feedback, the worst of three experts of scripts/demo_lm_moe (K 128 and 256), at n tokens for each channel:

        n                 1/16   1/4    1     4     16
        0.1               1.41  1.61  1.31  0.99  0.91
        max(0.1, 0.8/n)   1.01  1.02  1.00  0.97  0.91
    """
    return max(0.1, 0.8 * len(hessian.diagonal) / hessian.tokens)


class Packer(Protocol):
    """Packs modules and puts packed ones into a model. The modules are on the compute device meanwhile."""

    def linears(self, names: tuple[str, ...], hessian: Hessian | Known | None) -> dict[str, torch.Tensor]:
        """Pack one linear, or siblings under one tensor scale as one matrix; nothing is put into the model yet.

        Args:
            names: of the linears, all of which read the same.
            hessian: of what they read; `None` if nothing or too little is known: pack without.

        Returns:
            The tensors of the packed modules by full name, such that `place` needs nothing else.
        """

    def experts(self, name: str, hessians: dict[str, list[Hessian | Known | None]]) -> dict[str, torch.Tensor]:
        """The same for fused experts: for each projection one per expert, or `{}` if nothing is known."""

    def place(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put packed modules with these tensors into the model; the tensors may come from an earlier run."""


class Report(NamedTuple):
    """What calibration saw and did.

    Attributes:
        statistics: tokens, diagonals and counts.
        notes: why modules (or some of their experts) were packed without what calibration should have told, by name.
    """

    statistics: Statistics
    notes: dict[str, str]

    def summary(self) -> list[str]:
        """Lines to log, `notes` apart."""
        (samples, length), counts = self.statistics.tokens.shape, self.statistics.counts
        lines = [f"calibrated {len(counts)} inputs on {samples} x {length} tokens ({self.statistics.source})"]
        experts = torch.cat([count for count in counts.values() if count.ndim] or [torch.empty(0)])
        if len(experts):
            lines.append(f"an expert saw {int(experts.min())} to {int(experts.max())} tokens")
        return lines


def calibrate(
    model: nn.Module, plan, config, packer: Packer, tokenizer: Callable | None = None, device=None
) -> Report:
    """Pack all modules of a plan as a config wants it, with error feedback or channel weights.

    Args:
        model, plan, packer, device: as for `walk`.
        config: an `FP4Config` with `error_feedback` or `channel_weights`. In its `calibration_dir` the tokens and
            statistics are kept, and with `error_feedback` the finished blocks.
        tokenizer (*optional*): returns the model's tokenizer; called only if it is needed.

    Raises:
        ValueError: as `calibration_tokens` and `walk`.
    """
    source, seed = config.calibration, config.calibration_seed
    label = source if isinstance(source, str) else f"{len(source)} texts"
    folder = None if config.calibration_dir is None else Path(config.calibration_dir)
    file = None if folder is None else folder / "calibration.safetensors"
    wanted = (config.calibration_samples, config.calibration_length)
    known = None
    if label.endswith(".safetensors"):
        known = load_statistics(label, model)
    elif label == "self" and file is not None and file.is_file():
        found = load_statistics(file, model)
        known = found if (found.source, found.seed, tuple(found.tokens.shape)) == (label, seed, wanted) else None
    if known is None:
        text = label not in ("self", "random") and tokenizer is not None
        tokens = calibration_tokens(model, source, tokenizer() if text else None, *wanted, seed)
        known = Statistics(tokens, {}, {}, fingerprint(model), label, seed)
        if file is not None:
            folder.mkdir(parents=True, exist_ok=True)
            save_statistics(file, known)  # a run that is stopped need not sample them again
    if config.error_feedback:
        report = walk(model, plan, packer, known, device=device, work=folder, config=config.to_dict())
    else:
        if not known.diagonals.keys() >= {*input_names(model, plan.linears, plan.experts)}:
            known = input_statistics(model, plan, known, device=device)
        report = Report(known, _pack_weighted(model, plan, packer, known))
    if file is not None:
        save_statistics(file, report.statistics)
    return report


def walk(
    model: nn.Module,
    plan,
    packer: Packer,
    known: Statistics,
    *,
    device: torch.device | str | None = None,
    work: str | Path | None = None,
    config: dict | None = None,
    sequential: bool = False,
) -> Report:
    """Pack the modules of a plan, each with the Hessian of what it reads once all blocks before it are packed.

    Args:
        model: a transformers model in full precision, changed in place by `packer`. After an error, finished blocks
            stay packed; all else is as it was.
        plan: with `linears`, `experts`, `groups` and `units()` as `packing.Plan`.
        packer: see `Packer`.
        known: its tokens are used.
        device (*optional*): where each block is brought to be run and packed; if not given, it stays where it is.
        work (*optional*): folder for finished blocks; a run that was stopped goes on from there to the same result.
        config (*optional*): what else the packed tensors depend on, as JSON; a `work` folder of another is refused.
        sequential: run a block anew for each tensor that is read in it, with all before that packed (GPTQ's "true
            sequential"), instead of once.

    Raises:
        ValueError: for models whose blocks cannot be run one by one, and a `work` folder of another run.
    """
    targets = [*plan.linears, *plan.experts]
    chains = find_chains(model, targets)
    device = _checked(model, chains, device)
    blocks = [block for members in chains.values() for block in members]
    job = None
    if work is not None:
        digest = hashlib.sha256(known.tokens.contiguous().numpy().tobytes()).hexdigest()
        parts = {"config": config or {}, "sequential": sequential, "dtype": str(model.dtype), "tokens": digest}
        job = Job(work, {"model": known.fingerprint} | parts)
    report, reached = Report(known._replace(diagonals={}, counts={}), {}), []
    with evaluating(model), tqdm(total=len(blocks), desc="Error feedback", unit="block", leave=False) as bar:
        for members in chains.values():
            inside = [name for name in targets if _is_in(name, members)]
            chain = Chain(model, members, inside, known.tokens, device)
            for name in chain.called:
                bar.set_postfix_str(name)
                with on_device(model.get_submodule(name), device) as block:
                    done = job and job.load(blocks.index(name), device_of(block))
                    if done:
                        packer.place(done.tensors)
                    else:
                        done = _pack_block(plan, packer, chain, name, sequential)
                        if job:
                            job.save(blocks.index(name), done)
                    if name != chain.called[-1]:
                        chain.advance(name)
                report.statistics.diagonals.update(done.diagonals)
                report.statistics.counts.update(done.counts)
                report.notes.update(done.notes)
                bar.update()
            reached += chain.called
        for unit in units(plan):
            if not _is_in(unit[0], reached):
                tensors, _ = _pack(model, plan, packer, unit, {})
                packer.place(tensors)
                report.notes.update(dict.fromkeys(unit, "packed plainly: outside the blocks that tokens run through"))
    return report


def _is_in(name: str, blocks: list[str]) -> bool:
    return name.startswith(tuple(f"{block}." for block in blocks))


def _checked(model: nn.Module, chains: dict[str, list[str]], device) -> torch.device | None:
    """The device, once it is sure that blocks can be run one by one."""
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"error feedback does not work for encoder-decoder models such as {kind}. {WAY_OUT}.")
    if not chains:
        raise ValueError(f"{kind} has no repeated blocks (nn.ModuleList) around what is to be packed. {WAY_OUT}.")
    if device is None:
        return None
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError("the model is spread by a device_map; leave device out, or load it onto one device.")
    return torch.empty(0, device=device).device  # cuda is cuda:0


def _pack_block(plan, packer: Packer, chain: Chain, name: str, sequential: bool) -> Block:
    """Run a block, pack it and put the packed modules into the model."""
    stages: dict[str, list[tuple[str, ...]]] = {}
    for unit in units(plan):
        if _is_in(unit[0], [name]):
            stages.setdefault(chain.leaders.get(unit[0], unit[0]) if sequential else "", []).append(unit)
    order = [*chain.leaders, *stages]  # what did not run in the first forward pass comes last
    done = Block({}, {}, {}, {})
    for stage in sorted(stages, key=order.index):
        members = [member for unit in stages[stage] for member in unit]
        linears = {member: chain.leaders.get(member, member) for member in members if member in plan.linears}
        with listening(chain.model, linears, [m for m in members if m in plan.experts], Hessian) as read:
            for _ in chain.outputs(name):
                pass
        diagonals, counts = statistics_of(read)
        done.diagonals.update(diagonals)
        done.counts.update(counts)
        packed = {}
        for unit in stages[stage]:
            tensors, notes = _pack(chain.model, plan, packer, unit, read)
            packed.update(tensors)
            done.notes.update(notes)
        packer.place(packed)
        done.tensors.update(packed)
    return done


def _pack(model: nn.Module, plan, packer: Packer, unit: tuple[str, ...], read: dict) -> tuple[dict, dict[str, str]]:
    """The tensors of a packed unit, and notes; `read` as `listening` yields it, empty if nothing is known."""
    name = unit[0]
    if name in plan.experts:
        notes, hessians = {}, {}
        for projection in input_names(model, [], unit) if read else []:
            few = {expert: one.tokens for expert, one in enumerate(read[projection]) if one.tokens < _least(one)}
            if few:
                seen = ", ".join(f"{expert} ({tokens})" for expert, tokens in few.items())
                notes[projection] = f"experts packed plainly, having seen too few tokens: {seen}"
            each = [None if expert in few else one for expert, one in enumerate(read[projection])]
            hessians[projection.rpartition(".")[2]] = each
        return packer.experts(name, hessians), notes
    if not read:
        return packer.linears(unit, None), {}
    hessian, problem = read[name], None
    if any(read[member] is not hessian for member in unit):
        problem = "packed plainly: linears under one tensor scale read different inputs"
    elif hessian.tokens < _least(hessian):
        problem = f"packed plainly: it saw {hessian.tokens} tokens, too few"
    return packer.linears(unit, None if problem else hessian), dict.fromkeys(unit, problem) if problem else {}


def _least(one: Hessian | Known) -> float:
    """Tokens below which what was counted is worse than knowing nothing."""
    return _LEAST if isinstance(one, Known) else _ENOUGH * len(one.diagonal)


def _pack_weighted(model: nn.Module, plan, packer: Packer, known: Statistics) -> dict[str, str]:
    """Pack all modules with the diagonals of `known`; returns notes."""
    read, notes = {}, {}
    for name in input_names(model, plan.linears, plan.experts):
        count = known.counts[name]
        owner = model.get_submodule(name.rpartition(".")[0] if count.ndim else name)
        diagonal = known.diagonals[name].to(device_of(owner))
        read[name] = [*map(Known, diagonal, count.tolist())] if count.ndim else Known(diagonal, int(count))
    for unit in tqdm(units(plan), desc="Quantizing", leave=False):
        for member in unit if unit[0] in plan.linears else ():
            if torch.equal(read[member].diagonal, read[unit[0]].diagonal):
                read[member] = read[unit[0]]
        tensors, found = _pack(model, plan, packer, unit, read)
        packer.place(tensors)
        notes |= found
    return notes


def units(plan) -> list[tuple[str, ...]]:
    """Names of what is packed at once: linears under one tensor scale, a linear alone, a fused-experts module."""
    return [*plan.units(), *((name,) for name in plan.experts)]
