# SPDX-License-Identifier: Apache-2.0
"""Peak memory and throughput of `quantize_checkpoint` on a checkpoint made on the spot, beside `from_pretrained`; and
the kill test.

    python scripts/benchmark_streaming.py                      # 8 GB; writes scripts/results/streaming.{json,md}
    python scripts/benchmark_streaming.py --gigabytes 1 --workers 1 2 --out /tmp/streaming
    python scripts/benchmark_streaming.py --kill-test 50       # kill -9 at random moments, then compare bytes

Each measured run is a process of its own. Memory is that of the process and its children, sampled 20 times a second:
`resident` (with pages of mapped files, which the system may take back) and `anonymous` (which it cannot).
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import transformers

import timing
from hf_mxfp4 import FP4Config
from hf_mxfp4.checkpoint_writer import ShardWriter, TensorSpec, plan_shards, total_size, write_index
from hf_mxfp4.output_files import sha256
from hf_mxfp4.streaming import quantize_checkpoint

RESULTS = Path(__file__).parent / "results"
DEMOS = [Path(__file__).parent / name for name in ("demo_lm", "demo_lm_moe")]
LAYER_BYTES = 386e6  # of the model below
SHARD = "500MB"  # of all outputs: many files, as large models have


# --- the checkpoint --------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, gigabytes: float) -> dict:
    """Write a Qwen3 of 8B's widths with random weights, tensor by tensor. Returns what it holds."""
    layers = max(1, round((gigabytes * 1e9 - 0.52e9) / LAYER_BYTES))
    config = transformers.Qwen3Config(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    tensors = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in model.state_dict().items()}
    shards = plan_shards(tensors, "2GB")
    for shard in shards:
        with ShardWriter(folder, shard) as writer:
            for name, spec in shard.tensors.items():
                writer.put(name, torch.randn(spec.shape).mul_(0.02).to(spec.dtype))
    write_index(folder, shards, model.num_parameters(), total_size(tensors))
    largest = max(spec.nbytes for spec in tensors.values())
    return {"layers": layers, "bytes": total_size(tensors), "largest_tensor_bytes": largest, "files": len(shards)}


# --- measured runs ---------------------------------------------------------------------------------------------------


def child(arguments: list[str]) -> None:
    """What runs in a process of its own: `stream SOURCE OUTPUT WORKERS SHARD FORMAT` or `load SOURCE OUTPUT - SHARD
    FORMAT`."""
    how, source, output, workers, shard, fmt = arguments
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("begun", flush=True)
    start = time.perf_counter()
    if how == "stream":
        quantize_checkpoint(source, output, FP4Config(format=fmt), workers=int(workers), max_shard_size=shard)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=FP4Config(format=fmt))
        model.save_pretrained(output, max_shard_size=shard)
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


def start_child(*arguments) -> subprocess.Popen:
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def measure(*arguments) -> dict:
    """Run `child` and watch its memory."""
    process, peak, ended = start_child(*arguments), {"resident": 0, "anonymous": 0}, threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            resident, anonymous = memory(process.pid)
            peak["resident"] = max(peak["resident"], resident)
            peak["anonymous"] = max(peak["anonymous"], anonymous)

    thread = threading.Thread(target=watch)
    thread.start()
    output, _ = process.communicate()
    ended.set()
    thread.join()
    if process.returncode:
        return {"failed": process.returncode, **peak}
    return {**json.loads(output.splitlines()[-1]), **peak}


def memory(pid: int) -> tuple[int, int]:
    """Resident and anonymous bytes of the processes of a session."""
    resident = anonymous = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) != pid:
                continue
            fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        except (OSError, ValueError):
            continue
        resident += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
        anonymous += int(fields.get("RssAnon", "0 kB").split()[0]) * 1024
    return resident, anonymous


def same_files(folder: Path, other: Path) -> bool:
    """Whether all files of the first are in the second, byte for byte."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return all((other / name).is_file() and sha256(folder / name) == sha256(other / name) for name in names)


def benchmark(scratch: Path, gigabytes: float, workers: list[int], formats: list[str]) -> dict:
    load = "other programs used the cores at the same time" if os.getloadavg()[0] > 1 else "the machine was idle"
    source = scratch / "source"
    source.mkdir()
    made = make_checkpoint(source, gigabytes)
    print(f"made {made['bytes'] / 1e9:.2f} GB in {made['files']} files", flush=True)
    runs = []
    for fmt in formats:
        for how, count in (("from_pretrained", None), *(("quantize_checkpoint", n) for n in workers)):
            output = scratch / f"{how}-{fmt}-{count}"
            result = measure("load" if count is None else "stream", source, output, count or "-", SHARD, fmt)
            run = {"how": how, "workers": count, "format": fmt, **result}
            if "seconds" in run:
                run["megabytes_per_second"] = made["bytes"] / 1e6 / run["seconds"]
            reference = scratch / f"from_pretrained-{fmt}-None"
            if count is not None and "failed" not in run:
                run["same_bytes"] = same_files(reference, output) if (reference / "config.json").exists() else None
                shutil.rmtree(output)
            runs.append(run)
            print(json.dumps(run), flush=True)
        shutil.rmtree(scratch / f"from_pretrained-{fmt}-None", ignore_errors=True)
    processor = timing.processor(torch.device("cpu"))
    machine = {"processor": processor, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    machine |= {"transformers": transformers.__version__, "load": load, "threads": torch.get_num_threads()}
    return {"checkpoint": made, "runs": runs, "machine": machine}


def table(result: dict) -> str:
    """The result as Markdown."""
    made, machine = result["checkpoint"], result["machine"]
    bound = (3 * made["largest_tensor_bytes"] + 1e9) / 1e9
    lines = [
        "# Streaming quantization",
        "",
        f"A Qwen3 of 8B's widths with {made['layers']} layers, {made['bytes'] / 1e9:.2f} GB in bfloat16, largest "
        f"tensor {made['largest_tensor_bytes'] / 1e6:.0f} MB (three of them and 1 GB: {bound:.2f} GB). "
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} thread(s) for one process, "
        f"torch {machine['torch']}, transformers {machine['transformers']}; {machine['load']}. "
        "Memory is the sum over all processes of a run, sampled; resident memory counts mapped files.",
        "",
        "| | format | workers | seconds | MB/s of source | peak resident | peak anonymous | same files |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        size = [f"{run[key] / 1e9:.2f} GB" for key in ("resident", "anonymous")]
        speed = [f"{run['seconds']:.0f}", f"{run['megabytes_per_second']:.0f}"] if "seconds" in run else ["failed", ""]
        same = {True: "yes", False: "NO", None: ""}[run.get("same_bytes")]
        lines.append(f"| {' | '.join([run['how'], run['format'], str(run['workers'] or ''), *speed, *size, same])} |")
    if "kill_test" in result:
        kills = result["kill_test"]
        lines += [
            "",
            f"Kill test: {kills['kills']} times `kill -9` at random moments in {kills['outputs']} outputs, each then "
            f"finished by the same command; {kills['same']} of {kills['outputs']} equal an uninterrupted run byte for "
            f"byte. At most {kills['most_lost']} finished or half-finished files were lost by a kill.",
        ]
    return "\n".join(lines) + "\n"


# --- the kill test ---------------------------------------------------------------------------------------------------


def kill_test(scratch: Path, kills: int, seed: int) -> dict:
    """Kill runs at random moments, start them again until they are done, and compare with one that was left alone."""
    torch.set_num_threads(1)  # runs are forks of this process, which must have no threads
    rng, took = random.Random(seed), {}
    done, outputs, same, most_lost = 0, 0, 0, 0
    while done < kills:
        source, workers = DEMOS[outputs % 2], 2 if outputs % 8 > 5 else 1
        reference, output = scratch / source.name, scratch / f"output-{outputs}"
        arguments = ["stream", str(source), str(output), str(workers), "200KB", "nvfp4"]
        if not reference.exists():
            start = time.perf_counter()
            start_fork(["stream", str(source), str(reference), "1", "200KB", "nvfp4"]).join()
            took[source] = time.perf_counter() - start
        while not is_complete(output):
            process, before = start_fork(arguments), finished(output)
            process.join(rng.uniform(0, took[source]) * (4 if workers > 1 else 1.2) if done < kills else None)
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):  # it leads no session yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
                done += 1
                partial = len(list(output.glob(".*.partial")))
                if not (output / "config.json").exists():
                    most_lost = max(most_lost, -(-max(partial, len(before - finished(output))) // workers))
                print(f"kill {done}: {len(finished(output))} files finished, {partial} half-written", flush=True)
            elif process.exitcode:
                raise SystemExit(f"a run that was not killed ended with {process.exitcode}")
        outputs += 1
        same += same_files(reference, output) and same_files(output, reference)
        shutil.rmtree(output)
    return {"kills": done, "outputs": outputs, "same": same, "most_lost": most_lost}


def start_fork(arguments: list[str]) -> multiprocessing.Process:
    """`child`, without the seconds of importing everything, as the leader of a session of its own."""

    def main() -> None:
        os.setsid()
        child(arguments)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


def finished(output: Path) -> set[str]:
    return {path.name for path in output.glob(".hf_mxfp4*/*.done")}


def is_complete(output: Path) -> bool:
    return (output / "config.json").exists() and not list(output.glob(".hf_mxfp4*/manifest.json"))


# --- command ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--formats", nargs="+", default=["nvfp4"])
    parser.add_argument("--scratch", type=Path, help="folder for the files; a temporary one if not given")
    parser.add_argument("--out", type=Path, default=RESULTS / "streaming", help="less .json and .md")
    parser.add_argument("--kill-test", type=int, metavar="N", help="kill N times; adds to the results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="streaming-") as folder:
        scratch, path = Path(folder), arguments.out.with_suffix(".json")
        if arguments.kill_test:
            result = json.loads(path.read_text()) if path.exists() else None
            kills = kill_test(scratch, arguments.kill_test, arguments.seed)
            print(json.dumps(kills))
            if result is None:
                return
            result["kill_test"] = kills
        else:
            needed, free = arguments.gigabytes * 1.9e9, shutil.disk_usage(scratch).free
            if free < needed:
                sys.exit(f"{scratch}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed. Use --scratch.")
            result = benchmark(scratch, arguments.gigabytes, arguments.workers, arguments.formats)
    path.write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
