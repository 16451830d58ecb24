"""How near do the memory and disk tiers come to what this machine can do?

    python benchmarks/tiers.py [--dir DIR] [--rounds 5]

Chunks of Qwen3-8B's shape (36 layers, 8 KV heads of 128, bf16: 147,456 B a token) at 16 tokens
(2.36 MB) and at 256 tokens (37.7 MB), the same bytes in all. Each figure is a fraction of a limit
measured beside it, in turn, in every round; the last line has their medians:

memory       put (reserve, gather from paged tensors, publish) and fetch (match, fetch, scatter,
             release) against one plain memcpy of the same bytes; the smaller of the two
disk_load    fetch from disk (match, fetch, wait, verify) against a plain loop of O_DIRECT reads
             of files of the same size: the fastest of 4, 5 and 8 threads, where the tier has 8
disk_store   put to disk until it is written, against a plain loop of O_DIRECT writes
small_chunks bytes a second at 16-token chunks over those at 256 tokens; the smallest of the four

The limits know nothing of checksums, names, frames or an index.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from machine import facts, spread, write

from kvkeep.cache import KVCache
from kvkeep.device.copier import CopyRun
from kvkeep.device.layout import describe_layout
from kvkeep.device.reference import ReferenceCopier, layer_tensor
from kvkeep.hierarchy import ChunkShape, Hierarchy, TierLink
from kvkeep.keys import Namespace
from kvkeep.memory.pool import SlotPool
from kvkeep.policies import make_policy
from kvkeep.tiers.disk import DiskTier
from kvkeep.types import Digest

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 36, 8, 128, 16
TOTAL_TOKENS = 8192  # 1.2 GB: far more than any cache of the processor
THREADS = 4
COMMAND = "python benchmarks/tiers.py"


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Engine:
    """Paged tensors as vLLM 0.32 lays them out on a CPU, and a cache over them."""

    def __init__(self, chunk_tokens: int, folder: Path | None) -> None:
        self.blocks_per_chunk = chunk_tokens // BLOCK_TOKENS
        self.num_chunks = TOTAL_TOKENS // chunk_tokens
        num_blocks = TOTAL_TOKENS // BLOCK_TOKENS
        shape = (LAYERS, num_blocks, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
        storage = torch.zeros(shape, dtype=torch.bfloat16)
        storage.view(torch.int16).random_(0, 1 << 15)
        tensors = [storage[layer] for layer in range(LAYERS)]
        described = [layer_tensor(f"layers.{n}", tensor) for n, tensor in enumerate(tensors)]
        page = storage[0, 0].nbytes
        layout = describe_layout(
            described,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            page_bytes=[page] * LAYERS,
        )
        self.nbytes = storage.nbytes
        self.storage = storage
        chunk = ChunkShape(chunk_tokens, (self.blocks_per_chunk * layout.block_nbytes,))
        pool = SlotPool.create((self.num_chunks + 1) * sum(chunk.slot_bytes), chunk.slot_bytes)
        pool.memory.populate(0, pool.memory.nbytes)
        slots = torch.frombuffer(pool.memory.view, dtype=torch.uint8)
        self.copier = ReferenceCopier(
            layout,
            {storage.untyped_storage().data_ptr(): storage},
            slots,
            slot_bytes=chunk.slot_bytes[0],
            blocks_per_chunk=self.blocks_per_chunk,
        )
        links: list[TierLink] = []
        if folder is not None:
            tier = DiskTier([str(folder)], 64 << 30)
            links = [TierLink.to(tier, num_threads=THREADS, max_store_bytes=1 << 40)]
        namespace = Namespace.of("bench", {})
        self.cache = KVCache(
            pool,
            make_policy("lru", pool.num_slots),
            Hierarchy(links, pool, namespace, chunk),
            chunk,
            keeps_memory=folder is None,
        )
        self.cache.open()
        self.digests: list[Digest] = []
        # Blocks in an order of no use to a prefetcher, as a busy engine has them.
        self.order = torch.randperm(num_blocks).tolist()

    def fresh(self, round_number: int) -> None:
        self.cache.clear_memory()
        self.digests = [
            Digest(round_number.to_bytes(16, "little") + number.to_bytes(16, "little"))
            for number in range(self.num_chunks)
        ]

    def runs(self, slots: tuple[int, ...]) -> list[CopyRun]:
        return [CopyRun(slots, 0, tuple(self.order[: len(slots) * self.blocks_per_chunk]))]

    def put(self) -> None:
        reservation = self.cache.reserve(self.digests, "bench")
        assert reservation is not None
        assert len(reservation.digests) == self.num_chunks
        self.copier.gather(self.runs(reservation.lease.slots))
        self.cache.publish(reservation)

    def put_to_disk(self) -> None:
        """From the slots to the disk: what is in the slots does not matter here."""
        reservation = self.cache.reserve(self.digests, "bench")
        assert reservation is not None
        assert len(reservation.digests) == self.num_chunks
        self.cache.publish(reservation)
        assert self.cache.hierarchy.flush(600)

    def fetch(self) -> None:
        fetch = self.cache.fetch(self.cache.match(self.digests), "bench")
        self.copier.scatter(self.runs(fetch.slots))
        assert len(fetch.slots) == self.num_chunks
        self.cache.release(fetch)

    def fetch_from_disk(self) -> None:
        fetch = self.cache.fetch(self.cache.match(self.digests), "bench")
        while not fetch.done:
            self.cache.wait(1.0)
        assert len(fetch.slots) == self.num_chunks
        assert {source for source, _ in fetch.source_runs()} == {"disk"}
        self.cache.release(fetch)


class PlainDisk:
    """Whole files with O_DIRECT, one call each, on a few threads: what a disk tier could reach."""

    def __init__(self, folder: Path, nbytes: int, count: int) -> None:
        self.folder, self.count = folder, count
        folder.mkdir(parents=True, exist_ok=True)
        self.buffers = [mmap.mmap(-1, nbytes) for _ in range(2 * THREADS)]
        for buffer in self.buffers:
            buffer.write(os.urandom(nbytes))
        self.pool = ThreadPoolExecutor(2 * THREADS)

    def _each(self, work: Callable[[int, mmap.mmap], None], num_threads: int) -> None:
        """Each thread takes files that follow one another, as a tier's batches do."""
        per_thread = -(-self.count // num_threads)

        def lane(number: int) -> None:
            first = number * per_thread
            for file in range(first, min(first + per_thread, self.count)):
                work(file, self.buffers[number])

        list(self.pool.map(lane, range(num_threads)))

    def write(self) -> None:
        def one(file: int, buffer: mmap.mmap) -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
            fd = os.open(self.folder / str(file), flags, 0o644)
            assert os.pwrite(fd, buffer, 0) == len(buffer)
            os.close(fd)

        self._each(one, THREADS)

    def best_read_s(self) -> float:
        """Seconds of the fastest of three loops: some disks like more threads, some fewer."""
        return min(
            timed(functools.partial(self.read, num_threads))
            for num_threads in (THREADS, THREADS + 1, 2 * THREADS)
        )

    def read(self, num_threads: int) -> None:
        def one(file: int, buffer: mmap.mmap) -> None:
            fd = os.open(self.folder / str(file), os.O_RDONLY | os.O_DIRECT)
            assert os.preadv(fd, [buffer], 0) == len(buffer)
            os.close(fd)

        self._each(one, num_threads)

    def clear(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()


def memory_round(engine: Engine, source: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """The limit before and after, since a machine's speed drifts."""
    limit = timed(functools.partial(target.copy_, source))
    put = timed(engine.put)
    limit_after = timed(functools.partial(target.copy_, source))
    fetch = timed(engine.fetch)
    between = (limit + limit_after) / 2
    return {"limit": between, "put": put, "fetch": fetch}


def disk_round(engine: Engine, plain: PlainDisk, *, ours_first: bool) -> dict[str, float]:
    """Both in turn, by turns first: a disk remembers what was done to it just before."""
    plain.clear()
    steps = [
        ("limit_store", lambda: timed(plain.write)),
        ("store", lambda: timed(engine.put_to_disk)),
        ("limit_load", plain.best_read_s),
        ("load", lambda: timed(engine.fetch_from_disk)),
    ]
    if ours_first:
        steps = [steps[1], steps[0], steps[3], steps[2]]
    return {name: work() for name, work in steps}


def measure(folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    gathered: dict[str, dict[str, list[float]]] = {}

    def add(name: str, values: dict[str, float]) -> None:
        for key, value in values.items():
            gathered.setdefault(name, {}).setdefault(key, []).append(value)

    for where in ("memory", "disk"):
        engines = {
            tokens: Engine(tokens, None if where == "memory" else folder / f"kept-{tokens}")
            for tokens in (16, 256)
        }
        source = engines[16].storage.view(-1)
        target = torch.zeros_like(source) if where == "memory" else source[:1]
        plain = {
            tokens: PlainDisk(
                folder / f"plain-{tokens}", engine.cache.pool.slot_bytes[0], engine.num_chunks
            )
            for tokens, engine in engines.items()
            if where == "disk"
        }
        for number in range(rounds + 1):
            for tokens, engine in engines.items():
                engine.fresh(number)
                if where == "memory":
                    figures = memory_round(engine, source, target)
                else:
                    figures = disk_round(engine, plain[tokens], ours_first=number % 2 == 0)
                    engine.cache.hierarchy.links[0].tier.delete(
                        [key for d in engine.digests for key in engine.cache.hierarchy.keys(d)]
                    )
                if number:  # the first round warms up
                    add(f"{where}-{tokens}", figures)
            print(f"{where}: round {number} of {rounds}", flush=True)
        nbytes = engines[16].nbytes
        for engine in engines.values():
            engine.cache.close()
        gathered.setdefault("bytes", {})["all"] = [nbytes]
    return gathered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd(), prefix=".bench-") as folder:
        gathered = measure(Path(folder), options.rounds)
    nbytes = gathered.pop("bytes")["all"][0]

    def ratios(name: str, limit: str, ours: str) -> list[float]:
        figures = gathered[name]
        return [low / high for low, high in zip(figures[limit], figures[ours], strict=True)]

    fractions = {
        f"{name} {ours}": spread(ratios(name, limit, ours))
        for name in gathered
        for limit, ours in (
            [("limit", "put"), ("limit", "fetch")]
            if name.startswith("memory")
            else [("limit_store", "store"), ("limit_load", "load")]
        )
    }
    small = {
        f"{where} {ours}": spread(
            [
                large / little
                for large, little in zip(
                    gathered[f"{where}-256"][ours], gathered[f"{where}-16"][ours], strict=True
                )
            ]
        )
        for where, ours in (
            ("memory", "put"),
            ("memory", "fetch"),
            ("disk", "store"),
            ("disk", "load"),
        )
    }
    rates = {
        name: {key: round(nbytes / spread(times)["median"] / 1e9, 2) for key, times in all_.items()}
        for name, all_ in gathered.items()
    }
    for name, row in rates.items():
        print(f"{name:11} " + "  ".join(f"{key} {rate:.2f} GB/s" for key, rate in row.items()))
    for name, row in {**fractions, **{f"small/{k}": v for k, v in small.items()}}.items():
        print(f"{name:20} {row['median']:.3f}  [{row['q1']:.3f}, {row['q3']:.3f}]")
    worst = {
        "memory": min(
            fractions[f"memory-{t} {w}"]["median"] for t in (16, 256) for w in ("put", "fetch")
        ),
        "disk_load": min(fractions[f"disk-{t} load"]["median"] for t in (16, 256)),
        "disk_store": min(fractions[f"disk-{t} store"]["median"] for t in (16, 256)),
        "small_chunks": min(row["median"] for row in small.values()),
    }
    write(
        "tiers",
        {
            **facts(COMMAND, "torch", "xxhash"),
            "threads": {"torch": torch.get_num_threads(), "disk": THREADS},
            "bytes_a_round": nbytes,
            "GB_per_s": rates,
            "fraction_of_limit": fractions,
            "small_chunks": small,
            "result": worst,
        },
    )
    print("tiers: " + " ".join(f"{name}={value:.2f}" for name, value in worst.items()))


if __name__ == "__main__":
    main()
