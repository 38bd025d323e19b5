"""Opens and checks stores, and describes their errors. obstore talks to S3, GCS and Azure.

Credentials come from the usual places of those clouds (environment, files) and are never logged.

"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hybridkv.tiers.contract import Failure, FailureReason
from hybridkv.tiers.errors import TierConfigurationError, is_shortage
from hybridkv.tiers.files.directory import ForeignFileError
from hybridkv.tiers.object.directory_store import DirectoryStore, path_of
from hybridkv.tiers.object.options import ObjectOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    Store = ObjectStore | DirectoryStore


_RETRIES = 1
_SCHEME = re.compile(r"[a-z][a-z0-9]*:")
_STATUS = " - Server returned non-2xx status code: "
_REQUEST = "Error performing "
_CODE = re.compile(r"<Code>([^<]{1,100})")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_MAX_STATUS_CHARACTERS = 200
_MAX_CHARACTERS = 500
_PROBE = b"hybridkv proves what this store can do"


def open_object_store(url: str, settings: dict[str, str], options: ObjectOptions, has_secret: bool) -> Store:
    """Open a store by its URL.

    Args:
        url: "s3://bucket/prefix", "gs://...", "az://account/container/prefix" or "file:///directory".
        settings: settings of the client, by obstore's names: "endpoint", "region", ...
        options: limits.
        has_secret: True if content is sealed with a secret, so that other users may share a directory.

    Raises:
        TierConfigurationError: obstore is not installed, the URL or a setting is invalid, or a directory cannot
            be used.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise TierConfigurationError(
            "url", "the package obstore, which reads this URL", str(error), "pip install obstore"
        ) from error
    if _SCHEME.match(url) is None:  # obstore ignores case and white space, and would open a directory unchecked
        raise TierConfigurationError("url", "a scheme in lower case, such as s3:// or file://", repr(url))
    if is_directory(url):
        directory = DirectoryStore(path_of(url), may_be_shared=has_secret)
        directory.check()
        return directory
    more: dict[str, Any] = dict(settings)
    more["client_options"] = {
        "timeout": f"{options.request_timeout_s:g}s",
        "connect_timeout": f"{options.connect_timeout_s:g}s",
        "allow_http": settings.get("endpoint", url).startswith("http:"),
    }
    more["retry_config"] = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=options.request_timeout_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    }
    if url.startswith(("s3:", "s3a:")):
        more.setdefault("virtual_hosted_style_request", not settings.get("endpoint"))
        # TLS or a trusted network protects the bytes, and every chunk has a checksum. A digest for each request would
        # take two thirds of the CPU time of a put.
        more.setdefault("unsigned_payload", True)
    try:
        return from_url(url, **more)
    except Exception as error:  # obstore's errors, and those of its libraries
        raise TierConfigurationError("url", "a store that obstore can open", url, describe(error)) from error


def is_directory(url: str) -> bool:
    """True if a URL names a directory."""
    return url.startswith("file:")


def check_store(store: Store, cache: str) -> str | None:
    """Check that a store has the needed features: conditional puts and range reads. Writes a short-lived object.

    Returns:
        None if the store has them. Otherwise the reason why the store can be read but not written: it is full, or the
        credentials are read-only.

    Raises:
        TierConfigurationError: a feature is missing, or the credentials are refused.
        Exception: (obstore or the system) the check could not be done: the store is unreachable or failing.

    """
    from obstore import exceptions

    name = f"{cache}/proof/{uuid.uuid4().hex}"
    try:
        try:
            store.put(name, _PROBE, mode="create", use_multipart=False)
        except (FileNotFoundError, ForeignFileError, exceptions.InvalidPathError, exceptions.NotSupportedError):
            raise
        except Exception as error:
            return _why_only_read(store, name, error)
        try:
            store.put(name, _PROBE[::-1], mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError:
            pass
        else:
            raise _lacks("puts only what is not there yet (If-None-Match)", "it wrote over an object")
        part = b"".join(map(bytes, store.get(name, options={"range": (9, 15)}).stream()))
        if part != _PROBE[9:15]:
            raise _lacks("reads a range of an object", f"it gave {len(part)} other bytes")
        store.delete([name])
    except (
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
        exceptions.InvalidPathError,
        exceptions.NotSupportedError,
        FileNotFoundError,
        PermissionError,
        ForeignFileError,
    ) as error:
        raise _lacks("can be used with these credentials", describe(error)) from error
    return None


def clock_ahead_s(store: Store, cache: str) -> float:
    """Seconds by which the store's clock is ahead of this host's clock.

    In a directory, touches the lock file, which also works on a full disk. In other stores, and if the
    lock file cannot be touched, writes a short-lived object. 0 for a directory that cannot be written at all.

    Raises:
        Exception: (obstore) a request failed.
    """
    if isinstance(store, DirectoryStore):
        with contextlib.suppress(OSError):
            return store.clock_ahead_s()
        with contextlib.suppress(OSError):  # the lock file is another user's
            return _clock_ahead_s(store, cache)
        return 0.0
    return _clock_ahead_s(store, cache)


def _clock_ahead_s(store: Store, cache: str) -> float:
    name = f"{cache}/proof/{uuid.uuid4().hex}"
    store.put(name, b"hybridkv reads this store's clock", use_multipart=False)
    try:
        now_s = time.time()
        return store.head(name)["last_modified"].timestamp() - now_s
    finally:
        store.delete([name])


def _why_only_read(store: Store, name: str, refused: Exception) -> str:
    """Reason why a put was refused. Raises if a read fails too, or if the put failed for a shortage of this process."""
    if is_shortage(refused):
        raise refused
    try:
        store.get(name)
    except FileNotFoundError:
        return describe(refused)
    return describe(refused)  # the put succeeded despite the error


def _lacks(what: str, got: str) -> TierConfigurationError:
    return TierConfigurationError("url", f"a store that {what}", got, "docs/guides/fleet.md says which stores do")


def failure_of(error: BaseException, doing: str) -> Failure:
    """Convert an error of a store to a `Failure`."""
    if isinstance(error, FileNotFoundError):
        return Failure(FailureReason.MISSING, f"{doing}: there is no such object")
    reason = FailureReason.BUSY if is_shortage(error) else FailureReason.IO
    return Failure(reason, f"{doing}: {describe(error)}")


def describe(error: BaseException) -> str:
    """Describe an error in one line: the server's status, code and message first, then the request.

    The rest of the response is left out, because some servers repeat the signing keys of the request.

    """
    text = " ".join(str(error).partition("\n\nDebug source:")[0].split())
    before, separator, answer = text.partition(_STATUS)
    if not separator:
        before, separator, answer = text.partition(" - ")
    if separator and _REQUEST in before:
        status, _, body = answer.partition(": <")
        said = [found[1] for found in (_CODE.search(body), _MESSAGE.search(body)) if found]
        text = f"{': '.join([status[:_MAX_STATUS_CHARACTERS], *said])}; {before}"
    return f"{type(error).__name__}: {text[:_MAX_CHARACTERS]}"
