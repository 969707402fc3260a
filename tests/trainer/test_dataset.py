"""Prompts in: every file kind gives the same rows, every bad one a line with file and row."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lineage.hooks import UserError
from lineage.trainer.config import compose
from lineage.trainer.dataset import DatasetError, RLHFDataset, collate_fn, make_dataloader
from lineage.trainer.tools import Calculator, Lookup

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{number}+1=?"}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train"},
        "agent_name": "single_turn_agent",
    }
    for number in range(6)
]
LONG = {**ROWS[0], "prompt": [{"role": "user", "content": "x" * 300}]}


def write(path, rows):
    """Rows as a file of the kind its name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return str(path)


@pytest.fixture
def read(tokenizer):
    """Reads files with overrides of the data section."""

    def make(files, *overrides, **options):
        config = compose([f"data.{override}" for override in overrides])
        return RLHFDataset(files, tokenizer, config.data, seed=1, **options)

    return make


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl"])
def test_every_file_kind_gives_verls_row(tmp_path, read, name):
    """parquet, json and jsonl give raw messages, source, ground truth, extra info, index and the placeholder tensor."""
    data = read(write(tmp_path / name, ROWS))
    row = data[2]
    assert len(data) == 6
    assert row["raw_prompt"] == ROWS[2]["prompt"]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == ROWS[2]["reward_model"]
    assert row["extra_info"] == ROWS[2]["extra_info"]
    assert row["index"] == 2
    assert row["agent_name"] == "single_turn_agent"
    assert torch.equal(row["dummy_tensor"], torch.zeros(1, dtype=torch.uint8))


def test_a_string_may_hold_what_else_ends_a_line(tmp_path, read):
    """JSON lines end at the line feed alone: web text has U+2028 in it."""
    row = {**ROWS[0], "prompt": [{"role": "user", "content": "one\u2028two\u0085three"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert read(str(path))[0]["raw_prompt"] == row["prompt"]


def test_a_row_of_tools_carries_what_its_session_needs(tmp_path, read):
    """tools_kwargs and interaction_kwargs of extra_info are columns of their own, empty where a row has none."""
    lookup = {"lookup": {"create_kwargs": {"table": {"kiwi": "3"}}}}
    tools = {"agent_name": "tool_agent", "extra_info": {"tools_kwargs": lookup, "interaction_kwargs": {"name": "user"}}}
    data = read(write(tmp_path / "a.json", [{**ROWS[0], **tools}, ROWS[1]]))
    assert (data[0]["tools_kwargs"], data[0]["interaction_kwargs"]) == (lookup, {"name": "user"})
    assert (data[1]["tools_kwargs"], data[1]["interaction_kwargs"]) == ({}, {})
    assert data[0]["extra_info"] == {**tools["extra_info"], "index": 0}
    batch = collate_fn([data[0], data[1]])
    assert batch["agent_name"].tolist() == ["tool_agent", "single_turn_agent"]
    assert batch["tools_kwargs"].tolist() == [lookup, {}]


def test_missing_tools_kwargs_are_said(tmp_path, read, caplog):
    """A row that says it needs them and has none is warned of, by file and row."""
    needy = {**ROWS[0], "extra_info": {"need_tools_kwargs": True}}
    read(write(tmp_path / "a.json", [ROWS[1], needy]))[1]
    assert "a.json: row 1 has need_tools_kwargs and no tools_kwargs" in caplog.text


def test_media_go_with_the_row_unseen(tmp_path, read):
    """images, videos and audios (synthetic here) become multi_modal_data: the objects as they are."""
    picture = {"synthetic": True, "pixels": [1, 2]}
    data = read(write(tmp_path / "a.json", [{**ROWS[0], "images": [picture], "videos": []}, ROWS[1]]))
    assert data[0]["multi_modal_data"] == {"images": [picture]}
    assert data[1]["multi_modal_data"] == {}
    assert not {"images", "videos"} & data[0].keys()
    column = collate_fn([data[0], data[1]])["multi_modal_data"]
    assert (column.dtype, column.tolist()) == (np.dtype(object), [{"images": [picture]}, {}])


def test_a_prompt_is_measured_with_the_tools_it_will_show(tool_tokenizer):
    """Rows of the tool agent are as long as its loop makes them; tool_selection and other loops show less."""
    schemas = {tool.name: tool.tool_schema for tool in (Calculator(), Lookup())}
    rows = RLHFDataset(
        ["builtin:lookup", "builtin:add"],
        tool_tokenizer,
        compose([]).data,
        seed=1,
        max_samples=-1,
        tool_schemas=schemas,
    )
    bare, length = rows.prompt_length(64), rows.prompt_length(0)
    rows._rows[0]["extra_info"]["tool_selection"] = ["lookup"]
    assert rows.prompt_length(0) < length
    rows._rows[64]["agent_name"] = "tool_agent"
    assert rows.prompt_length(64) > bare


def test_several_files_are_one_dataset(tmp_path, read):
    """Rows of several files are numbered through."""
    files = [write(tmp_path / "a.json", ROWS[:2]), write(tmp_path / "b.jsonl", ROWS[2:])]
    assert [read(files)[item]["index"] for item in range(6)] == list(range(6))


def test_json_lines_in_a_json_file(tmp_path, read):
    """A .json file may hold one row a line."""
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, ROWS)))
    assert len(read(str(tmp_path / "a.json"))) == 6


def test_max_samples_keeps_the_first(tmp_path, read):
    """max_samples cuts the file, and makes so many rows of a made task."""
    assert len(read(write(tmp_path / "a.json", ROWS), max_samples=4)) == 4
    assert len(read("builtin:digits", max_samples=3)) == 3


def test_overlong_prompts_are_filtered_and_keep_their_index(tmp_path, read):
    """filter_overlong_prompts leaves rows out; those that stay keep their row number."""
    data = read(write(tmp_path / "a.json", [LONG, *ROWS]), "filter_overlong_prompts=true")
    assert (len(data), data.dropped, data[0]["index"]) == (6, 1, 1)


def test_overlong_prompt_under_another_truncation_is_left_to_the_agent_loop(tmp_path, read):
    """Only truncation=error refuses it at the start."""
    assert len(read(write(tmp_path / "a.json", [LONG]), "truncation=left")) == 1


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.parquet", None, "a.parquet: no such file"),
        ("a.txt", "x", "not a parquet, json or jsonl file"),
        ("a.parquet", "not parquet", "a.parquet: not a readable parquet file"),
        ("a.json", "[{]", "a.json: not JSON at line 1"),
        ("a.jsonl", '{"prompt": 1}\n{', "a.jsonl: not JSON at line 2"),
        ("a.json", "[]", "a.json: no rows"),
        ("a.json", "[1]", "row 0 is not an object but int"),
        ("a.json", json.dumps([ROWS[0], {"question": "?"}]), "a.json: row 1 has no 'prompt' (data.prompt_key)"),
        ("a.json", json.dumps([{"prompt": "text"}]), "'prompt' of row 0 is not a list of messages"),
        ("a.json", json.dumps([ROWS[0], LONG]), "a.json: the prompt of row 1 has"),
    ],
)
def test_bad_data_is_one_line_with_file_and_row(tmp_path, read, name, content, expected):
    """A missing or malformed file, a row without a prompt, no rows, an overlong prompt: each one line."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError) as caught:
        read(str(tmp_path / name))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UserError)


def test_nothing_left_after_the_filter_is_an_error(tmp_path, read):
    """When every prompt is too long the line names the limit."""
    with pytest.raises(DatasetError, match=r"every prompt is longer than data\.max_prompt_length=128"):
        read(write(tmp_path / "a.json", [LONG]), "filter_overlong_prompts=true")


def test_another_prompt_key(tmp_path, read):
    """data.prompt_key names the column of the messages."""
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    data = read(write(tmp_path / "a.json", rows), "prompt_key=messages")
    assert data[0]["raw_prompt"] == rows[0]["messages"]
    assert "messages" not in data[0]


def test_collate_stacks_tensors_and_keeps_objects_whole():
    """Tensors are stacked along the batch; lists, dicts and strings become object arrays of one entry a row."""
    rows = [{"t": torch.tensor([n]), "messages": [{"role": "user"}], "name": str(n)} for n in range(3)]
    columns = collate_fn(rows)
    assert columns["t"].tolist() == [[0], [1], [2]]
    assert (columns["messages"].dtype, columns["messages"].shape) == (np.dtype(object), (3,))
    assert columns["name"].tolist() == ["0", "1", "2"]


def test_a_column_that_a_row_lacks_is_none_there():
    """Rows of different sources may have different columns."""
    assert collate_fn([{"a": 1}, {"b": 2}])["a"].tolist() == [1, None]


def indices(loader):
    """Dataset indices of one epoch, batch by batch."""
    return [batch["index"].tolist() for batch in loader]


def test_the_seed_decides_the_order(read):
    """Equal seeds give equal orders, epoch after epoch; each epoch has its own, and drops what fills no batch."""
    data = read("builtin:digits", max_samples=10)
    first, second = (make_dataloader(data, batch_size=4, shuffle=True, seed=3) for _ in range(2))
    epochs = [indices(first), indices(first)]
    assert epochs == [indices(second), indices(second)]
    assert epochs[0] != epochs[1]
    assert [len(batch) for batch in epochs[0]] == [4, 4]
    assert indices(make_dataloader(data, batch_size=4, shuffle=True, seed=4)) != epochs[0]


def test_without_shuffle_rows_come_in_order(read):
    """shuffle=false reads the file in its order."""
    data = read("builtin:digits", max_samples=4)
    assert indices(make_dataloader(data, batch_size=2, shuffle=False, seed=3)) == [[0, 1], [2, 3]]


def test_the_loader_resumes_where_it_was(read):
    """A loader given another's state goes on with the batch that one would have given next."""
    data = read("builtin:digits", max_samples=12)
    loader, resumed = (make_dataloader(data, batch_size=4, shuffle=True, seed=3) for _ in range(2))
    running = iter(loader)
    next(running)
    resumed.load_state_dict(loader.state_dict())
    assert next(iter(resumed))["index"].tolist() == next(running)["index"].tolist()


def test_loading_draws_nothing_from_the_global_generator(read):
    """The order of prompts leaves torch's own generator alone."""
    data = read("builtin:digits", max_samples=4)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    indices(make_dataloader(data, batch_size=2, shuffle=True, seed=3))
    assert torch.equal(torch.get_rng_state(), before)


def test_fewer_rows_than_a_batch_is_an_error(read):
    """A batch that can never be filled is refused at the start."""
    with pytest.raises(DatasetError, match=r"3 rows are fewer than data\.train_batch_size=4"):
        make_dataloader(read("builtin:digits", max_samples=3), batch_size=4, shuffle=True, seed=1)
