"""GenEval metadata of a wrong form is refused before anything is judged."""

from typing import Any

import pytest

from flowalign.rewards.geneval import GenEval

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
