"""Where a trace is, as a URI that another machine can make sense of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from made import anything

from lineage.checks.formats.artifact import Artifact
from lineage.checks.formats.plain import plain


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("runs/a/trace.parquet", "runs/a/trace.parquet"),
        ("./runs/../runs/a", "runs/a"),
        ("a b/c%d#e?.parquet", "a%20b/c%25d%23e%3F.parquet"),
        ("c:x/ключ", "c%3Ax/%D0%BA%D0%BB%D1%8E%D1%87"),
        ("a\\b", "a%5Cb"),
        ("runs/*/trace.parquet", "runs/%2A/trace.parquet"),
        (b"\xff.parquet".decode("utf-8", "surrogateescape"), "%FF.parquet"),
        (".", "."),
    ],
)
def test_below_the_current_folder_it_is_relative(path, uri, tmp_path, monkeypatch):
    """Given as a relative or as an absolute path; what a URI cannot hold is escaped."""
    monkeypatch.chdir(tmp_path)
    assert Artifact.of(path) == Artifact(uri, "%SRCROOT%")
    assert Artifact.of(tmp_path / path) == Artifact(uri, "%SRCROOT%")
    assert Artifact.of(path).location() == {"uri": uri, "uriBaseId": "%SRCROOT%"}


def test_elsewhere_it_is_a_file_uri(tmp_path, monkeypatch):
    """Absolute, without a base, and no file of the repository."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = Artifact.of("../there/a b.parquet")
    assert found.location() == {"uri": f"{tmp_path.as_uri()}/there/a%20b.parquet"}
    assert (found.file, found.remote_bases) == ("", ())


def test_a_link_is_not_followed(tmp_path, monkeypatch):
    """``runs/latest`` is the same artifact whichever run it points to."""
    monkeypatch.chdir(tmp_path)
    Path("dated").mkdir()
    Path("latest").symlink_to("dated")
    assert Artifact.of("latest/trace.parquet").uri == "latest/trace.parquet"


def test_the_current_folder_may_be_reached_by_a_link(tmp_path, monkeypatch):
    """A path through a link to the current folder is below it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    assert Artifact.of(tmp_path / "link" / "trace.parquet") == Artifact("trace.parquet", "%SRCROOT%")


@pytest.mark.parametrize(
    ("url", "uri", "base"),
    [
        ("s3://bucket/a b/t.parquet", "a%20b/t.parquet", "s3://bucket/"),
        ("s3://bucket/run-?/t.parquet", "run-%3F/t.parquet", "s3://bucket/"),
        ("https://me:secret@host:81/a%20b.parquet?signature=x#y", "a%20b.parquet", "https://host:81/"),
        ("memory://t.parquet", "t.parquet", "memory://"),
    ],
)
def test_a_url_is_split_and_keeps_no_secret(url, uri, base):
    """Scheme and host are the base; what opens or signs it is left out."""
    assert Artifact.of(url) == Artifact(uri, base)


@given(text=anything)
def test_plain_text_is_printable_and_means_the_same(text):
    """What prints is unchanged; the rest is an escape that Python reads back."""
    made = plain(text)
    assert made.isprintable()
    if text.isprintable():
        assert made == text
    elif "\\" not in text:
        read = (part.encode().decode("unicode_escape") if part.isascii() else part for part in _parts(made))
        assert "".join(read) == text


def _parts(text: str) -> list[str]:
    """ASCII and other stretches of a text, which the escapes do not cross."""
    parts: list[str] = []
    for one in text:
        if parts and parts[-1].isascii() == one.isascii():
            parts[-1] += one
        else:
            parts.append(one)
    return parts
