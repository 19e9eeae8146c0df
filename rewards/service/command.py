"""`flowalign serve-reward NAME`: its arguments, its port, and who may call.

This module imports no diffusers, transformers or fastapi, so that a reward can be served from the
old environment that its model needs.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

from flowalign.rewards import build, check
from flowalign.rewards.service.wire import TOKEN, Limits, read_token
from flowalign.system.packages import hint

if TYPE_CHECKING:
    from flowalign.rewards.service.server import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 ended, 1 no reward could be loaded or no port be had, 2 refused, or a package
    is missing."""
    try:
        from flowalign.rewards.service.server import Settings, server
    except ModuleNotFoundError as error:
        print(
            f"flowalign serve-reward: this needs fastapi and uvicorn ({error}). {hint('uvicorn')}",
            file=sys.stderr,
        )
        return 2
    args = _parser(Settings("")).parse_intermixed_args(argv)  # NAME --port 8000 key=value
    try:
        options = parse_options(args.options, args.pairs)
        check(args.name, options)
        token = read_token(os.environ)
        if token is None and not args.insecure and not _is_loopback(args.host):
            raise ValueError(
                f"--host {args.host} can be reached from other machines, and no token guards it. "
                f"Set {TOKEN} (on the client too), or say --insecure."
            )
    except ValueError as error:
        print(f"flowalign serve-reward: {error}", file=sys.stderr)
        return 2
    settings = Settings(
        name=args.name,
        options=options,
        token=token,
        limits=Limits(images=args.max_batch, pixels=args.max_pixels, bytes=args.max_bytes),
        queue=args.queue,
        max_seconds=args.max_seconds,
        read_seconds=args.read_seconds,
    )
    try:
        listener = _bind(args.host, args.port)  # before the model loads, as it may fail
        web = server(build(args.name, **options), settings)
    except (OSError, ImportError, ValueError) as error:
        print(f"flowalign serve-reward: {error}", file=sys.stderr)
        return 1
    listener.listen()  # whoever reads the line below may call at once
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    guard = f"the token in {TOKEN}" if token else "no token"
    print(f"serving reward {args.name} on http://{address}, guarded by {guard}", flush=True)
    web.run(sockets=[listener])
    return 0


def _parser(defaults: Settings) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "flowalign serve-reward",
        description="Serve a reward over HTTP, for `name: remote` in a config elsewhere. "
        f"The token that callers must show is read from {TOKEN}.",
    )
    parser.add_argument("name", help="a reward's name, or its path as package.module:attribute")
    parser.add_argument("pairs", nargs="*", metavar="key=value", help="options of the reward")
    parser.add_argument("--options", default="{}", help="options of the reward, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--insecure", action="store_true", help="serve other machines untokened")
    parser.add_argument("--header-seconds", help=argparse.SUPPRESS)  # of past releases; no effect
    for flag, default, text in (
        ("--max-batch", defaults.limits.images, "images a request"),
        ("--max-bytes", defaults.limits.bytes, "of a request"),
        ("--max-pixels", defaults.limits.pixels, "of an image"),
        ("--max-seconds", defaults.max_seconds, "for a request, waiting included"),
        ("--read-seconds", defaults.read_seconds, "for a request to arrive"),
        ("--queue", defaults.queue, "requests at once"),
    ):
        parser.add_argument(
            flag, type=type(default), default=default, help=f"{text} (default: {default:g})"
        )
    return parser


def parse_options(text: str, pairs: Sequence[str]) -> dict[str, Any]:
    """A JSON object and key=value pairs (the value as YAML) -> options. Raises ValueError."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--options {text!r} is no JSON: {error}.") from error
    if not isinstance(options, dict):
        raise ValueError(f'--options {text!r} is no JSON object such as {{"model": "tiny"}}.')
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{pair!r} is no option; write key=value.")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"the value of {pair!r} cannot be read: {error}.") from error
    return options


def _is_loopback(host: str) -> bool:
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(f"--host {host!r}: {error}.") from error
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the port but does not listen: callers are let in once all is loaded."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # asyncio sets TCP_NODELAY only on a socket that names its protocol; else +40 ms a request
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot have {host}, port {port}: {error}.") from error
    return listener
