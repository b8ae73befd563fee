"""Seeded damage: to bytes of any kind, and to structured files in ways that still parse."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import pickle
import re
import sqlite3
import tempfile
from pathlib import Path
from random import Random
from typing import Any


class Payload:
    """Unpickling it runs code: it writes a file, which the guard refuses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("stolen", "w"))


PICKLE = pickle.dumps(Payload())
NESTING = (20, 200, 990, 5_000, 100_000)
DIGITS = (10, 19, 20, 400, 5_000)
NUMBERS = ("-1", "0", "1", "255", "65536", str(2**31), str(2**32), str(2**63), str(2**64), "1.5", "1e400")
TOKENS: tuple[bytes, ...] = (
    b"\0", b"\0" * 64, b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xf4\x90\x80\x80", b"\r\n", b"\n",
    b"\r", b"\x1b[2J", b" ", b"\t", b"'", b'"', b'"""', b"\\", b"\\u0000", b"\\ud800", b"{", b"}", b"[", b"]", b",",
    b":", b"=", b"#", b".", b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0x10",
    b"../../../tmp/stolen", b"/dev/zero", b"__class__", b"%s%n", b"A" * 100_000, PICKLE,
)  # fmt: skip


def damage(random: Random, data: bytes) -> bytes:
    """Apply one to three mutations of bytes."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = random.choice(_BYTE_MUTATIONS)(random, data)
    return data


def flip_bits(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8)) if data else 0):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def rearrange(random: Random, data: bytes) -> bytes:
    """Overwrite, cut out, repeat or swap ranges, or cut off the end."""
    a, b, c, d = sorted(random.randint(0, len(data)) for _ in range(4))
    return random.choice(
        (
            data[:a] + random.randbytes(min(b - a, 64)) + data[a + min(b - a, 64) :],
            data[:a] + data[b:],
            data[:a] + data[a : min(b, a + 1000)] * random.choice((2, 3, 100)) + data[min(b, a + 1000) :],
            data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:],
            data[:b],
        )
    )


def insert(random: Random, data: bytes) -> bytes:
    """Insert a token or deep nesting."""
    at, depth = random.randint(0, len(data)), random.choice(NESTING)
    opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"{a=", b"}")))
    nested = opening * depth + b"1" + closing * random.choice((0, depth))
    return data[:at] + random.choice((random.choice(TOKENS), nested)) + data[at:]


def change_number(random: Random, data: bytes) -> bytes:
    """Replace a number in the text."""
    places = list(re.finditer(rb"\d+", data))
    if not places:
        return flip_bits(random, data)
    place = random.choice(places)
    number = random.choice((*NUMBERS, "9" * random.choice(DIGITS)))
    return data[: place.start()] + number.encode() + data[place.end() :]


_BYTE_MUTATIONS = (flip_bits, rearrange, rearrange, rearrange, insert, insert, change_number)

# JSON: the first two stand for text that json.dumps cannot write

_NESTED, _DIGITS = "\ue000nested", "\ue000digits"
_ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 64, 10**30, 1.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "a", "\0", "\ud800", "A" * 100_000, "../../stolen", "<|endoftext|>", "1", "é",
    (), ((),), (1, 2), ("a", "b"), _NESTED, _DIGITS,
)  # fmt: skip


def damage_json(random: Random, data: bytes) -> bytes:
    """Change values, types and keys of a JSON document that stays one."""
    document = json.loads(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        document = _changed(random, document)
    text = json.dumps(document, ensure_ascii=random.random() < 0.5)
    depth = random.choice(NESTING)
    text = text.replace(json.dumps(_NESTED), "[" * depth + "]" * depth).replace(f'"{_NESTED}"', "[]")
    text = text.replace(json.dumps(_DIGITS), "9" * random.choice(DIGITS)).replace(f'"{_DIGITS}"', "9" * 20)
    return text.encode("utf-8", "surrogatepass")


def odd_value(random: Random) -> Any:
    """Return a value that is hardly ever the right one."""
    value = random.choice((*_ODD_VALUES, {}, {"a": 1}))
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else value


def _changed(random: Random, document: Any) -> Any:
    """Walk to a random place and change what is there."""
    holder, place, value = None, None, document
    while isinstance(value, dict | list) and value and (holder is None or random.random() < 0.8):
        holder = value
        place = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
        value = holder[place]
    if holder is None:
        return odd_value(random)
    other = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = random.choice(("set", "set", "set", "delete", "rename", "swap", "copy", "wrap"))
    if kind == "set":
        holder[place] = odd_value(random)
    elif kind == "delete":
        del holder[place]
    elif kind == "swap":
        holder[place], holder[other] = holder[other], holder[place]
    elif kind == "copy":
        holder[place] = holder[other]
    elif kind == "wrap":
        holder[place] = random.choice(([value], {"a": value}, [value] * 3, str(value)[:100]))
    elif isinstance(holder, dict):
        del holder[place]
        holder[random.choice((place + "x", place.upper(), "", other, "__class__", "A" * 10_000))] = value
    else:
        holder.insert(place, odd_value(random))
    return document


def damage_json_lines(random: Random, data: bytes) -> bytes:
    """Damage one line of JSON lines in a way that parses."""
    lines = data.splitlines()
    at = random.randrange(len(lines))
    lines[at] = damage_json(random, lines[at])
    return b"\n".join(lines) + b"\n"


_TOML_VALUES = (
    "true", "-1", "0", "1", "9223372036854775807", "9223372036854775808", "1e400", "nan", "inf", "-0.0", "1.5", '""',
    '"a"', '"\\u0000"', "'''a\nb'''", "[]", "[1]", '["a", 1]', "{}", "{a = 1}", "2020-01-01", "2020-13-45",
    "0x_1", "1_000", '"' + "A" * 50_000 + '"', "[" * 100 + "]" * 100, "[" * 5000 + "]" * 5000, "9" * 5000,
    "{a=" * 300 + "1" + "}" * 300, '"../../stolen"', '"\\uD800"', '"xl"', '"zero1"', '"fp16"', '"random"', '"cuda"',
)  # fmt: skip


def damage_toml(random: Random, data: bytes) -> bytes:
    """Change values, keys and tables of a TOML document line by line."""
    lines = data.decode().split("\n")
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        kind = random.choice(
            ("value", "value", "value", "key", "delete", "repeat", "move", "dotted", "table")
        )
        if kind == "value" and equals:
            lines[at] = f"{key}= {random.choice(_TOML_VALUES)}"
        elif kind == "key" and equals:
            name = random.choice((key.strip() + "s", "", '""', '"a.b"', "A" * 10_000, "a.b", "workers"))
            lines[at] = name + lines[at][len(key) :]
        elif kind == "delete":
            lines[at] = ""
        elif kind in ("repeat", "move"):
            moved = lines[at] if kind == "repeat" else lines.pop(at)
            lines.insert(random.randint(0, len(lines)), moved)
        elif kind == "dotted":
            lines.insert(at, ".".join("a" * random.choice((2, 100, 5000))) + " = 1")
        elif kind == "table":
            lines.insert(
                at, f"[{random.choice(('model', 'run', 'bench', 'a', 'model.b', '[run]', 'wandb'))}]"
            )
    return "\n".join(lines).encode()


# Binary headers

_DTYPES = (
    b"F64",
    b"F16",
    b"BF16",
    b"I64",
    b"U8",
    b"BOOL",
    b"F8_E4M3",
    b"F8_E8M0",
    b"F4",
    b"C64",
    b"F6_E2M3",
    b"O",
)


def damage_safetensors(random: Random, data: bytes) -> bytes:
    """Change the JSON header of a safetensors file, or its length field."""
    length = int.from_bytes(data[:8], "little")
    header, tensors = data[8 : 8 + length], data[8 + length :]
    kind = random.choice(("length", "json", "json", "number", "dtype"))
    if kind == "length":
        length = random.choice((0, 1, length - 1, length + 8, 1 << 20, 1 << 27, 1 << 40, (1 << 64) - 1))
        return length.to_bytes(8, "little") + header + tensors
    if kind == "dtype":
        header = header.replace(b'"F32"', b'"' + random.choice(_DTYPES) + b'"', random.choice((1, -1)))
    else:
        header = (damage_json if kind == "json" else change_number)(random, header)
    header += b" " * (-len(header) % random.choice((1, 8)))
    return len(header).to_bytes(8, "little") + header + tensors


_NPY_VALUES = (
    "'|O'", "'<u2'", "'<u4'", "'>u2'", "'<i8'", "'<U9'", "'V0'", "'<u2,<u2'", "[('a', '<u2')]", "[('a', '|O')]",
    "('<u2', 5)", "()", "[()]", "(1,)", "(-1,)", "(True,)", "(1, 1)", "(2**60,)", "(" + "9" * 5000 + ",)", "None",
    "1", "{}", "{1}", "''", "b'a'", "__import__('os').system('touch stolen')", "(" * 90 + ")" * 90,
    "(" * 5000 + ")" * 5000, "'" + "A" * 9000 + "'", "1e400", "...",
)  # fmt: skip


def damage_npy(random: Random, data: bytes) -> bytes:
    """Change the header of a .npy file: its version, its length, the Python literal in it."""
    length = int.from_bytes(data[8:10], "little")
    header, tokens = data[10 : 10 + length], data[10 + length :]
    kind = random.choice(("version", "length", "value", "value", "value", "key", "pickle"))
    if kind == "version":
        return data[:6] + bytes([random.choice((0, 1, 2, 3, 9)), random.choice((0, 1))]) + data[8:]
    if kind == "length":
        length = random.choice((0, 1, length - 1, length + 64, 10_000, 65_535))
        return data[:8] + length.to_bytes(2, "little") + data[10:]
    if kind == "pickle":
        header, tokens = header.replace(b"<u2", b"|O").replace(b"<u4", b"|O"), PICKLE + tokens
    else:
        pattern = rb"('\w+')(:)" if kind == "key" else rb"(: )('[^']*'|\w+|\([^)]*\))"
        start, end = random.choice(list(re.finditer(pattern, header))).span(1 if kind == "key" else 2)
        header = header[:start] + random.choice(_NPY_VALUES).encode() + header[end:]
    if random.random() < 0.8:  # else the padding is lost, or the header outgrows its field
        header = header.rstrip() + b"\n"
    version = b"\x01\x00" if len(header) < 1 << 16 else b"\x02\x00"
    return data[:6] + version + len(header).to_bytes(2 if version[0] == 1 else 4, "little") + header + tokens


# Downloads

_STATUS_LINES = (b"206 Part", b"304 Same", b"302 Found", b"416 No", b"500 Oh", b"9", b"")
_HEADER_VALUES = (
    b"", b"-1", b"9" * 30, b"9" * 5000, b"x", b"1e9", b'W/"weak"', b'"' + b"a" * 64 + b'"', b"\xff", b"A" * 70_000,
    b"0",
)  # fmt: skip
_HEADERS = (
    b"Transfer-Encoding: chunked", b"Content-Range: bytes 5-9/x", b"Content-Encoding: gzip", b"X: y",
    b"Location: file:///etc/passwd",
)  # fmt: skip


def damage_http_head(random: Random, data: bytes) -> bytes:
    """Change the head of an HTTP answer line by line."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    at = random.randrange(len(lines))
    name, colon, _ = lines[at].partition(b":")
    status = b"HTTP/1.1 " + random.choice(_STATUS_LINES)
    lines[at] = name + b": " + random.choice(_HEADER_VALUES) if colon else status
    if random.random() < 0.4:
        lines.insert(random.randint(1, len(lines)), random.choice(_HEADERS))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@functools.cache
def bomb() -> bytes:
    """Return 50 kB that unpack to 50 MB."""
    return gzip.compress(bytes(50_000_000), mtime=0)


def damage_archive(random: Random, data: bytes) -> bytes:
    """Return a bomb, several archives in one, one whose header names a file elsewhere, or one with a tail."""
    named = data[:3] + b"\x08" + data[4:10] + b"../../stolen\0" + data[10:]
    return random.choice((bomb(), data * 2, data * 10, named, data + bytes(100), data + b"x"))


_CELLS: tuple[Any, ...] = (
    b"",
    b"\xff\xfe",
    PICKLE,
    2.5,
    -(1 << 63),
    (1 << 63) - 1,
    "12",
    "no number",
    None,
)


def damage_sqlite(random: Random, data: bytes) -> bytes:
    """Put odd values into cells of a database that stays one, or take rows, columns or tables away."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged"
        path.write_bytes(data)
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA synchronous = OFF")
            for _ in range(random.choice((1, 1, 2, 4))):
                _change_database(random, database)
        return path.read_bytes()


def _change_database(random: Random, database: sqlite3.Connection) -> None:
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if not tables:
        return
    table = random.choice(tables)
    column = random.choice([row[1] for row in database.execute(f"PRAGMA table_info({table})")])
    value = random.choice((*_CELLS, odd_value(random)))
    row = f"SELECT rowid FROM {table} ORDER BY rowid LIMIT 1 OFFSET {random.randrange(4)}"
    with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeEncodeError):  # SQLite refuses this damage
        kind = random.choice(("set", "set", "set", "delete", "rename", "drop"))
        if kind == "set":
            value = str(value) if isinstance(value, list | dict) else value
            database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid IN ({row})", (value,))
        elif kind == "delete":
            database.execute(f"DELETE FROM {table} WHERE rowid % 2 = {random.randrange(2)}")
        elif kind == "rename":
            database.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
        else:
            database.execute(f"DROP TABLE {table}")
    database.commit()
