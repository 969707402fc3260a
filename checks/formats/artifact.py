"""The place of a trace as a URI, as SARIF and GitHub want it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from urllib.parse import quote, quote_from_bytes

_ROOT = "%SRCROOT%"


@dataclass(frozen=True)
class Artifact:
    """A trace file or folder.

    Attributes:
        uri: relative to ``base`` where there is one, with what a URI cannot hold escaped.
        base: ``%SRCROOT%`` under the current folder, scheme and host of a URL, else empty.
    """

    uri: str
    base: str = ""

    @classmethod
    def of(cls, path: Path | str) -> Artifact:
        """Where a trace is.

        Args:
            path: as it was given. Links in it are not followed: ``runs/latest`` is to be the same artifact every time.
        """
        if "://" in str(path):
            return cls._remote(str(path))
        whole = Path(os.path.abspath(path))
        for root, place in ((Path.cwd(), whole), (Path.cwd().resolve(), whole.resolve())):
            if place.is_relative_to(root):
                return cls(_escaped(place.relative_to(root)), _ROOT)
        return cls(whole.as_uri())

    @classmethod
    def _remote(cls, url: str) -> Artifact:
        """A URL, without what signs or opens it. GitHub refuses a file with an absolute URI of another scheme than the
        checkout's, so scheme and host are the base.
        """
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        web = scheme in ("http", "https")
        path = re.split("[?#]", path)[0] if web else path
        host = quote(host.rpartition("@")[2], safe=":[]", errors="surrogatepass")
        if not path:
            return cls(host, f"{scheme}://")
        return cls(quote(path, safe="/%" if web else "/", errors="surrogatepass"), f"{scheme}://{host}/")

    @property
    def remote_bases(self) -> tuple[str, ...]:
        """The base, where it has to be spelled out."""
        return (self.base,) if self.base not in ("", _ROOT) else ()

    @property
    def file(self) -> str:
        """The path from the current folder, for people; empty where it is not below it."""
        return self.uri if self.base == _ROOT else ""

    def location(self) -> dict[str, str]:
        """SARIF's ``artifactLocation``."""
        return {"uri": self.uri} | ({"uriBaseId": self.base} if self.base else {})


def _escaped(path: PurePath) -> str:
    return quote_from_bytes(os.fsencode(path.as_posix()), safe="/")
