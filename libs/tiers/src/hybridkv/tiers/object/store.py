"""The one module that speaks with an object store: obstore, which speaks with S3, GCS, Azure and local directories.

Credentials come from where those clouds have them, the environment or files, and are never logged.
"""

from __future__ import annotations

import logging
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hybridkv.tiers.contract import Failure, FailureReason
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.shortage import is_shortage

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger(__name__)

_RETRIES = 1
_PROOF = b"hybridkv proves what this store can do"


def open_object_store(url: str, settings: dict[str, str], options: ObjectOptions) -> ObjectStore:
    """A store by its URL.

    Args:
        url: "s3://bucket/prefix", "gs://...", "az://account/container/prefix" or "file:///directory".
        settings: of the client, by obstore's names: "endpoint", "region", ...
        options: bounds.

    Raises:
        TierConfigurationError: obstore is not installed, or the URL or a setting is not understood.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise TierConfigurationError(
            "url", "obstore, which cannot be imported", str(error), "pip install 'hybridkv-tiers[object]'"
        ) from error
    more: dict[str, Any] = dict(settings)
    if not url.startswith(("file:", "memory:")):
        is_plain = settings.get("endpoint", url).startswith("http:")
        more["client_options"] = {
            "timeout": f"{options.request_timeout_s:g}s",
            "connect_timeout": f"{options.connect_timeout_s:g}s",
            "allow_http": is_plain,
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
    elif url.startswith("file:"):
        more["mkdir"] = True
    if url.startswith(("s3:", "s3a:")):
        more.setdefault("virtual_hosted_style_request", not settings.get("endpoint"))
        # TLS or a trusted network carries the bytes, and every chunk has a checksum: a digest for each request costs
        # two thirds of a store's CPU.
        more.setdefault("unsigned_payload", True)
    try:
        return from_url(url, **more)
    except Exception as error:  # obstore's own, and those of what it is made of
        raise TierConfigurationError("url", "a store that obstore can open", url, first_line(error)) from error


def prove(store: ObjectStore, cache: str) -> None:
    """Finds out that a store does what this tier needs: conditional puts and ranges.

    Raises:
        TierConfigurationError: it does not, or lets nobody in who comes with these credentials.
        Exception: of obstore, where that could not be found out: it was not reached, or is in trouble.
    """
    import obstore
    from obstore import exceptions

    name = f"{cache}/proof/{uuid.uuid4().hex}"
    try:
        obstore.put(store, name, _PROOF, mode="create", use_multipart=False)
        try:
            obstore.put(store, name, _PROOF[::-1], mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError:
            pass
        else:
            raise _lacks("puts only what is not there yet (If-None-Match)", "it wrote over an object")
        part = bytes(obstore.get_range(store, name, start=9, end=15).to_bytes())
        if part != _PROOF[9:15]:
            raise _lacks("reads a range of an object", f"it gave {len(part)} other bytes")
        obstore.delete(store, [name])
    except (
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
        exceptions.InvalidPathError,
        exceptions.NotSupportedError,
        FileNotFoundError,
    ) as error:
        raise _lacks("can be written to, read from and deleted from", first_line(error)) from error


def _lacks(what: str, got: str) -> TierConfigurationError:
    return TierConfigurationError("url", f"a store that {what}", got, "docs/guides/fleet.md says which stores do")


def failure_of(error: BaseException, doing: str) -> Failure:
    """What a store said, as a value."""
    if isinstance(error, FileNotFoundError):
        return Failure(FailureReason.MISSING, f"{doing}: there is no such object")
    reason = FailureReason.BUSY if is_shortage(error) else FailureReason.IO
    return Failure(reason, f"{doing}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """What an error says, without where in obstore it says so."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"
