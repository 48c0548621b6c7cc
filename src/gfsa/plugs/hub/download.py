"""Find the two files of saved filters: in a folder here, or in a repository of the Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gfsa.plugs.filter_files import DESCRIPTION, MOST_DESCRIPTION, MOST_TENSORS, TENSORS

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MOST = {DESCRIPTION: MOST_DESCRIPTION, TENSORS: MOST_TENSORS}


def filter_folder(path: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder with the filters of ``path``, which are downloaded if it is a name on the Hub.

    A folder that exists here comes first. A ``Path``, and a string that is not ``user/name``, are
    always folders.
    """
    if not is_repository(path):
        if revision is not None or token is not None:
            raise ValueError(
                "revision and token are for a repository of the Hub ('user/name'), but "
                f"{path} is a folder"
            )
        return Path(path)
    return _download(str(path), revision, token)


def is_repository(path: str | Path) -> bool:
    """Whether ``path`` means a repository of the Hub: ``user/name``, and no folder here."""
    return (
        isinstance(path, str)
        and _REPOSITORY.fullmatch(path) is not None
        and ".." not in path
        and not Path(path).exists()
    )


def hub_library(name: str) -> Any:
    """``huggingface_hub``, or an error that says what ``name`` needs it for."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(f"{name} needs huggingface_hub: pip install huggingface_hub") from error
    return huggingface_hub


def _download(name: str, revision: str | None, token: str | None) -> Path:
    try:
        hub = hub_library(f"{name!r} is no folder here; reading it from the Hub")
    except ImportError as error:
        raise FileNotFoundError(str(error)) from error
    try:
        folder = _file(hub, name, DESCRIPTION, revision, token).parent
        # the folder is named after the commit: both files are of one save
        _file(hub, name, TENSORS, folder.name, token)
    # an OSError: no such repository, revision or file, no access, no connection
    except OSError as error:
        where = name if revision is None else f"{name} at {revision!r}"
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"{where} is neither a folder here with filters that gfsa.save wrote, nor can they be "
            f"read from the Hub: {type(error).__name__}: {reason:.300}"
        ) from error
    return folder


def _file(hub: Any, name: str, file: str, revision: str | None, token: str | None) -> Path:
    """A file of a repository, from the cache if the Hub gives no answer.

    A file that is too large for filters is refused before it is downloaded.
    """
    try:
        found = hub.get_hf_file_metadata(hub.hf_hub_url(name, file, revision=revision), token=token)
    except Exception as error:
        if not _is_no_answer(hub, error):
            raise
        return _cached(hub, name, file, revision, error)
    if found.size is not None and found.size > _MOST[file]:
        raise ValueError(
            f"{file} of {name} has {found.size} bytes; filters are a few numbers per head, more "
            f"than {_MOST[file]} is refused"
        )
    return Path(hub.hf_hub_download(name, file, revision=revision, token=token))


def _cached(hub: Any, name: str, file: str, revision: str | None, silence: Exception) -> Path:
    """A file that was downloaded before, without another attempt to reach the Hub."""
    try:
        return Path(hub.hf_hub_download(name, file, revision=revision, local_files_only=True))
    except OSError as error:
        raise ConnectionError(
            f"no answer ({silence}), and {file} was not downloaded before"
        ) from error


def _is_no_answer(hub: Any, error: Exception) -> bool:
    """Whether the Hub gave no answer: no connection, or the client is set to be offline."""
    if isinstance(error, hub.errors.HfHubHTTPError):
        return False
    offline = isinstance(error, (hub.errors.OfflineModeIsEnabled, ConnectionError, TimeoutError))
    # the client library of huggingface_hub is httpx, in older versions requests
    return offline or type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests")
