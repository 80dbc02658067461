"""Access rules: API keys, the host names under which a server is reached, and the origins whose
pages may use it.

A browser sends requests for any page that is open in it. A server that a browser can reach, above
all one on a loopback address, is protected by these rules:

- A JSON body needs the JSON content type. Before a browser sends it for a page of another site, it
  sends a preflight, which is refused. Therefore such a page cannot make the browser send JSON
  (`body_reader.require_json`), unless `serve.cors_origins` names the site.
- A page may point its own host name at the address of this server, and is then of the same site
  (DNS rebinding). But the browser sends that name as `Host`, and unknown names are refused. IP
  addresses are accepted, because nobody can point them elsewhere.
- `Origin` names the page's site. Only pages of this server and of this machine may use the admin
  API.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket

from starlette.requests import Request

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.server.api_keys import ApiKeys
from swell.cluster.text.params.sampling_params import DERIVED_SALT
from swell.configs.error_text import shown
from swell.configs.runtime.secret import SecretText
from swell.configs.schema import ServeConfig

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::[0-9]*)?", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://([^\s/\\?#@,]+)", re.IGNORECASE)


class Access:
    """The access rules of one server, for users and operators. Raises HTTPError 401 and 403."""

    def __init__(self, config: ServeConfig) -> None:
        own = {"localhost", socket.gethostname().lower(), config.host.lower()}
        self._hosts = own | {name.lower() for name in config.allowed_hosts}
        self._origins = {origin.lower().rstrip("/") for origin in config.allowed_origins}
        self._checks_host = bool(config.allowed_hosts) or _is_loopback(config.host)
        self._shares_prefixes = config.share_prefixes == "all"
        self._user_keys = ApiKeys(config.api_keys_file, "serve.api_keys_file")
        self._admin_keys = ApiKeys(config.admin_keys_file, "serve.admin_keys_file")
        self._admin_closed = config.admin_keys_file is None and config.api_keys_file is not None

    def check_user(self, request: Request) -> SecretText:
        """Checks a request for the model. A server on a network cannot know all of its names, so
        the host is only checked if names are configured or the server listens on a loopback
        address. Returns the name of the user's key: responses stored under it cannot be found with
        another key."""
        if self._checks_host:
            self._check_host(request)
        return self._user_keys.check(request)

    def prefix_salt(self, owner: SecretText, cache_salt: str | None) -> str | None:
        """Returns the cache salt of a request of the user `owner` (from `check_user`) that sent
        `cache_salt`. Users do not share cached prefixes, unless `serve.share_prefixes` allows
        it."""
        if not owner or self._shares_prefixes:
            return cache_salt
        text = f"{owner} {'' if cache_salt is None else 'salt ' + cache_salt}"
        return DERIVED_SALT + hashlib.blake2b(text.encode(), person=b"swell-key").hexdigest()

    def check_admin(self, request: Request) -> None:
        """Checks a request of an operator, which needs a key of `serve.admin_keys_file`. If only
        `serve.api_keys_file` is set, no key is accepted: a user's key is not an operator's."""
        self._check_host(request)
        self._check_origin(request)
        if self._admin_closed:
            raise HTTPError(
                403,
                "the admin API is closed: serve.api_keys_file is set, and user keys do not open "
                "the admin API; set serve.admin_keys_file to a file with operator keys",
                "no_admin_keys",
            )
        self._admin_keys.check(request)

    def _check_host(self, request: Request) -> None:
        for host in request.headers.getlist("host"):
            name = host_name(host)
            if name and not (_is_address(name) or name in self._hosts or "*" in self._hosts):
                raise HTTPError(
                    403,
                    f"the host name {shown(name)} is not allowed; add it to serve.allowed_hosts, "
                    "or use the server's IP address",
                    "host_not_allowed",
                )

    def _check_origin(self, request: Request) -> None:
        for origin in request.headers.getlist("origin"):
            site = origin.lower()
            name, place = _site(site)
            hosts = [host.lower() for host in request.headers.getlist("host") if host]
            here = _is_loopback(name) or place in hosts
            if not (here or site in self._origins or "*" in self._origins):
                raise HTTPError(
                    403,
                    f"pages of {shown(origin)} may not use the admin API; add the origin to "
                    "serve.allowed_origins",
                    "origin_not_allowed",
                )


def host_name(host: str) -> str:
    """Returns the name in a `Host` header, without port and trailing dot. A malformed header is
    returned as it is, and matches no known name."""
    found = _HOST.fullmatch(host)
    if found is None:
        return host.lower()
    return (found[1] or found[2]).lower().removesuffix(".")


def _site(origin: str) -> tuple[str, str]:
    """Returns the host name, and the host name with port. Both are empty for an origin that is not
    a web page of a host, such as `null` or `app://localhost`."""
    found = _ORIGIN.fullmatch(origin)
    return (host_name(found[1]), found[1]) if found else ("", "")


def _is_address(name: str) -> bool:
    try:
        return not getattr(ipaddress.ip_address(name), "scope_id", None)
    except ValueError:
        return False


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)
