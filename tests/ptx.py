# SPDX-License-Identifier: Apache-2.0
"""Run PTX on a CPU: one program after another, its threads side by side in numpy arrays.

`Module(text).launch(grid, arguments, shared)` executes what the compiler made of a kernel for sm_80, inline PTX
included, on torch tensors in CPU memory. Registers are bits, `[threads]` each. Stricter than a GPU: an address outside
of all tensors or not aligned, a branch that threads take differently and any instruction that is not known here are
errors; registers hold NaN until they are written, and copies to shared memory happen as late as they may.

What it cannot show: races (threads run in lockstep, programs in turn) and how tensor cores round, which add up here
in float64.
"""

import re

import numpy as np
import torch

WIDTH = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32}
WIDTH |= {"s32": 32, "f32": 32, "bf16x2": 32, "f16x2": 32, "b64": 64, "u64": 64, "s64": 64, "pred": 1}
BITS = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
POISON = {1: False, 8: 0xA5, 16: 0x7FA5, 32: 0x7FA5A5A5, 64: 0x7FA5A5A5A5A5A5A5}  # NaN as a number
COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
COMPARE |= {"ge": np.greater_equal, "neu": np.not_equal}
INTEGERS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum}
HINTS = ("L1::evict_first", "L1::evict_last", "L2::cache_hint")
WARP, GAP, FIRST = 32, 256, 1 << 12  # bytes between tensors; the first one's address
LANE = np.arange(WARP)


class PTXError(Exception):
    """What a GPU, or this interpreter, would not do."""


def to_float(bits: np.ndarray, kind: str) -> np.ndarray:
    """Bits of float16, bfloat16 or float32 as float64."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view({"f16": np.float16, "f32": np.float32}[kind]).astype(np.float64)


def to_bits(values: np.ndarray, kind: str) -> np.ndarray:
    """float64 rounded once to nearest even, subnormals kept."""
    if kind != "bf16":
        return values.astype({"f16": np.float16, "f32": np.float32}[kind]).view(BITS[WIDTH[kind]])
    # Through float32 rounded to odd, so that rounding twice is rounding once.
    narrow = values.astype(np.float32)
    bits, exact = narrow.view(np.uint32), narrow.astype(np.float64) == values
    bits = np.where(exact, bits, (bits - (np.abs(narrow) > np.abs(values))) | 1).astype(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def halves(bits: np.ndarray) -> list[np.ndarray]:
    return [(bits & 0xFFFF).astype(np.uint16), (bits >> 16).astype(np.uint16)]


def whole(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


class Memory:
    """Bytes, of which `valid` ones may be used."""

    def __init__(self, size: int, valid: bool):
        self.bytes = np.full(size, 0xA5, np.uint8)
        self.valid = np.full(size, valid)

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        addresses = addresses.astype(np.int64)
        if (addresses % size).any():
            raise PTXError(f"address {addresses[addresses % size != 0][0]} is no multiple of {size}")
        places = addresses[:, None] + np.arange(size)
        if places.size and (places.min() < 0 or places.max() >= len(self.bytes) or not self.valid[places].all()):
            raise PTXError("an address is outside of all tensors")
        return places

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        return self.bytes[self.places(addresses, size)]

    def store(self, addresses: np.ndarray, data: np.ndarray) -> None:
        self.bytes[self.places(addresses, data.shape[1])] = data


class Module:
    """The one kernel of a text of PTX; `threads` in a program."""

    def __init__(self, text: str):
        self.parameters = re.findall(r"\.param \.(\w+) .*?(\w+_param_\d+)", text)
        self.threads = int(re.search(r"\.reqntid (\d+)", text)[1])
        self.code, self.labels, self.width = [], {}, {}
        body = text[text.index("$L__func_begin0:") : text.index("$L__func_end0:")]
        for kind, names in re.findall(r"\.reg \.(\w+)\s+([^;]+);", text):
            for name in re.split(r",\s*", names):
                self.width[name.split("<")[0]] = WIDTH[kind]
        for line in body.splitlines():
            line = line.split("//")[0].strip()
            if label := re.fullmatch(r"(\$\w+):", line):
                self.labels[label[1]] = len(self.code)
            elif line and line not in "{}" and not line.startswith("."):
                self.code += [parsed(part) for part in map(str.strip, line.split(";")) if part]

    def launch(self, grid: tuple[int, int, int], arguments: list, shared: int) -> None:
        """Run all programs in order; `arguments` are tensors, which are changed in place, and integers."""
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        memory, values = Memory(FIRST + sum(t.untyped_storage().nbytes() + 2 * GAP for t in tensors), False), []
        spans, end = {}, FIRST
        for a in arguments:
            if isinstance(a, torch.Tensor):
                storage = a.untyped_storage()
                if storage.data_ptr() not in spans:
                    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                    end += -end % GAP
                    spans[storage.data_ptr()] = end, data
                    memory.bytes[end : end + len(data)] = data
                    memory.valid[end : end + len(data)] = True
                    end += len(data) + GAP
                a = spans[storage.data_ptr()][0] + a.data_ptr() - storage.data_ptr()
            values.append(a)
        values += [0] * (len(self.parameters) - len(values))  # scratch memory, which these kernels do not ask for
        parameters = {name: (kind, value) for (kind, name), value in zip(self.parameters, values, strict=True)}
        for place in np.ndindex(*grid[::-1]):
            Program(self, parameters, memory, shared, place[::-1], grid).run()
        for start, data in spans.values():
            data[:] = memory.bytes[start : start + len(data)]


def parsed(statement: str) -> tuple[str | None, list[str], list]:
    """Guard, the instruction's parts and its operands; those in braces are lists."""
    found = re.fullmatch(r"(?:@(!?%\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
    if not found:
        raise PTXError(f"not understood: {statement}")
    operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", found[3])]
    return found[1], found[2].split("."), [re.split(r",\s*", o[1:-1].strip()) if o[0] == "{" else o for o in operands]


class Program:
    """The threads of one program, their registers and shared memory."""

    def __init__(self, module: Module, parameters: dict, memory: Memory, shared: int, place: tuple, grid: tuple):
        self.module, self.parameters, self.memory = module, parameters, memory
        self.shared, self.registers = Memory(shared, True), {}
        self.every = np.ones(module.threads, bool)
        self.guard, self.copies, self.groups = self.every, [], []
        thread = np.arange(module.threads, dtype=np.uint32)
        self.special = {"%tid.x": thread, "%laneid": thread % WARP}
        for axis, at, size in zip("xyz", place, grid, strict=True):
            self.special |= {f"%ctaid.{axis}": self.full(at, 32), f"%nctaid.{axis}": self.full(size, 32)}

    def full(self, value: int, width: int) -> np.ndarray:
        return np.full(self.module.threads, bool(value) if width == 1 else value & (1 << width) - 1, BITS[width])

    def run(self) -> None:
        at, code = 0, self.module.code
        while at < len(code):
            guard, parts, operands = code[at]
            at += 1
            self.guard = self.every
            if guard:
                self.guard = ~self.read(guard[1:], 1) if guard[0] == "!" else self.read(guard, 1)
            if parts[0] in ("bra", "ret"):
                if self.guard.any() != self.guard.all():
                    raise PTXError(f"threads part at {'.'.join(parts)} {operands}")
                if self.guard.all():
                    if parts[0] == "ret":
                        return
                    at = self.module.labels[operands[0]]
                continue
            action = getattr(self, f"do_{parts[0]}", None)
            try:
                if action is None:
                    raise PTXError("unknown instruction")
                with np.errstate(all="ignore"):
                    action(parts[1:], *operands)
            except (PTXError, KeyError, TypeError, ValueError) as error:
                raise PTXError(f"{'.'.join(parts)} {operands}: {type(error).__name__} {error}") from error

    # --- operands ----------------------------------------------------------------------------------------------------

    def width_of(self, name: str) -> int:
        return self.module.width[name if name in self.module.width else name.rstrip("0123456789")]

    def read(self, operand: str, width: int) -> np.ndarray:
        """Bits of a register or a number, the lower ones of a wider register."""
        if operand in self.special:
            return self.special[operand]
        if operand == "global_smem":
            return self.full(0, width)
        if operand[:2] == "0f":
            return self.full(int(operand[2:], 16), width)
        if operand[0] in "-0123456789":
            return self.full(int(operand.rstrip("U"), 0), width)
        if operand not in self.registers:  # the compiler does so where it does not matter
            return self.full(POISON[self.width_of(operand)], self.width_of(operand)).astype(BITS[width], copy=False)
        return self.registers[operand].astype(BITS[width], copy=False)

    def typed(self, operand: str, kind: str) -> np.ndarray:
        """As integers of a type, signed where it is."""
        bits = self.read(operand, WIDTH[kind])
        return bits.view(SIGNED[WIDTH[kind]]) if kind[0] == "s" else bits

    def number(self, operand: str, kind: str) -> np.ndarray:
        return to_float(self.read(operand, WIDTH[kind]), kind)

    def write(self, name: str, values: np.ndarray) -> None:
        """To a register, where the guard allows; signed integers grow with their sign."""
        if name == "_":
            return
        width = self.width_of(name)
        values = values.astype(BITS[width]) if width > 1 else values.astype(bool)
        if self.guard is not self.every:
            values = np.where(self.guard, values, self.registers.get(name, self.full(POISON[width], width)))
        self.registers[name] = values

    def address(self, operand: str) -> np.ndarray:
        base, *offset = operand.strip("[] ").split("+")
        width = 32 if base.strip() == "global_smem" else self.width_of(base.strip())
        return self.read(base.strip(), width).astype(np.int64) + sum(int(o, 0) for o in offset)

    def space(self, parts: list[str]) -> Memory:
        return self.shared if "shared" in parts else self.memory

    # --- moving data -------------------------------------------------------------------------------------------------

    def do_mov(self, parts, to, value):
        width = WIDTH[parts[0]]
        if isinstance(to, list):  # a register into its parts
            each = width // len(to)
            bits = self.read(value, width)
            for i, name in enumerate(to):
                self.write(name, (bits >> BITS[width](i * each)).astype(BITS[each]))
        elif isinstance(value, list):
            each = width // len(value)
            terms = [self.read(v, each).astype(BITS[width]) << BITS[width](i * each) for i, v in enumerate(value)]
            self.write(to, np.bitwise_or.reduce(terms))
        else:
            self.write(to, self.read(value, width))

    def do_createpolicy(self, parts, to, *_):
        self.write(to, self.full(0, 64))

    def do_ld(self, parts, to, at, _policy=None):
        if parts[0] == "param":
            kind, value = self.parameters[at.strip("[] ")]
            self.write(to, self.full(value, WIDTH[kind]))
            return
        known(parts, "global", "shared", "cg", "ca", "v2", "v4", *HINTS)
        names, kind = to if isinstance(to, list) else [to], parts[-1]
        size = WIDTH[kind] // 8
        active = self.guard
        data = np.zeros((len(active), size * len(names)), np.uint8)
        data[active] = self.space(parts).load(self.address(at)[active], data.shape[1])
        dtype = (SIGNED if kind[0] == "s" else BITS)[WIDTH[kind]]
        for i, column in enumerate(data.view(dtype).T if len(names) > 1 or size > 1 else [data[:, 0].view(dtype)]):
            self.write(names[i], np.ascontiguousarray(column))

    def do_st(self, parts, at, value):
        known(parts, "global", "shared", "v2", "v4", *HINTS)
        names, active = value if isinstance(value, list) else [value], self.guard
        width = WIDTH[parts[-1]]
        data = np.stack([self.read(name, width)[active] for name in names], axis=1)
        self.space(parts).store(self.address(at)[active], data.view(np.uint8).reshape(-1, width // 8 * len(names)))

    def do_cp(self, parts, *operands):
        """Copies take place where they are waited for."""
        if parts[1] == "commit_group":
            self.groups.append(self.copies)
            self.copies = []
        elif parts[1] == "wait_group":
            ready = max(0, len(self.groups) - int(operands[0]))
            for to, data in (copy for group in self.groups[:ready] for copy in group):
                self.shared.store(to, data)
            self.groups = self.groups[ready:]
        else:
            known([*parts, ""], "async", "cg", "ca", "shared", "global", *HINTS)
            to, source, size = operands[:3]
            active, size = self.guard, int(size, 0)
            wanted = self.read(operands[3], 32) if operands[3:] else self.full(size, 32)
            data, full = np.zeros((len(active), size), np.uint8), active & (wanted == size)
            if not np.isin(wanted[active], (0, size)).all():
                raise PTXError("a part of a copy")
            data[full] = self.memory.load(self.address(source)[full], size)
            self.copies.append((self.address(to)[active], data[active]))

    def do_bar(self, parts, *_):
        known(parts, last="sync")

    def do_atom(self, parts, to, at, value):
        known(parts, "global", "gpu", "acq_rel", "add", last="u32")
        addresses, before = self.address(at), self.full(0, 32)
        for i in np.flatnonzero(self.guard):
            before[i] = self.memory.load(addresses[i : i + 1], 4).view(np.uint32)[0, 0]
            after = before[i : i + 1] + self.read(value, 32)[i]
            self.memory.store(addresses[i : i + 1], after.astype(np.uint32).view(np.uint8)[None])
        self.write(to, before)

    # --- integers ----------------------------------------------------------------------------------------------------

    def arithmetic(self, name, parts, to, a, b):
        kind = parts[-1]
        if kind in ("f32", "f16", "bf16", "bf16x2", "f16x2"):
            if name in ("min", "max") and parts[:-1] != ["NaN"]:
                raise PTXError("which of a number and NaN")
            known(parts, "rn", "NaN", last=kind)
            self.floats(kind, INTEGERS[name], to, a, b)
        elif parts[0] == "wide":
            double = np.int64 if kind == "s32" else np.uint64
            self.write(to, (self.typed(a, kind).astype(double) * self.typed(b, kind).astype(double)).view(np.uint64))
        else:
            known(parts, "lo", last=kind)
            self.write(to, INTEGERS[name](self.typed(a, kind), self.typed(b, kind)))

    def do_add(self, *operands):
        self.arithmetic("add", *operands)

    def do_sub(self, *operands):
        self.arithmetic("sub", *operands)

    def do_mul(self, *operands):
        self.arithmetic("mul", *operands)

    def do_min(self, *operands):
        self.arithmetic("min", *operands)

    def do_max(self, *operands):
        self.arithmetic("max", *operands)

    def do_mad(self, parts, to, a, b, c):
        if parts[0] == "wide":
            wide = {"s32": "s64", "u32": "u64"}[parts[1]]
            dtype = {"s64": np.int64, "u64": np.uint64}[wide]
            product = self.typed(a, parts[1]).astype(dtype) * self.typed(b, parts[1]).astype(dtype)
            self.write(to, product + self.typed(c, wide))
        else:
            known(parts, last=parts[1])
            kind = parts[1]
            self.write(to, self.typed(a, kind) * self.typed(b, kind) + self.typed(c, kind))

    def do_and(self, parts, to, a, b):
        self.write(to, self.read(a, WIDTH[parts[0]]) & self.read(b, WIDTH[parts[0]]))

    def do_or(self, parts, to, a, b):
        self.write(to, self.read(a, WIDTH[parts[0]]) | self.read(b, WIDTH[parts[0]]))

    def do_xor(self, parts, to, a, b):
        self.write(to, self.read(a, WIDTH[parts[0]]) ^ self.read(b, WIDTH[parts[0]]))

    def do_not(self, parts, to, a):
        self.write(to, ~self.read(a, WIDTH[parts[0]]))

    def do_neg(self, parts, to, a):
        known(parts, last="s32")
        self.write(to, -self.typed(a, "s32"))

    def do_div(self, parts, to, a, b):
        known(parts, last="u32")
        self.write(to, self.typed(a, "u32") // self.typed(b, "u32"))

    def do_shl(self, parts, to, a, b):
        width, by = WIDTH[parts[0]], self.read(b, 32)
        shifted = self.read(a, width) << np.minimum(by, width - 1).astype(BITS[width])
        self.write(to, np.where(by < width, shifted, 0))

    def do_shr(self, parts, to, a, b):
        kind, by = parts[0], self.read(b, 32)
        value, width = self.typed(a, kind), WIDTH[kind]
        shifted = value >> np.minimum(by, width - 1).astype(value.dtype)
        self.write(to, shifted if kind[0] == "s" else np.where(by < width, shifted, 0))

    def do_bfe(self, parts, to, a, at, length):
        at, length = int(at, 0), int(length, 0)
        left = self.read(a, 32) << np.uint32(32 - at - length)
        left = left.view(np.int32) if parts[0] == "s32" else left
        self.write(to, left >> left.dtype.type(32 - length))

    def do_lop3(self, parts, to, a, b, c, table):
        bits, found = [self.read(o, 32) for o in (a, b, c)], self.full(0, 32)
        for i in range(8):
            if int(table, 0) >> i & 1:
                terms = [v if i >> (2 - j) & 1 else ~v for j, v in enumerate(bits)]
                found |= terms[0] & terms[1] & terms[2]
        self.write(to, found)

    def do_prmt(self, parts, to, a, b, select):
        known(parts, last="b32")
        both = self.read(a, 32).astype(np.uint64) | self.read(b, 32).astype(np.uint64) << np.uint64(32)
        table, select, found = both[:, None].view(np.uint8), self.read(select, 32), self.full(0, 32)
        for i in range(4):
            nibble = select >> np.uint32(4 * i) & 15
            byte = table[np.arange(len(table)), nibble & 7]
            byte = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)  # the sign, eight times
            found |= byte.astype(np.uint32) << np.uint32(8 * i)
        self.write(to, found)

    def do_setp(self, parts, to, a, b):
        kind = parts[1]
        read = self.number if kind in ("f32", "f16", "bf16") else self.typed
        self.write(to, COMPARE[parts[0]](read(a, kind), read(b, kind)))

    def do_selp(self, parts, to, a, b, which):
        width = WIDTH[parts[0]]
        self.write(to, np.where(self.read(which, 1), self.read(a, width), self.read(b, width)))

    # --- floating point ----------------------------------------------------------------------------------------------

    def floats(self, kind, function, to, *operands):
        """`function` in float64, rounded once; of pairs for both halves."""
        if kind.endswith("x2"):
            kind, pairs = kind[:-2], [halves(self.read(o, 32)) for o in operands]
            results = [to_bits(function(*(to_float(p[i], kind) for p in pairs)), kind) for i in (0, 1)]
            self.write(to, whole(*results))
        else:
            self.write(to, to_bits(function(*(self.number(o, kind) for o in operands)), kind))

    def do_fma(self, parts, to, a, b, c):
        known(parts, "rn", last=parts[-1])
        self.floats(parts[-1], lambda x, y, z: x * y + z, to, a, b, c)

    def do_cvt(self, parts, to, a, b=None):
        *rounding, into, kind = parts
        known(rounding + [kind], "rn", last=kind)
        if into.endswith("x2"):  # the first operand is the upper half
            into = into[:-2]
            self.write(to, whole(*(to_bits(self.number(o, kind), into) for o in (b, a))))
        elif "f" in into and "f" not in kind:
            self.write(to, to_bits(self.typed(a, kind).astype(np.float64), into))
        elif "f" in kind:
            if "f" not in into:
                raise PTXError("a number to an integer")
            self.write(to, to_bits(self.number(a, kind), into))
        else:
            values = self.typed(a, kind).astype((SIGNED if into[0] == "s" else BITS)[WIDTH[into]])
            self.write(to, values)

    # --- warps -------------------------------------------------------------------------------------------------------

    def do_shfl(self, parts, to, a, by, *limits):
        known(parts, "sync", "bfly", "up", "idx", last="b32")
        at = {"bfly": LANE ^ int(by, 0), "up": LANE - int(by, 0), "idx": np.full(WARP, int(by, 0))}[parts[1]]
        if limits[0] != ("0" if parts[1] == "up" else "31"):
            raise PTXError("parts of a warp")
        self.write(to, self.read(a, 32).reshape(-1, WARP)[:, np.where(at < 0, LANE, at)].ravel())

    def do_redux(self, parts, to, a, _):
        known(parts, "sync", "max", "add", last="s32")
        values = self.typed(a, "s32").reshape(-1, WARP)
        each = values.max(axis=1) if "max" in parts else values.sum(axis=1, dtype=np.int32)
        self.write(to, np.repeat(each, WARP))

    def do_ldmatrix(self, parts, to, at):
        known(parts, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", last="b16")
        rows = self.shared.load(self.address(at), 16).view(np.uint16).reshape(-1, 4, 8, 8)  # warp, matrix, row, column
        if "trans" in parts:
            rows = rows.swapaxes(2, 3)
        for i, name in enumerate(to):
            row, column = LANE // 4, LANE % 4 * 2
            self.write(name, whole(rows[:, i, row, column].ravel(), rows[:, i, row, column + 1].ravel()))

    def do_mma(self, parts, to, a, b, c):
        """Group g = lane // 4 has row g (and g + 8) of A and C and column g of B; t = lane % 4 counts pairs of k."""
        shape, kind = parts[2], parts[6]
        known(parts, "sync", "aligned", "m16n8k16", "row", "col", "f32", kind, last="f32")
        if shape != "m16n8k16" or kind not in ("f16", "bf16") or parts[7] != kind:
            raise PTXError("this product is not known")
        warps, g, t = self.module.threads // WARP, LANE // 4, LANE % 4 * 2
        left, right, total = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
        for i in range(4):
            for j, half in enumerate(halves(self.read(a[i], 32))):
                left[:, g + i % 2 * 8, t + i // 2 * 8 + j] = to_float(half, kind).reshape(warps, WARP)
            total[:, g + i // 2 * 8, t + i % 2] = self.number(c[i], "f32").reshape(warps, WARP)
        for i in range(2):
            for j, half in enumerate(halves(self.read(b[i], 32))):
                right[:, t + i * 8 + j, g] = to_float(half, kind).reshape(warps, WARP)
        total = total + left @ right
        for i in range(4):
            self.write(to[i], to_bits(total[:, g + i // 2 * 8, t + i % 2].ravel(), "f32"))


def known(parts: list[str], *names: str, last: str | None = None) -> None:
    """Nothing but `names` before the type, which is `last` if that is given."""
    unknown = [part for part in parts[:-1] if part not in (*names, "lo")]
    if unknown or (last is not None and parts[-1] != last):
        raise PTXError(f"unknown: {unknown or parts[-1]}")
