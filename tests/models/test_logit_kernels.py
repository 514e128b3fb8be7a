"""The Triton kernels without a GPU; test_cuda.py runs them on one."""

import os
from pathlib import Path

import numpy as np
import pytest
from fork_server import START_BY_EXEC
from programs import run_python

pytestmark = pytest.mark.processes


def test_kernels_agree_with_torch() -> None:
    pytest.importorskip("triton", reason="Triton comes with the CUDA builds of torch")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter takes arrays of one element for numbers, which NumPy 2.4 does not")
    root = Path(__file__).parents[2]
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), START_BY_EXEC: "1"}
    run_python(script, environment=environment)
