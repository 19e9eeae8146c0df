"""Whatever metadata GenEval's check accepts, the judge can judge, whatever was detected."""

from typing import Any

import pytest
from generated import examples, holds, json_values
from hypothesis import strategies as st

from flowalign.rewards.geneval import GenEval
from flowalign.rewards.geneval_judge import COLORS, judge, partial_credit

NAMES = ["dog", "cup", "red", "", "é"]
DOG, CUP = {"class": "dog", "count": 1}, {"class": "cup", "count": 1}
WRONG = [
    {"include": [{**DOG, "position": "left of"}]},
    {"include": [{**DOG, "position": ["left of"]}]},
    {"include": [{**DOG, "position": ["left of", 0]}]},  # its own clause
    {"include": [CUP, {**DOG, "position": ["left of", -2]}]},
    {"include": [CUP, {**DOG, "position": ["left of", "0"]}]},
    {"include": [CUP, {**DOG, "position": ["beside", 0]}]},
    {"include": [{**DOG, "position": None}]},
    {"include": [{**DOG, "color": ["red"]}]},
    {"include": [{**DOG, "color": None}]},
    *({"include": [{**DOG, "count": count}]} for count in ("1", 0, True)),
    *({"include": [{**DOG, "class": name}]} for name in (["dog"], 3)),
    *({"include": include} for include in ([{"class": "dog"}], ["dog"], DOG, [])),
    {"target": "HI"},
    *({"include": [DOG], "exclude": e} for e in (None, {}, [{"class": "dog"}], [1], "dog")),
]


@pytest.mark.parametrize("metadata", WRONG)
def test_wrong_metadata_is_refused(metadata: dict[str, Any]):
    with pytest.raises(ValueError, match="number 2 of 2: prompt 'b'.*(in|ex)clude"):
        GenEval.check_prompts(["a", "b"], [{"include": [DOG]}, metadata])


def test_a_long_prompt_does_not_fill_the_screen():
    with pytest.raises(ValueError) as raised:
        GenEval.check_prompts(["a" * 10**6], [{"include": "b" * 10**6}])
    assert len(str(raised.value)) < 2000


BOXES = [[0, 0, 9, 9, 0.9], [20, 0, 29, 9, 0.8], [9, 9, 0, 0, 1], [0] * 5]
FOUND = st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(BOXES), max_size=4))
CLAUSE = st.fixed_dictionaries(
    {"class": st.sampled_from(NAMES), "count": st.integers(0, 3)},
    optional={
        "color": st.sampled_from([*COLORS, "", None, 1]),
        "position": st.lists(st.sampled_from(["left of", "above", -1, 0, 1])) | json_values,
    },
)
MADE = st.fixed_dictionaries(
    {"include": st.lists(CLAUSE, min_size=1, max_size=3)},
    optional={"exclude": st.lists(CLAUSE, max_size=2) | json_values, "tag": json_values},
)


@pytest.mark.slow
@examples(800)
def test_what_the_check_accepts_can_be_judged(count: int):
    accepted = 0

    def judged_or_refused(meta: dict[str, Any], seen: dict[str, Any], color: str) -> None:
        nonlocal accepted
        try:
            GenEval.check_prompts(["a"], [meta])
        except ValueError:
            return
        accepted += 1
        rules: Any = {"threshold": 0.3, "max_overlap": 0.5}
        judge(meta, seen, lambda name, index: color, **rules)
        for variant in ("bounded", "published"):
            partial_credit(meta, seen, lambda name, index: color, variant=variant, **rules)

    holds(judged_or_refused, count, meta=MADE, seen=FOUND, color=st.sampled_from(COLORS))
    assert accepted > count // 20  # else the property says nothing
