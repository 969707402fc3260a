"""A trace that lies elsewhere: what a URL names is copied here by fsspec, in any protocol it knows."""

from __future__ import annotations

import glob
from importlib import import_module
from pathlib import Path
from typing import Any

from lineage.errors import first_line
from lineage.parts import OPEN_SUFFIX, PARTS, SEALED_SUFFIX
from lineage.run import INFO_FILE, TRACE_FILE
from lineage.state import STATE_SUFFIX
from lineage.traces.errors import TraceError

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hf": "huggingface_hub",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
_PART_ENDS = (SEALED_SUFFIX, OPEN_SUFFIX)


def is_remote(path: str) -> bool:
    """True for a URL."""
    return "://" in path


def fetch(url: str, into: Path) -> list[Path]:
    """Copy the trace a URL names into a folder.

    Args:
        url: of a Parquet file, a run folder, a folder of parts, or a glob of Parquet files.
        into: an empty folder.

    Returns:
        The copies, to be opened as one trace: files, or the folder itself.

    Raises:
        TraceError: fsspec or the package of the protocol is missing; nothing is there, or it cannot be read.
    """
    files, name = _file_system(url)
    try:
        if name.endswith(_PART_ENDS):
            name = name.rpartition("/")[0]  # a part alone says little
        if glob.has_magic(name) and not url.startswith("http"):
            return _copy_each(files, sorted(files.glob(name)), into)
        if not files.exists(name):
            return []
        if files.isfile(name):
            return _copy_each(files, [name], into)
        return _copy_folder(files, name, into)
    except TraceError:
        raise
    except FileNotFoundError as error:
        raise TraceError(f"{url}: it changed while it was copied; try again") from error
    except Exception as error:  # each protocol has errors of its own
        raise TraceError(f"{url}: cannot be read ({type(error).__name__}: {first_line(error)})") from error


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the name of what it names there."""
    protocol = url.partition("://")[0].rpartition("::")[2]
    package = _PACKAGES.get(protocol)
    mend = f"pip install fsspec{f' {package}' if package else ''}"
    try:
        return import_module("fsspec.core").url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:
        raise TraceError(f"{url}: reading {protocol}:// needs a package that is missing: {mend}") from error
    except ValueError as error:
        raise TraceError(f"{url}: {first_line(error)}") from error
    except Exception as error:
        raise TraceError(f"{url}: cannot be opened ({type(error).__name__}: {first_line(error)})") from error


def _copy_each(files: Any, names: list[str], into: Path) -> list[Path]:
    copies = []
    for number, name in enumerate(names):
        copies.append(into / (f"{number:05d}-" if len(names) > 1 else "") / Path(name).name)
        copies[-1].parent.mkdir(exist_ok=True)  # two folders may have files of one name
        files.get_file(name, str(copies[-1]))
    return copies


def _copy_folder(files: Any, root: str, into: Path) -> list[Path]:
    """Copy what belongs to a trace: its files, or the states and then the parts, as a reader on the spot would."""
    found = {name[len(root) :].strip("/"): name for name in files.find(root, maxdepth=2)}
    if TRACE_FILE in found:
        return _copy_each(files, [found[TRACE_FILE]], into)
    for place in sorted(found, key=lambda place: (not place.endswith(STATE_SUFFIX), place)):
        folder, _, name = place.rpartition("/")
        ours = name == INFO_FILE or name.endswith((*_PART_ENDS, STATE_SUFFIX))
        if (folder in ("", PARTS) and ours) or (not folder and name.endswith(".parquet")):
            (into / folder).mkdir(exist_ok=True)
            files.get_file(found[place], str(into / place))
    return [into]
