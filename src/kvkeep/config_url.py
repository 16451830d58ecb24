"""What is right in the URL of a remote store. The store itself is not asked."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvkeep.config_values import mask_url, nearest

REMOTE_SCHEMES = (
    "redis",
    "rediss",
    "redis-sentinel",
    "valkey",
    "kvkeep",
    "lm",
    "mooncakestore",
    "s3",
    "fs",
)
_EXAMPLES = {
    "redis-sentinel": "redis-sentinel://host1:26379,host2:26379",
    "kvkeep": "kvkeep://host:7700",
    "lm": "lm://host:65432",
    "mooncakestore": "mooncakestore://host:50051",
    "s3": "s3://bucket/folder",
    "fs": "fs:///mnt/shared/kvkeep",
}


def remote_url_problem(url: str) -> str | None:
    """What is wrong with `url`, with its secrets masked; None if nothing is.

    Every scheme but `fs` needs a host, or several with commas between; `fs` needs a folder
    (LMCache puts a host before it, which is allowed and means nothing).
    """
    read = repr(mask_url(url))
    scheme, found, rest = url.partition("://")
    scheme = scheme.lower()
    if not found:
        return f"{read} has no scheme; write for example redis://host:6379"
    if scheme not in REMOTE_SCHEMES:
        known = ", ".join(REMOTE_SCHEMES)
        return f"{read} has an unknown scheme; {nearest(scheme, REMOTE_SCHEMES)} (known: {known})"
    example = _EXAMPLES.get(scheme, f"{scheme}://host:6379")
    if any(ord(letter) <= 32 for letter in url):
        return f"{read} holds white space; write for example {example}"
    if scheme == "fs":
        has_folder = rest.partition("/")[2].partition("?")[0].strip("/")
        return None if has_folder else f"{read} names no folder; write for example {example}"
    if not all(_is_address(host) for host in _hosts(rest)):
        hint = " (in a password, / ? # and @ are written %2F %3F %23 %40)" if "@" in rest else ""
        return f"{read} has no right host and port; write for example {example}{hint}"
    return None


def _hosts(rest: str) -> list[str]:
    for mark in "/?#":
        rest = rest.partition(mark)[0]
    return rest.rpartition("@")[2].split(",")


def _is_address(host: str) -> bool:
    """Whether `host` is a name or an address, with a port from 1 to 65535 or none."""
    try:
        parts = urlsplit(f"//{host}")
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
