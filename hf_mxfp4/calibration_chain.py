# SPDX-License-Identifier: Apache-2.0
"""A model's repeated blocks: which there are, what they are called with, and what the modules inside them read.

Blocks form a chain if each reads what the one before it wrote and all their other arguments (positions, masks) are
the same for any tokens. Then a block can be run alone on stored hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

TOKENS_AT_ONCE = 4096  # in a forward pass
WAY_OUT = "Use channel_weights=True instead of error_feedback=True for this model, or neither"


def find_chains(model: nn.Module, names: list[str]) -> dict[str, list[str]]:
    """The outermost `nn.ModuleList`s that have some of the named modules inside their members: names of all members
    by the list's name."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    chains = {}
    for name in names:
        parts = name.split(".")
        around = (".".join(parts[:i]) for i in range(1, len(parts) - 1))  # a member itself is no block
        found = next((parent for parent in around if parent in lists), None)
        if found is not None:
            chains[found] = [f"{found}.{i}" for i in range(lists[found])]
    return chains


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and caches. Every module, or what took its place, gets its mode back."""
    modes = {name: module.training for name, module in model.named_modules()}
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    model.eval()
    try:
        for config in caching:
            config.use_cache = False
        with torch.no_grad():
            yield
    finally:
        for config in caching:
            config.use_cache = True
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)


def run(model: nn.Module, names: list[str], tokens: torch.Tensor) -> None:
    """Run a model on tokens `[M, L]`, without its head if all the named modules lie in the base model."""
    base = getattr(model, "base_model", model)
    inside = set(base.modules())
    runner = base if all(model.get_submodule(name) in inside for name in names) else model
    tokens = tokens.to(model.get_input_embeddings().weight.device)
    kwargs = {"decoder_input_ids": tokens} if getattr(model.config, "is_encoder_decoder", False) else {}
    runner(input_ids=tokens, **kwargs)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter or buffer is."""
    tensor = next((t for tensors in (module.parameters(), module.buffers()) for t in tensors), torch.empty(0))
    return tensor.device


@contextmanager
def on_device(module: nn.Module, device: torch.device | None) -> Iterator[nn.Module]:
    """Have a module on a device (`None`: where it is), and bring it with what it then holds back."""
    home = device_of(module)
    module.to(device or home)
    try:
        yield module
    finally:
        module.to(home)


@contextmanager
def visiting(modules: list[nn.Module], device: torch.device | None) -> Iterator[None]:
    """Have each module on a device while its forward runs, its arguments too; outputs come back."""
    with ExitStack() as stack:
        for module in modules:
            home = device_of(module)
            if device is None or device == home:
                continue

            def enter(module, args, kwargs):
                module.to(device)
                return move(args, device), move(kwargs, device)

            def leave(module, args, output, home=home):
                module.to(home)
                return move(output, home)

            stack.callback(module.to, home)
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield


def move(value: Any, device: torch.device) -> Any:
    """Tensors inside tuples, lists and dicts to a device."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, dict):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [move(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def same(a: Any, b: Any) -> bool:
    """Whether two arguments are equal, their tensors element by element."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


class Arguments(NamedTuple):
    """What a block is called with beside its hidden states."""

    args: tuple
    kwargs: dict[str, Any]

    @classmethod
    def split(cls, name: str, args: tuple, kwargs: dict) -> tuple[torch.Tensor, Arguments]:
        """Hidden states (the first argument, or the one of this name), and the others."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            raise ValueError(f"{name} is not called with hidden states (one floating-point tensor) first. {WAY_OUT}.")
        return hidden, cls(args[1:], kwargs if args else {k: v for k, v in kwargs.items() if k != "hidden_states"})


def first(output: Any) -> torch.Tensor:
    """The hidden states in what a block returns."""
    return output[0] if isinstance(output, (tuple, list)) else output


class _Stop(Exception):
    """Raised before the first block, to get only its input."""


class Chain:
    """One list of blocks, traced on the first tokens.

    Attributes:
        called: the blocks that ran, in their order; tokens do not reach the others.
        leaders: for each target that ran, in this order, the first of its block that reads the same tensor.
        states: input of the first block called, a tensor `[m, L, H]` for each batch; `advance` replaces them.
        arguments: what else each block is called with, by the size m of the batch.
    """

    def __init__(self, model: nn.Module, blocks: list[str], targets: list[str], tokens: torch.Tensor, device):
        """Trace `blocks` on tokens `[S, L]`; `targets` are the modules in them whose inputs matter."""
        self.model, self.blocks, self.targets, self.device = model, blocks, targets, device
        self.leaders: dict[str, str] = {}
        batches = tokens.split(max(1, TOKENS_AT_ONCE // tokens.shape[1]))
        with visiting([model.get_submodule(block) for block in blocks], device):
            whole = self._trace(batches[0])
            self.arguments = {len(batch): self._trace(batch) for batch in batches[-1:]} | {len(batches[0]): whole}
            for block, rest in self._trace(batches[0].flip(0, 1)).items():
                named, others = ({**dict(enumerate(r.args, 1)), **r.kwargs} for r in (rest, whole[block]))
                different = [str(key) for key in named if not same(named[key], others[key])]
                if different:
                    raise ValueError(
                        f"{block} ({type(model.get_submodule(block)).__name__}) takes arguments that depend on the "
                        f"tokens ({', '.join(different)}), so it cannot be run alone. {WAY_OUT}."
                    )
        self.called, self.sizes = list(whole), [len(batch) for batch in batches]
        self.states = [self._input(batch) for batch in batches] if whole else []

    def _trace(self, tokens: torch.Tensor) -> dict[str, Arguments]:
        """What each block is called with, in the order in which they run."""
        arguments: dict[str, Arguments] = {}
        latest: list[torch.Tensor] = []  # what the latest block wrote
        read: dict[str, list[torch.Tensor]] = {}  # what each target in the block at hand has read

        def enter(name, args, kwargs):
            hidden, rest = Arguments.split(name, args, kwargs)
            if name in arguments:
                raise ValueError(f"{name} runs more than once in a forward pass. {WAY_OUT}.")
            if latest and not same(hidden, latest[0]):
                before = next(reversed(arguments))
                raise ValueError(f"{name} does not read what {before} wrote: the blocks form no chain. {WAY_OUT}.")
            arguments[name] = rest

        def leave(output):
            latest[:] = [first(output)]
            for name, tensors in read.items():
                leader = next(other for other, others in read.items() if _same_memory(tensors, others))
                self.leaders.setdefault(name, leader)
            read.clear()

        with ExitStack() as stack:
            for name in self.blocks:
                block = self.model.get_submodule(name)
                # Before the arguments are moved: blocks then share what the model passes to all of them.
                hook = block.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: enter(name, args, kwargs), prepend=True, with_kwargs=True
                )
                stack.callback(hook.remove)
                stack.callback(block.register_forward_hook(lambda _, args, output: leave(output)).remove)
            for name in self.targets:
                hook = self.model.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: read.setdefault(name, []).append(read_by(args, kwargs)),
                    with_kwargs=True,
                )
                stack.callback(hook.remove)
            run(self.model, self.blocks, tokens)
        return arguments

    def _input(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the first block reads."""
        found = []

        def stop(_, args, kwargs):
            found.append(Arguments.split(self.called[0], args, kwargs)[0])
            raise _Stop

        hook = self.model.get_submodule(self.called[0]).register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
        try:
            run(self.model, self.blocks, tokens)
        except _Stop:
            pass
        finally:
            hook.remove()
        return found[0]

    def outputs(self, name: str) -> Iterator[torch.Tensor]:
        """Run a block (already where it is to run) on `states`, and yield what it writes, where they are."""
        block = self.model.get_submodule(name)
        device = device_of(block)
        arguments = {size: move(rest[name], device) for size, rest in self.arguments.items()}
        for size, state in zip(self.sizes, self.states, strict=True):
            args, kwargs = arguments[size]
            hidden = state.to(device, copy=True)  # a block may write into what it reads
            yield first(block(hidden, *args, **kwargs)).to(state.device)

    def advance(self, name: str) -> None:
        """Put what a block writes in the place of `states`, for the next one."""
        for i, output in enumerate(self.outputs(name)):
            self.states[i] = output


def read_by(args: tuple, kwargs: dict) -> torch.Tensor:
    """The first argument of a linear or an experts module."""
    return args[0] if args else next(iter(kwargs.values()))


def _same_memory(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether live tensors are the same values in the same place."""

    def place(x):
        return x.data_ptr(), x.shape, x.stride(), x.dtype, 0 if x.is_inference() else x._version

    return list(map(place, a)) == list(map(place, b))
