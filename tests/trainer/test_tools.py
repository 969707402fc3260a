"""Tools: what a policy may ask for, how a call is read, and how tools of the user's own are found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.hooks import UserError
from lineage.trainer.tools import Calculator, Lookup, ToolError, tool_parser
from lineage.trainer.tools.calculator import evaluate, spell
from lineage.trainer.tools.config import load_interactions, load_tools


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("3+4", "7"),
        (" (3 + 4) * 2 ", "14"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("-7//2", "-4"),
        ("7%3", "1"),
        ("2**-1", "0.5"),
        ("1/3", "0.333333333333"),
        ("1e3", "1000"),
        ("1e300*10", "1e+301"),
    ],
)
def test_calculator_spells_values(expression, text):
    """Whole numbers have no point, others twelve digits."""
    assert spell(evaluate(expression)) == text


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "not arithmetic"),
        ("3+", "not arithmetic"),
        ("x", "not arithmetic"),
        ("__import__('os')", "not arithmetic"),
        ("1 if 1 else 2", "not arithmetic"),
        ("3(4)", "not arithmetic"),
        ("e", "not arithmetic"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("9**9**-9*1e308*1e308", "too large"),
        ("2**9999999", "too large"),
        ("(-8)**0.5", "no real value"),
        ("1" * 200, "too large"),
        ("(" * 150, "not arithmetic"),
        ("1" * 201, "201 characters"),
    ],
)
def test_calculator_refuses(expression, message):
    """What is no arithmetic, has no value or would take long is refused in words, at once."""
    with pytest.raises(ValueError, match=message):
        evaluate(expression)


def combine(inner):
    """An operation on two expressions, written in parentheses, beside its value."""

    def make(left, symbol, right):
        operation = {"+": operator.add, "-": operator.sub, "*": operator.mul}[symbol]
        return f"({left[0]}{symbol}{right[0]})", operation(left[1], right[1])

    return st.builds(make, inner, st.sampled_from("+-*"), inner)


@given(st.recursive(st.integers(0, 999).map(lambda n: (str(n), n)), combine, max_leaves=20))
def test_calculator_is_exact_on_integers(drawn):
    """An integer expression has its value to the last digit."""
    expression, value = drawn
    assert spell(evaluate(expression)) == str(value)


@given(st.text("0123456789.eE+-*/%() x_", max_size=40))
def test_calculator_knows_numbers_and_refusals_only(text):
    """Whatever a policy writes, it has a real value or is refused with a ValueError."""
    with contextlib.suppress(ValueError):
        assert math.isfinite(evaluate(text))


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "3+4"}}</tool_call>'


def test_hermes_calls_are_found_in_order():
    """The text stays without the calls; arguments are JSON text."""
    text = f"let me see {CALL} and {CALL.replace('3+4', '1')}!"
    content, calls = tool_parser("hermes").extract_tool_calls(text)
    assert content == "let me see  and !"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("calculator", {"expression": "3+4"}),
        ("calculator", {"expression": "1"}),
    ]


@pytest.mark.parametrize(
    "body", ["", "no json", "[1]", "7", '{"name": "f"}', '{"arguments": {}}', '{"name": 3, "arguments": {}}']
)
def test_malformed_calls_are_dropped(body):
    """A call without name or arguments is left out; the one beside it stands."""
    assert tool_parser("hermes").extract_tool_calls(f"<tool_call>{body}</tool_call>")[1] == []
    assert len(tool_parser("hermes").extract_tool_calls(f"<tool_call>{body}</tool_call>{CALL}")[1]) == 1


def test_unclosed_calls_are_text():
    """A call cut off by the length limit is none."""
    text = CALL.removesuffix("</tool_call>")
    assert tool_parser("hermes").extract_tool_calls(text) == (text, [])


def test_unknown_format_lists_the_known():
    """A call format nobody reads is the user's mistake."""
    with pytest.raises(ToolError, match=r"multi_turn\.format=xml is unknown; known: hermes"):
        tool_parser("xml")


async def use(tool, parameters, **create):
    """One call's life."""
    instance, _ = await tool.create(create_kwargs=create)
    try:
        return (await tool.execute(instance, parameters))[0].text
    finally:
        await tool.release(instance)


def test_lookup_answers_from_the_rows_own_table():
    """Each call sees its own table and keeps nothing; a key that is null is another row's."""
    tool = Lookup()

    async def both():
        return await asyncio.gather(
            use(tool, {"key": "a"}, table={"a": 1, "b": None}), use(tool, {"key": "b"}, table={"a": 2, "b": None})
        )

    assert asyncio.run(both()) == ["1", "no key b"]
    assert tool._tables == {}


def test_built_in_tools_describe_themselves():
    """Without a file both built-in tools are there, each with an OpenAI schema of its name."""
    tools = load_tools(None)
    assert {name: tool.tool_schema["function"]["name"] for name, tool in tools.items()} == {
        "calculator": "calculator",
        "lookup": "lookup",
    }
    assert tools["lookup"].tool_schema["function"]["parameters"]["required"] == ["key"]
    assert asyncio.run(use(tools["calculator"], {"expression": "2*3"})) == "6"
    assert asyncio.run(tools["calculator"].calc_reward("x")) == 0.0


def write(tmp_path, text):
    """A configuration file."""
    path = tmp_path / "tools.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def own(tmp_path):
    """A module of the user's in the current folder."""
    (tmp_path / "own_tools.py").write_text(
        "from lineage.trainer.tools import BaseTool, BaseInteraction\n"
        "class Shout(BaseTool): pass\n"
        "class Nod(BaseInteraction): pass\n"
        "class Broken(BaseTool):\n"
        "    def __init__(self, *args): raise RuntimeError('no key')\n",
        encoding="utf-8",
    )
    return f"{tmp_path}/own_tools.py:"


def test_tools_of_a_file(tmp_path, own):
    """class_name is a built-in name or a path; config and schema reach the tool; only the file's tools are there."""
    tools = load_tools(
        write(
            tmp_path,
            f"""
tools:
  - class_name: calculator
  - class_name: {own}Shout
    config: {{type: native, mark: "!"}}
    tool_schema: {{type: function, function: {{name: shout, description: louder}}}}
""",
        )
    )
    assert list(tools) == ["calculator", "shout"]
    assert tools["shout"].config == {"type": "native", "mark": "!"}
    assert isinstance(tools["calculator"], Calculator)


def test_interactions_of_a_file(tmp_path, own):
    """Interactions are known by their entry's name; without a file there are none."""
    text = f"interaction:\n  - name: nod\n    class_name: {own}Nod\n    config: {{times: 2}}\n"
    found = load_interactions(write(tmp_path, text))
    assert found["nod"].config == {"times": 2}
    assert load_interactions(None) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: [", "not a readable YAML file"),
        ("others: []", "no list 'tools'"),
        ("tools: [calculator]", "no list 'tools' of mappings"),
        ("tools: [{class_name: calculator}, {class_name: calculator}]", r"tools\[1\]: a second tool named calculator"),
        ("tools: [{class_name: calculator, config: {type: mcp}}]", r"config\.type=mcp is unknown; known: native"),
        ("tools: [{class_name: calculator, config: 3}]", "config is not a mapping"),
        ("tools: [{class_name: abacus}]", r"tools\[0\]\.class_name=abacus"),
        ("tools: [{}]", r"class_name=None"),
        ("tools: [{class_name: OWNShout}]", "the tool schema has no function name"),
        ("tools: [{class_name: OWNBroken}]", "cannot be made: RuntimeError: no key"),
        ("tools: [{class_name: OWNNod}]", "Nod is not a BaseTool"),
    ],
)
def test_unusable_tool_files_are_one_line(tmp_path, own, text, message):
    """What is wrong with a tool file is said in one line that names the setting and the entry."""
    path = write(tmp_path, text.replace("OWN", own))
    with pytest.raises(UserError, match=message) as caught:
        load_tools(path)
    assert "tool_config_path" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_nameless_interactions(tmp_path, own):
    """A file that is not there, and an interaction without a name, are the user's mistakes."""
    with pytest.raises(ToolError, match="no such file"):
        load_tools(str(tmp_path / "none.yaml"))
    with pytest.raises(ToolError, match=r"interaction\[0\]: name=None"):
        load_interactions(write(tmp_path, f"interaction: [{{class_name: '{own}Nod'}}]"))
