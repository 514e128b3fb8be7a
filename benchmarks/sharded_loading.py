"""The host memory that a rank needs to load its shards, against that of loading the whole model.

    torchrun --nproc-per-node 2 benchmarks/sharded_loading.py [FOLDER]

FOLDER is a Hugging Face model; without one a random Qwen3 of 190 MB is written to a temporary folder. Runs on the CPU,
so that a rank's shards are in the host's memory too. Prints one line of JSON, in megabytes: the whole model, a rank's
shards, and the most that its memory grew by while it loaded its shards, and while it loaded the whole model, each on
the rank where it is largest. Pages of the files do not count: they are the system's cache, which all ranks share and
which it takes back when it likes.
"""

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rlightning.models import load_policy
from rlightning.models.sharded_policy import load_sharded_policy
from rlightning.parallel.sharding import Sharding, local_tensor

CONFIG: dict[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Run on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="a Hugging Face model (a random Qwen3 of 190 MB)")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    folder = share(arguments.folder or make_model())
    sizes = (1, dist.get_world_size(), 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tensor_parallel"))
    # Once with a small model, so that imports and connections do not count.
    small = share(make_model(num_hidden_layers=1, vocab_size=64))
    load_sharded_policy(small, Sharding(mesh, torch.device("cpu")))
    load_policy(small)
    sharded, sharded_peak = peak_growth(lambda: load_sharded_policy(folder, Sharding(mesh, torch.device("cpu"))))
    shards = sum(local_tensor(parameter).nbytes for parameter in sharded.parameters())
    del sharded
    whole, whole_peak = peak_growth(lambda: load_policy(folder))
    num_bytes = {
        "whole_model": sum(parameter.nbytes for parameter in whole.parameters()),
        "shards": shards,
        "peak_of_loading_shards": sharded_peak,
        "peak_of_loading_the_whole": whole_peak,
    }
    largest = torch.tensor(list(num_bytes.values()))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    num_bytes = dict(zip(num_bytes, largest.tolist(), strict=True))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({name: round(size / 1e6, 1) for name, size in num_bytes.items()}) + "\n")
    dist.destroy_process_group()


def make_model(**config: Any) -> str:
    """Write a random model in bfloat16; its folder. Rank 0's is the one that counts."""
    if dist.get_rank() != 0:
        return ""
    folder = tempfile.mkdtemp()
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG | config)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def share(folder: str) -> str:
    """Rank 0's folder."""
    folders = [folder]
    dist.broadcast_object_list(folders)
    return folders[0]


def peak_growth(load: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, int]:
    """What ``load`` returns, and the most bytes that this process had more than before while it ran."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again and not be seen
    before, peak = anonymous_bytes(), 0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.0005):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        loaded = load()
    finally:
        is_over.set()
        watcher.join()
        peak = max(peak, anonymous_bytes())  # the watcher may have got no time
    return loaded, peak - before


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux.")


if __name__ == "__main__":
    main()
