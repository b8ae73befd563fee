import sqlite3

import pytest

PROCESS = 77 << 24  # a globalPid; its threads differ in the low 24 bits
MAIN, AUTOGRAD = PROCESS | 1, PROCESS | 2
OTHER_PROCESS = 78 << 24

STRINGS = [
    "-",
    "cudaLaunchKernel_v7000",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync_v3020",
    "step",
    "gemm",
    "ncclAllReduce",
    "cudaGraphLaunch_v10000",
]


class NsysDatabase:
    """Writes the tables of an nsys export that the parser reads; a table exists once it has a row."""

    def __init__(self, path) -> None:
        self.path = path
        self._database = sqlite3.connect(path)
        self._database.execute("PRAGMA synchronous = OFF")
        self._tables = set()
        self._insert("StringIds", "id INTEGER PRIMARY KEY, value TEXT", *enumerate(STRINGS))

    def _insert(self, table, columns, *rows) -> None:
        if table not in self._tables:
            self._database.execute(f"CREATE TABLE {table} ({columns})")
            self._tables.add(table)
        for row in rows:
            self._database.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", row)
        self._database.commit()

    def range(self, start, end, *, text=None, text_id=None, tid=MAIN, event_type=59):
        columns = (
            "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER"
        )
        self._insert("NVTX_EVENTS", columns, (start, end, event_type, text, text_id, tid))

    def call(self, name, start, end, correlation, *, tid=MAIN):
        columns = "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER"
        self._insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME", columns, (start, end, tid, correlation, STRINGS.index(name))
        )

    def kernel(self, name, start, end, correlation, *, device=0, pid=PROCESS, node=None):
        columns = (
            "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER, globalPid INTEGER, "
            "shortName INTEGER, graphNodeId INTEGER"
        )
        row = (start, end, device, correlation, pid, STRINGS.index(name), node)
        self._insert("CUPTI_ACTIVITY_KIND_KERNEL", columns, row)

    def memcpy(self, start, end, correlation):
        """As older versions have it: without graphNodeId."""
        columns = "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER, globalPid INTEGER"
        self._insert("CUPTI_ACTIVITY_KIND_MEMCPY", columns, (start, end, 0, correlation, PROCESS))


@pytest.fixture
def nsys_database(tmp_path):
    return NsysDatabase(tmp_path / "report.sqlite")


@pytest.fixture
def two_steps(nsys_database):
    """Two steps of 1000 us each (times below in us); the first is the warm-up and twice as slow to launch.

    Second step: forward launches 2 kernels (10 us of API each), backward 1 from the autograd thread, the copy is
    asynchronous, an all-reduce overlaps half with the backward kernel and ends after the step's CPU range.
    """
    db, us = nsys_database, 1000
    for begin, slow in ((0, 2), (1000, 1)):
        at = lambda value, begin=begin: (begin + value) * us  # noqa: E731
        db.range(at(0), at(1000), text_id=4)
        db.range(at(100), at(300), text="lmkit.forward")
        db.range(at(400), at(700), text="lmkit.backward")
        first = begin + 1
        db.call("cudaLaunchKernel_v7000", at(110), at(110 + 10 * slow), first)
        db.call("cuLaunchKernelEx", at(150), at(150 + 10 * slow), first + 1)
        db.call("cudaLaunchKernel_v7000", at(410), at(430), first + 2, tid=AUTOGRAD)
        db.call("cudaMemcpyAsync_v3020", at(450), at(455), first + 3)
        db.call("cudaLaunchKernel_v7000", at(460), at(470), first + 4, tid=AUTOGRAD)
        db.kernel("gemm", at(200), at(300), first)
        db.kernel("gemm", at(250), at(350), first + 1)  # overlaps the one before: union 150
        db.kernel("gemm", at(500), at(700), first + 2)
        db.memcpy(at(700), at(710), first + 3)
        db.kernel("ncclAllReduce", at(610), at(790), first + 4)
    return db
