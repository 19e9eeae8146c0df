"""Prompt sets are read as written; the sampler is fair, exact and a function of the update."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from flowalign.training.data import PromptError, PromptSampler, load_prompts, subset
from flowalign.types import PromptBatch


def prompt_set(task: str, size: int) -> PromptBatch:
    return PromptBatch(
        [f"{task} {i}" for i in range(size)], [task] * size, [{"row": i} for i in range(size)]
    )


def sampler(sizes: dict[str, int], weights: dict[str, float], prompts: int, seed: int = 0):
    return PromptSampler({t: prompt_set(t, n) for t, n in sizes.items()}, weights, prompts, seed)


def test_text_lines_are_prompts_and_the_last_needs_no_newline(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffa cat\r\n\n  a dog\u2028inside \nlast".encode())
    batch = load_prompts(file, "pets")
    assert batch == PromptBatch(["a cat", "a dog\u2028inside", "last"], ["pets"] * 3, [{}, {}, {}])


def test_json_lines_keep_the_other_keys_as_metadata(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": 'the sign "OPEN"', "target": "OPEN"}, {"n": [1], "prompt": "two"}]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    batch = load_prompts(str(file), "ocr")
    assert batch.prompts == ['the sign "OPEN"', "two"]
    assert batch.metadata == [{"target": "OPEN"}, {"n": [1]}]


def test_a_json_list_holds_prompts_or_objects_and_a_suffix_has_any_case(tmp_path: Path) -> None:
    listed = json.dumps(["a cat", {"prompt": "a dog", "target": "x"}])
    (tmp_path / "a.JSON").write_text(listed)
    batch = load_prompts(tmp_path / "a.JSON", "t")
    assert batch == PromptBatch(["a cat", "a dog"], ["t"] * 2, [{}, {"target": "x"}])
    for name, text in (("a.TXT", "a"), ("a.Jsonl", '{"prompt": "a"}'), ("a.CSV", "prompt\na")):
        (tmp_path / name).write_text(text)
        assert load_prompts(tmp_path / name, "t").prompts == ["a"]
    with pytest.raises(PromptError, match=r"a\.TXT"):
        load_prompts(tmp_path / "b.txt", "t")


def test_a_malformed_set_is_refused(tmp_path: Path) -> None:
    cases = [
        ("a.txt", "\n \n", "holds no prompts"),
        ("a.txt", '{"prompt": "a dog"}\n', "line 1.*jsonl"),
        ("a.txt", 'a cat\n{"prompt": "a dog"},\n', "line 2.*jsonl"),
        ("a.txt", '[\n"a dog"\n]', "line 1.*json"),
        ("a.txt", '["a dog", "a cat"]', "line 1.*json"),
        ("a.txt", "0001\ta dog\n0002\ta cat\n", "columns"),
        ("a.txt", "a dog\t0001\n", "columns"),
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt": }\n', "line 3.*column"),
        ("a.jsonl", '["x"]', "line 1"),
        ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}', "line 2.*prompt"),
        ("a.jsonl", '{"prompt": " "}', "line 1"),
        ("a.json", '["a", 3]', "prompt 2"),
        ("a.json", '{"a cat": "cat.png"}', r'\["a cat", .*data_list'),
        ("a.yaml", "x", "a .txt, .jsonl, .csv or .json"),
        ("a.csv", "item_id,caption\n1,x\n", "caption"),
        ("a.csv", "", "`prompt`"),
        ("a.csv", "item_id,text\n1,x\n2,\n", "line 3.*`text`"),
        ("a.csv", "item_id,text\n1,x,y\n", "line 2: want a cell"),
        ("a.csv", 'text\n"x" y\n', "line 1"),
        ("a.csv", "item_id,text\n1,x\n1,y\n", "line 3: the item '1'"),
        ("a.jsonl", '{"prompt": "a", "x": ' + "[" * 100_000, "line 1"),
        ("a.jsonl", '{"prompt": "a", "x": NaN}', "line 1"),
        ("a.jsonl", '{"prompt": "\\ud800"}', "line 1"),
        ("a.csv", 'prompt\n"a', "a.csv"),
        ("a.csv", "prompt,b\na," + "x" * 200_000, "a.csv"),
        ("a.csv", "prompt,prompt\na,b\n", "prompt"),
    ]
    for name, content, seen in cases:
        (tmp_path / name).write_text(content)
        with pytest.raises(PromptError, match=seen) as caught:
            load_prompts(tmp_path / name, "t")
        assert len(str(caught.value)) < 2000


def test_lines_that_only_look_like_tables_or_json_are_prompts(tmp_path: Path) -> None:
    prompts = ["{red|blue} dog", "[x:0.8] (a:1.2)", "a stray\ttab", "1. a list"]
    (tmp_path / "a.txt").write_text("\n".join(prompts))
    assert load_prompts(tmp_path / "a.txt", "t").prompts == prompts


def test_files_of_prompts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10", "2", "1", "12", "dog"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert load_prompts(tmp_path, "t").prompts == ["1", "2", "10", "12", "dog"]


def test_a_pipe_is_no_prompt_set(tmp_path: Path) -> None:
    """To open one waits for a writer, for ever."""
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(PromptError):
        load_prompts(tmp_path / "a.txt", "t")


def test_a_csv_has_a_prompt_a_row_and_metadata_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes('\ufefftext,prompt,n\r\nold,"a cat, \r\n""hi""",1\r\n,a dog,\r\n'.encode())
    assert load_prompts(file, "t") == PromptBatch(
        ['a cat, \r\n"hi"', "a dog"], ["t"] * 2, [{"text": "old", "n": "1"}, {"text": "", "n": ""}]
    )


def test_rows_of_one_item_are_one_prompt_with_what_they_share(tmp_path: Path) -> None:
    file = tmp_path / "dpg_bench.csv"  # DPG-Bench's form: a row a question
    file.write_text(
        "item_id,text,keywords,proposition_id\nb1,a red cup,cup,1\nb1,a red cup,cup,2\n"
        "a2,a dog,dog,1\n"
    )
    batch = load_prompts(file, "dpg")
    assert batch.prompts == ["a red cup", "a dog"]
    assert batch.metadata == [
        {"item_id": "b1", "keywords": "cup"},
        {"item_id": "a2", "keywords": "dog", "proposition_id": "1"},
    ]


def test_a_folder_is_a_prompt_a_file_named_by_it(tmp_path: Path) -> None:
    for name, text in {"7.txt": "seven\n", "10.txt": "\ufefften ", "x.csv": "no"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    batch = load_prompts(tmp_path, "dpg")
    assert batch.prompts == ["seven", "ten"]
    assert batch.metadata == [{"item_id": "7"}, {"item_id": "10"}]
    (tmp_path / "color_val.txt").write_text("one\ntwo\n")  # a set of its own, not an item
    with pytest.raises(PromptError, match="color_val.txt has 2 lines.*Give the path of the file"):
        load_prompts(tmp_path, "dpg")


def test_a_missing_set_names_the_command_that_writes_it_or_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    for name, said in (
        ("geneval_test.jsonl", "`flowalign data fetch geneval`"),
        ("geneval_val.jsonl", "`flowalign data fetch geneval_train`"),
        ("t2i_compbench/color_val.txt", "`flowalign data fetch t2i_compbench`"),
        ("trian.jsonl", str(tmp_path / "train.jsonl")),
    ):
        with pytest.raises(PromptError, match=said):
            load_prompts(tmp_path / name, "t")


def test_a_batch_depends_on_seed_and_update_only() -> None:
    args = ({"a": 7, "b": 5}, {"a": 1.0, "b": 2.0}, 4)
    one, other = sampler(*args), sampler(*args)
    forward = [one.batch(u) for u in range(30)]
    assert [other.batch(u) for u in reversed(range(30))] == forward[::-1]
    assert forward != [sampler(*args, seed=1).batch(u) for u in range(30)]


def test_no_prompt_repeats_within_an_epoch_and_epochs_differ() -> None:
    draws = sampler({"a": 12}, {"a": 1.0}, 8)
    seen = [prompt for update in range(3) for prompt in draws.batch(update).prompts]
    assert sorted(seen[:12]) == sorted(seen[12:]) == sorted(prompt_set("a", 12).prompts)
    assert seen[:12] != seen[12:]


def test_every_batch_is_proportional_and_the_debt_never_grows() -> None:
    cases = [
        ({"a": 0.1, "b": 0.2, "c": 0.7}, 10), ({"a": 1.0, "b": 1.0, "c": 1.0}, 8),
        ({"a": 1.0, "b": 1.0, "c": 98.0}, 1), ({"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}, 3),
    ]  # fmt: skip
    for weights, prompts in cases:
        draws = sampler(dict.fromkeys(weights, 5), weights, prompts)
        total, given = sum(weights.values()), Counter()
        for update in range(200):
            counts = Counter(draws.batch(update).tasks)
            assert sum(counts.values()) == prompts
            given += counts
            for task, weight in weights.items():
                share = prompts * weight / total
                assert abs(given[task] - share * (update + 1)) < len(weights) - 1, (weights, update)
                assert abs(counts[task] - share) < 2, (weights, update)


GENEVAL_TAGS = {"single_object": 80, "two_object": 99, "counting": 80,
                "colors": 94, "position": 100, "color_attr": 100}  # fmt: skip


def like_geneval(path: Path) -> PromptBatch:
    """A file of the official test set's tags, sorted as it is."""
    sizes = GENEVAL_TAGS.items()
    rows = [{"tag": tag, "prompt": f"{tag} {i}"} for tag, n in sizes for i in range(n)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return load_prompts(path, "geneval")


def test_a_part_of_a_sorted_set_holds_every_tag_in_proportion(tmp_path: Path) -> None:
    whole = like_geneval(tmp_path / "geneval.jsonl")
    for count in (6, 16, 64, 128, 400):
        part = subset(whole, count)
        found = Counter(row["tag"] for row in part.metadata)
        assert len(part) == count
        for tag, size in GENEVAL_TAGS.items():
            assert abs(found[tag] - count * size / len(whole)) < 1.5, (count, tag)
        places = [whole.prompts.index(prompt) for prompt in part.prompts]
        assert places == sorted(set(places))
    of_a_tag = [p for p in subset(whole, 128).prompts if p.startswith("position")]
    assert of_a_tag != [f"position {i}" for i in range(len(of_a_tag))]  # nor the first of each


def test_a_larger_part_holds_the_smaller_one_and_the_order_of_a_file_is_kept(tmp_path: Path):
    for whole in (like_geneval(tmp_path / "geneval.jsonl"), prompt_set("red", 40)):
        before: set[str] = set()
        for count in range(1, len(whole) + 1, 13):
            now = set(subset(whole, count).prompts)
            assert before <= now and len(now) == count
            before = now
        assert subset(whole, len(whole)) == whole == subset(whole, 10**6)
        assert subset(whole, 20) == subset(whole, 20)


def test_prompts_in_other_words_keep_their_metadata(tmp_path: Path) -> None:
    plain, other = (load_prompts(f"tiny/geneval_test{end}", "g") for end in ("", "#unseen"))
    assert other.metadata == plain.metadata
    assert other.prompts == [row["wordings"]["unseen"] for row in plain.metadata]
    both = load_prompts("tiny/geneval_test#unseen|a drawing, of {prompt}", "g")
    assert both.prompts[: len(plain)] == other.prompts
    assert both.prompts[len(plain)] == f"a drawing, of {plain.prompts[0]}"
    assert both.metadata == plain.metadata * 2
    (tmp_path / "a#b.txt").write_text("red")  # a file of that name is itself
    assert load_prompts(tmp_path / "a#b.txt", "g").prompts == ["red"]
    (tmp_path / "a.txt").write_text("red")
    for source in ("tiny/geneval_test#seen", f"{tmp_path}/a.txt#unseen"):
        with pytest.raises(PromptError, match="wordings"):
            load_prompts(source, "g")
