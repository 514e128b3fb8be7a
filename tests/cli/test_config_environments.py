"""Environments in a configuration: by name, and every mistake in one as one line."""

from pathlib import Path

import pytest
from cli_project import fit_here, resolve_config


@pytest.mark.long
def test_environments_may_be_given_by_name(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "named.yaml").write_text(
        "environment:\n  fixed: {class_path: SelfCorrection, init_args: {verdict: '-'}}\n  plain: SingleTurn\n"
        "data: {train: rows.jsonl, environment: {rows.jsonl: fixed}}\n"
    )
    options = ("--config", "run.yaml", "--config", "named.yaml")
    found = resolve_config(capsys, *options, "--environment.fixed.init_args.verdict=+")
    assert found["environment"]["fixed"]["init_args"]["verdict"] == "+"
    assert found["environment"]["plain"]["class_path"].endswith("SingleTurn")
    code, errors = fit_here(capsys, *options, "--environment.fixed.init_args.verdit=+")
    assert code == 2
    message = "environment.fixed.init_args.verdit: there is no such key. Did you mean 'verdict'?"
    assert errors.splitlines()[-1] == f"error: {message}"


VERIFY = "environment.{}: there is no such key. That is rollout.verify_trajectories here, an argument of VLLMRollout."
ADD = "expected list, got 'my_tools.add'. Write [my_tools.add]."


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("{class_path: Tools, init_args: {tools: my_tools.add}}", f"environment.tools: {ADD}"),
        ("{math: {class_path: Tools, init_args: {tools: my_tools.add}}}", f"environment.math.tools: {ADD}"),
        (
            "{class_path: AgentProgram, init_args: {command: python agent.py}}",
            "environment.command: expected list, got 'python agent.py'. Write a list, such as [first, second].",
        ),
        (
            "{class_path: AgentProgram, init_args: {agent: [own_classes.solve]}}",
            "environment.agent: expected function, got '['own_classes.solve']'. Write own_classes.solve.",
        ),
        (
            "{class_path: AgentProgram, init_args: {command: [ls], reward: last}}",
            "environment.reward: expected Literal['last_line', 'exit_code', 'none'], got 'last'. "
            "Did you mean 'last_line'?",
        ),
        ("{class_path: Tools, init_args: {tools: []}}", "Tools: tools=[] must name at least one function or class."),
        (
            "[Tools]",
            "environment=['Tools']: here stand keys, not a value. Write 'environment:', and below it ",
        ),
        ("{tools: [my_tools.add]}", "environment.tools=['my_tools.add']: here stand keys, not a value."),
        (
            "rlightning.rewards.exact_match",
            "environment: 'rlightning.rewards.exact_match' is not a subclass of ",
        ),
        ("{class_path: Tools, init_arg: {tools: [a.b]}}", "environment.init_arg: there is no such key. Did you mean"),
        ("{class_path: Tools, tools: [a.b]}", "environment.tools: beside class_path, keys stand under init_args."),
        ("{class_path: Tools, init_args: {tools: [a.b], verify: true}}", VERIFY.format("init_args.verify")),
        ("{class_path: Tools, verify: true, init_args: {tools: [a.b]}}", VERIFY.format("verify")),
        ("{verify: true}", VERIFY.format("verify")),
    ],
)
def test_wrong_environment_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], environment: str, message: str
) -> None:
    (project / "environment.yaml").write_text(f"environment: {environment}\n")
    code, errors = fit_here(capsys, "--config", "run.yaml", "--config", "environment.yaml")
    assert code == 2 and errors.splitlines()[-1].startswith(f"error: {message}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--environment=Tools", "--environment.tools=own_classes.Quick"),
            "environment.tools: expected list, got 'own_classes.Quick'. Write [own_classes.Quick].",
        ),
        (("--environment.verify=true",), VERIFY.format("verify")),
    ],
)
def test_wrong_option_of_an_environment_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    code, errors = fit_here(capsys, "--config", "run.yaml", *options)
    assert code == 2 and errors.splitlines()[-1] == f"error: {message}"
