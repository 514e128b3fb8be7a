"""Seconds and memory of what the host does with the completions of a step: each part by itself, without a model.

    python benchmarks/host_side.py
    python benchmarks/host_side.py --sizes 1600x1000 16000x1000 --before ../a-checkout-of-another-commit

A size is COMPLETIONSxTOKENS. Completions have half to one and a half times as many tokens, prompts an eighth, and eight
completions a prompt. Each part and size has a process of its own, with one thread, in which it runs --repetitions times
after a small warm-up. What a part is given is made before, and counts neither as time nor as memory. ``--before``
measures another checkout's code in the same run, turn by turn.

Prints one table, a row a part: nanoseconds a token at each size (all tokens of its batch; the fastest repetition, which
other work on the machine disturbs least); growth, their ratio between the last size and the first, which is 1 where
cost is linear; and of the last size the seconds from the fastest repetition to the slowest, the most memory that the
part took beyond what it was given, and what its result keeps. All that was measured is in --out/measurements.csv.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from host_parts import PARTS, SAMPLES_PER_PROMPT, Size
from launch import finish, say, write_csv


def measure(part: str, size: Size, repetitions: int) -> dict[str, Any]:
    """Prepare a part and run it; to be called in a process that nothing else is measured in."""
    PARTS[part](Size(2 * SAMPLES_PER_PROMPT, 4)).run()  # imports, and whatever is set up once
    run, num = PARTS[part](size)
    seconds, peak, kept = [], 0, 0
    for _ in range(repetitions):
        before = reset_peak()
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
        peak, kept = max(peak, memory("VmHWM") - before), memory("VmRSS") - before
        del result
    return {"part": part, "size": str(size), "tokens": num, "seconds": seconds, "peak": peak, "kept": kept}


def reset_peak() -> int:
    """Count the peak of resident memory anew; the bytes that are resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again and not be seen
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, resident, or VmHWM, the most that was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this needs Linux.")


def serve_measurements() -> None:
    """Measure what standard input asks for, line by line, each in a fork of this process, which has the imports."""
    for line in sys.stdin:
        part, num_completions, num_tokens, repetitions = json.loads(line)
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
            found = executor.submit(measure, part, Size(num_completions, num_tokens), repetitions).result()
        say(json.dumps(found))


class Checkout:
    """A process with the code of a checkout, which measures."""

    def __init__(self, folder: Path) -> None:
        paths = [str(folder.resolve()), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=os.environ | variables | {"VLLM_LOGGING_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, part: str, size: Size, repetitions: int) -> dict[str, Any]:
        """See :func:`measure`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([part, *size, repetitions]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"'{part}' at {size} failed.")

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def summarise(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """A part's line, from its measurements by size."""
    last = measured[-1]
    ns = {f"ns at {one['size']}": min(one["seconds"]) / one["tokens"] * 1e9 for one in measured}
    return {
        "part": last["part"],
        **ns,
        "growth": ns[f"ns at {last['size']}"] / ns[f"ns at {measured[0]['size']}"],
        "s": f"{min(last['seconds']):.3g} to {max(last['seconds']):.3g}",
        "peak, GiB": last["peak"] / 2**30,
        "peak, B": last["peak"] / last["tokens"],
        "kept, B": last["kept"] / last["tokens"],
    }


def compare(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A part's line in the table of two checkouts."""
    seconds = [min(one["seconds"]) for one in (before, now)]
    row: dict[str, Any] = {"part": now["part"], "before, s": seconds[0], "now, s": seconds[1]}
    row["times faster"] = seconds[0] / seconds[1]
    for what in ("peak", "kept"):
        row[f"{what} before, B"], row[f"{what} now, B"] = before[what] / before["tokens"], now[what] / now["tokens"]
    return row


def parse_size(text: str) -> Size:
    """``10000x1000``."""
    numbers = text.split("x")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers) or int(numbers[0]) % SAMPLES_PER_PROMPT:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not COMPLETIONSxTOKENS with a multiple of {SAMPLES_PER_PROMPT} completions, such as 8000x1000"
        )
    return Size(*map(int, numbers))


def main() -> None:
    """Measure every part at every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["10000x1000", "30000x1000", "100000x1000"]
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[*map(parse_size, sizes)], help=" ".join(sizes))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="all")
    parser.add_argument("--repetitions", type=int, default=3, help="of each part at each size (3)")
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/host_side"), help="gets tables")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_measurements()
        return
    checkouts = {"now": Checkout(Path(__file__).parent.parent)}
    if arguments.before is not None:
        checkouts = {"before": Checkout(arguments.before), **checkouts}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for part in arguments.parts:
        for size in arguments.sizes:
            for name, checkout in checkouts.items():
                found[name].append(checkout.measure(part, size, arguments.repetitions))
    for checkout in checkouts.values():
        checkout.close()
    arguments.out.mkdir(parents=True, exist_ok=True)
    everything = [{"code": name} | one for name, measured in found.items() for one in measured]
    write_csv(arguments.out / "measurements.csv", everything)
    num = len(arguments.sizes)
    by_part = {name: [m[i : i + num] for i in range(0, len(m), num)] for name, m in found.items()}
    if arguments.before is None:
        table = [summarise(measured) for measured in by_part["now"]]
    else:
        table = [compare(b[-1], n[-1]) for b, n in zip(by_part["before"], by_part["now"], strict=True)]
    finish(arguments, table)


if __name__ == "__main__":
    main()
