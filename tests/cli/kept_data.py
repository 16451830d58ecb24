"""Directories as an engine leaves them: frames sealed and stored by the disk tier itself."""

import hashlib
import json
import mmap
from pathlib import Path

from kvkeep.cli.main import main
from kvkeep.codecs.frame import frame_nbytes, seal
from kvkeep.keys import Namespace
from kvkeep.memory.pool import HEADER_BYTES
from kvkeep.tiers.disk import DiskTier
from kvkeep.types import ChunkKey, Digest

PAYLOAD_NBYTES = 5000
FRAME_NBYTES = frame_nbytes(PAYLOAD_NBYTES)
TOKEN = "0123456789abcdef"


def namespace_of(label="tiny", **fields):
    return Namespace.of(label, {"chunk_tokens": "16", "dtype": "torch.bfloat16", **fields})


SPACE = namespace_of()
OTHER = namespace_of("other/model", kv_dtype="fp8")


def digest_of(number):
    return Digest(hashlib.sha256(b"%d" % number).digest())


def frame_of(namespace, number, rank=0, payload_nbytes=PAYLOAD_NBYTES):
    frame = memoryview(mmap.mmap(-1, frame_nbytes(payload_nbytes)))
    content = hashlib.shake_128(b"%d %d" % (number, rank)).digest(payload_nbytes)
    frame[HEADER_BYTES : HEADER_BYTES + payload_nbytes] = content
    return seal(
        frame,
        namespace_digest=namespace.digest,
        digest=digest_of(number),
        rank=rank,
        num_tokens=16,
        raw_nbytes=payload_nbytes,
        payload_nbytes=payload_nbytes,
    )


def keep(*roots, namespace=SPACE, numbers=range(4), ranks=1):
    """Store chunks as the engine does; the files, in the order of `numbers`, then ranks."""
    tier = DiskTier(roots, 1 << 30)
    tier.open()
    tier.describe(namespace.name, {"label": namespace.label, **dict(namespace.fields)})
    keys = [ChunkKey(namespace.name, rank, digest_of(n)) for n in numbers for rank in range(ranks)]
    frames = [frame_of(namespace, n, rank) for n in numbers for rank in range(ranks)]
    tier.store(keys, frames)
    tier.close()
    return [path_of(roots, key) for key in keys]


def path_of(roots, key):
    digest = key.digest.hex()
    tail = f"{key.namespace}/r{key.rank}/{digest[:2]}/{digest}.kv"
    return next(Path(root) / tail for root in roots if (Path(root) / tail).exists())


def leave_temp(chunk_file, token=TOKEN):
    temp = Path(f"{chunk_file}.{token}-7.tmp")
    temp.write_bytes(b"half")
    return temp


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def files_below(root):
    return {path for path in Path(root).rglob("*") if path.is_file()}


def run_json(capsys, *argv):
    """Exit status and the one document that stdout is."""
    status = main([*map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


def run(capsys, *argv):
    """Exit status, lines of stdout, lines of stderr."""
    status = main([*map(str, argv)])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err.splitlines()
