"""A program that calls a function of a test file: called.py CALL RETURNED.

CALL is the function and its arguments, as rank_processes.py writes it; what it returns goes to the file RETURNED, as
JSON.
"""

import base64
import json
import pickle
import sys
from pathlib import Path

import torch


def main() -> None:
    """Call it."""
    call, returned = sys.argv[1:]
    torch.set_num_threads(1)
    function, arguments = pickle.loads(base64.b64decode(call))
    result = function(*arguments)
    Path(returned).write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    main()
