"""Counts of an engine process's objects and memory, taken in that process."""

import gc
import json
import os
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rlightning.rollout.vllm.weight_receiver import WorkerExtension


class Census(WorkerExtension):
    """A worker that counts when it is pinged, and writes it to the file of the variable CENSUS."""

    def rl_ping(self) -> None:
        gc.unfreeze()  # what vLLM has set aside is not among the objects otherwise
        alive = gc.get_objects()
        parameters = {
            weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
            for weight in alive
            if issubclass(type(weight), nn.Parameter) and weight.device.type != "meta"
        }
        found = {"parameter_bytes": sum(parameters.values())}
        for kind in (Optimizer, FSDPModule, PreTrainedModel):
            found[kind.__name__] = sum(issubclass(type(one), kind) for one in alive)
        census = Path(os.environ["CENSUS"])
        aside = census.with_suffix(".new")
        aside.write_text(json.dumps(found))
        aside.replace(census)  # at once: it may be read while another ping is answered
