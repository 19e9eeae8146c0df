"""Doctor, train and eval have one verdict on every shipped config, whatever is missing."""

import pytest
import verdicts


@pytest.mark.long
def test_doctor_refuses_what_train_and_eval_refuse_and_for_the_same_reasons() -> None:
    found = verdicts.examined()
    assert all(len(configs) == len(verdicts.CONFIGS) for configs in found.values())
    wrong = {
        (world, config): both
        for world, configs in found.items()
        for config, both in configs.items()
        if verdicts.differing(both)
    }
    assert wrong == {}
    started = {both["doctor"][0] for both in found["all extras"].values()}
    assert started == {0}
    for world in ("no extras", "missing prompts", "missing adapters"):
        refused = {config for config, both in found[world].items() if both["doctor"][0] == 2}
        assert refused and not any("tiny" in config for config in refused), world
