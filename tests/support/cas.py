"""What `hf_xet` sends, taken apart as the Xet protocol is specified: chunks, and of which of them a file is made.

<https://huggingface.co/docs/xet> describes both formats. Nothing of it is used by finray; a Hub of our own reads with
it what the real client has uploaded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import pyarrow

# A record of a shard; of its flags, that records of another kind follow.
RECORD = 48
_WITH_VERIFICATION, _WITH_DIGEST = 1 << 31, 1 << 30


def hex_of(digest: bytes) -> str:
    """A hash as it stands in a URL: four little-endian numbers of 64 bits."""
    return "".join(f"{part:016x}" for part in struct.unpack("<4Q", digest))


def chunks_of(xorb: bytes) -> list[bytes]:
    """The chunks of a xorb, each behind a header of 8 bytes: version, its size here, how it is compressed, its size."""
    found, at = [], 0
    while at < len(xorb):
        version, kind = xorb[at], xorb[at + 4]
        packed, size = (int.from_bytes(xorb[at + start : at + start + 3], "little") for start in (1, 5))
        assert version == 0, version
        data = xorb[at + 8 : at + 8 + packed]
        if kind:
            data = pyarrow.decompress(data, size, codec="lz4", asbytes=True)
        if kind == 2:
            data = _ungrouped(data)
        assert len(data) == size
        found.append(data)
        at += 8 + packed
    return found


def _ungrouped(data: bytes) -> bytes:
    """Bytes whose every first of four stood first, then every second, and so on."""
    whole, at = bytearray(len(data)), 0
    for first in range(4):
        count = len(range(first, len(data), 4))
        whole[first::4] = data[at : at + count]
        at += count
    return bytes(whole)


def files_of(shard: bytes, xorbs: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """The files of a shard: the SHA-256 that the client says, and the bytes that its xorbs make.

    Raises:
        KeyError: a xorb has not been uploaded.
    """
    at = RECORD
    while shard[at : at + 32] != b"\xff" * 32:
        flags, entries = struct.unpack_from("<II", shard, at + 32)
        at += RECORD
        whole = bytearray()
        for _ in range(entries):
            _, size, start, end = struct.unpack_from("<IIII", shard, at + 32)
            part = b"".join(chunks_of(xorbs[hex_of(shard[at : at + 32])])[start:end])
            assert len(part) == size
            whole += part
            at += RECORD
        at += RECORD * entries * bool(flags & _WITH_VERIFICATION)
        assert flags & _WITH_DIGEST
        yield hex_of(shard[at : at + 32]), bytes(whole)
        at += RECORD
