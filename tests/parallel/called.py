"""A program that calls a function of a test file: called.py MODULE FUNCTION FOLDER ARGUMENTS RETURNED.

ARGUMENTS is a list, as JSON; what the function returns goes to the file RETURNED, as JSON. See rank_processes.py.
"""

import importlib
import json
import sys
from pathlib import Path

import torch


def main() -> None:
    """Call it."""
    module, name, folder, arguments, returned = sys.argv[1:]
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    result = function(Path(folder), *json.loads(arguments))
    Path(returned).write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    main()
