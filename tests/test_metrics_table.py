from metrics_table import documented_names, undocumented


def test_every_name_has_one_row() -> None:
    names = documented_names()
    assert len(names) == len(set(names)) >= 34


def test_placeholders_stand_for_one_word() -> None:
    assert undocumented(["val/gsm8k/pass@8", "test/my-set/reward", "reward/exact_match", "epoch", "step"]) == []
    assert undocumented(["val/a/b/reward", "policy/los", "xpolicy/loss", "speed"]) == [
        "policy/los",
        "speed",
        "val/a/b/reward",
        "xpolicy/loss",
    ]
