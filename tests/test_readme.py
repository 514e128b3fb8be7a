"""The README's first screen is true."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from programs import run_python
from test_configs import count_keys
from tiny import save_byte_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.processes
def test_the_yaml_of_the_first_screen_is_understood(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    assert len(example.splitlines()) <= 16 and count_keys(yaml.safe_load(example)) <= 12
    (tmp_path / "run.yaml").write_text(example)
    options = ["--config", "run.yaml", "--model.lr", "2e-6", "--model.model", save_byte_model(tmp_path / "model")]
    shown = run_python("-m", "rlightning", "fit", *options, "--print_config", folder=tmp_path)
    resolved = yaml.safe_load(shown.stdout)
    assert resolved["model"]["init_args"]["lr"] == 2e-6
    assert resolved["rollout"]["init_args"]["max_new_tokens"] == 1024


@pytest.mark.processes
def test_the_script_of_the_first_screen_trains(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(script.splitlines()) <= 10
    model = save_byte_model(tmp_path / "model", max_position_embeddings=2048)
    rows = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    smaller = {
        "Qwen/Qwen3-0.6B": model,
        "openai/gsm8k:main:train": "rows.jsonl",
        "prompts_per_step=64, samples_per_prompt=8": "prompts_per_step=4, samples_per_prompt=2",
        "max_new_tokens=1024": "max_new_tokens=8, engine={'kv_cache_memory_bytes': 1 << 28}",
        "bf16-mixed": "32-true",
        "max_steps=200": "max_steps=2, accelerator='cpu'",
    }
    for written, used in smaller.items():
        assert script.count(written) == 1
        script = script.replace(written, used)
    (tmp_path / "script.py").write_text(script)
    done = run_python("script.py", folder=tmp_path, environment=os.environ | {"OMP_NUM_THREADS": "1"})
    assert re.findall(r"^(step \d/2) \| reward [\d.]+", done.stderr, flags=re.MULTILINE) == ["step 1/2", "step 2/2"]
    (folder,) = (tmp_path / "runs").iterdir()
    left = {path.name for path in folder.iterdir()}
    assert left == {"checkpoints", "completions", "engine.log", "metrics", "report.html"}


def test_make_targets_of_the_readme_exist() -> None:
    named = re.findall(r"^make (\w+)", README, re.MULTILINE)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert named and set(named) <= set(targets)
