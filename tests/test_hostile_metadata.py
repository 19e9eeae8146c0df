"""Whatever metadata GenEval's check accepts, the judge can judge, whatever was detected."""

from typing import Any

import pytest
from generated import examples, holds, json_values, mutated
from hypothesis import strategies as st

from flowalign.rewards.geneval import GenEval
from flowalign.rewards.geneval_judge import COLORS, judge, partial_credit
from flowalign.training.data import load_prompts

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


OFFICIAL = load_prompts("tiny/geneval_test", "t").metadata
BOXES = [[0, 0, 9, 9, 0.9], [20, 0, 29, 9, 0.8], [0, 20, 9, 29, 0.5], [9, 9, 0, 0, 1], [0] * 5]
boxes = st.lists(st.sampled_from(BOXES), max_size=4)


@pytest.mark.slow
@examples(800)
def test_what_the_check_accepts_can_be_judged(count: int):
    detections = st.dictionaries(st.sampled_from(NAMES), boxes, max_size=4)
    place = st.tuples(st.sampled_from(["left of", "above", "x", None]), st.integers(-3, 3))
    clauses = st.fixed_dictionaries(
        {"class": st.sampled_from(NAMES), "count": st.integers(0, 3)},
        optional={
            "color": st.sampled_from([*COLORS, "", None, 1]),
            "position": place.map(list) | json_values,
        },
    )
    made = st.fixed_dictionaries(
        {"include": st.lists(clauses, max_size=4)},
        optional={"exclude": st.lists(clauses, max_size=2), "tag": json_values},
    )

    @st.composite
    def metadata(draw: Any) -> Any:
        found = draw(made | st.sampled_from(OFFICIAL))
        for _ in range(draw(st.integers(0, 2))):
            found = mutated(found, draw, json_values) if isinstance(found, dict) else found
        return found if isinstance(found, dict) else {"include": found}

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

    holds(judged_or_refused, count, meta=metadata(), seen=detections, color=st.sampled_from(COLORS))
    assert accepted > count // 20  # else the property says nothing
