"""The README's first screen is true."""

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


def test_readme_links_and_make_targets_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(
        re.search(rf"^{name}:", targets, re.MULTILINE) for name in re.findall(r"^make (\w+)", README, re.MULTILINE)
    )
