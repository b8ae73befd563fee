import sqlite3

import pytest

THREAD = 77 << 24 | 1  # a globalTid: process 77, thread 1
AUTOGRAD = THREAD + 1
STRINGS = ["-", "cudaLaunchKernel_v7000", "cuLaunchKernelEx", "cudaMemcpyAsync_v3020", "step", "gemm",
           "ncclAllReduce", "cudaGraphLaunch_v10000"]  # fmt: skip
COLUMNS = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "NVTX_EVENTS": "start, end, eventType, text TEXT, textId, globalTid",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, correlationId, globalPid, shortName, graphNodeId",
    # as older versions have it: without graphNodeId
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, correlationId, globalPid",
}


class NsysDatabase:
    """Writes the tables of an nsys export that the parser reads; a table exists once it has a row."""

    def __init__(self, path) -> None:
        self.path = path
        self._database = sqlite3.connect(path)
        self._database.execute("PRAGMA synchronous = OFF")
        for row in enumerate(STRINGS):
            self.insert("StringIds", row)

    def insert(self, table, row, columns=None) -> None:
        self._database.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns or COLUMNS[table]})")
        self._database.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", row)
        self._database.commit()

    def range(self, start, end, text=None, *, text_id=None, tid=THREAD, event_type=59):
        self.insert("NVTX_EVENTS", (start, end, event_type, text, text_id, tid))

    def call(self, name, start, end, correlation, *, tid=THREAD):
        self.insert("CUPTI_ACTIVITY_KIND_RUNTIME", (start, end, tid, correlation, STRINGS.index(name)))

    def kernel(self, name, start, end, correlation, *, device=0, process=77, node=None):
        row = (start, end, device, correlation, process << 24, STRINGS.index(name), node)
        self.insert("CUPTI_ACTIVITY_KIND_KERNEL", row)

    def launch(self, start, correlation, *, tid=THREAD, work=()):
        """A call of 10 ns, and the (start, end) of its kernel."""
        self.call("cudaLaunchKernel_v7000", start, start + 10, correlation, tid=tid)
        if work:
            self.kernel("gemm", *work, correlation)


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
        db.range(at(100), at(300), "lmkit.forward")
        db.range(at(400), at(700), "lmkit.backward")
        first = begin + 1
        db.call("cudaLaunchKernel_v7000", at(110), at(110 + 10 * slow), first)
        db.call("cuLaunchKernelEx", at(150), at(150 + 10 * slow), first + 1)
        db.call("cudaLaunchKernel_v7000", at(410), at(430), first + 2, tid=AUTOGRAD)
        db.call("cudaMemcpyAsync_v3020", at(450), at(455), first + 3)
        db.call("cudaLaunchKernel_v7000", at(460), at(470), first + 4, tid=AUTOGRAD)
        db.kernel("gemm", at(200), at(300), first)
        db.kernel("gemm", at(250), at(350), first + 1)  # overlaps the one before: union 150
        db.kernel("gemm", at(500), at(700), first + 2)
        db.insert("CUPTI_ACTIVITY_KIND_MEMCPY", (at(700), at(710), 0, first + 3, 77 << 24))
        db.kernel("ncclAllReduce", at(610), at(790), first + 4)
    return db
