"""Seeded damage: to bytes of any kind, to tokens and lines of text, to binary headers."""

import pickle
import re
from random import Random
from typing import Any


class Payload:
    """Unpickling it runs code: it writes a file, which the guard refuses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("stolen", "w"))


PICKLE = pickle.dumps(Payload())
BYTES: tuple[bytes, ...] = (
    b"\0", b"\0" * 64, b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xf4\x90\x80\x80", b"\r\n", b"\n",
    b"\x1b[2J", b"'", b'"', b'"""', b"\\", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b"=", b"#", b"NaN",
    b"../../../tmp/stolen", b"/dev/zero", b"A" * 100_000, PICKLE,
)  # fmt: skip
# Values of JSON, TOML, Python literals, HTTP headers and SQL: most parse in several of them.
VALUES: tuple[str, ...] = (
    "null", "None", "true", "True", "-1", "0", "1", "2", "255", "65536", str(2**31), str(2**32), str(2**63 - 1),
    str(2**63), str(2**64), "9" * 400, "9" * 5000, "1.5", "-0.0", "1e400", "NaN", "nan", "Infinity", "inf", '""',
    '"a"', "'a'", '"\\u0000"', '"\\ud800"', '"' + "A" * 50_000 + '"', '"../../stolen"', '"<|endoftext|>"', '"1"',
    '"é"', "[]", "[1]", "[[]]", '["a", 1]', "{}", '{"a": 1}', "{a = 1}", "()", "(1, 1)", "(-1,)", "(2**60,)",
    "(True,)", "2020-01-01", '"__class__"', '"xl"', '"fp16"', '"cuda"', "'|O'", "'>u2'", "'<i8'", '"F64"', '"BF16"',
    '"BOOL"', '"F8_E4M3"', "__import__('os').system('touch stolen')", "x", "a.b", "9", "206 Part", "500 Oh", "1e9",
    'W/"weak"', "-" * 70_000, "bytes 5-9/x", "chunked", "file:///etc/passwd",
)  # fmt: skip
DEPTHS = (20, 200, 990, 5_000, 100_000)
TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|[^\s\[\]{}(),:="\']+')


def damage(random: Random, data: bytes) -> bytes:
    """Apply one to three mutations of bytes."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = random.choice((flip_bits, rearrange, rearrange, insert))(random, data)
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
    """Insert odd bytes or deep nesting."""
    at, depth = random.randint(0, len(data)), random.choice(DEPTHS)
    opening, closing = random.choice(
        ((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"{a=", b"}"), (b"a.", b""))
    )
    nested = opening * depth + b"1" + closing * random.choice((0, depth))
    return data[:at] + random.choice((random.choice(BYTES), nested)) + data[at:]


def damage_text(random: Random, data: bytes) -> bytes:
    """Replace, repeat or remove tokens or lines: keys, values, table names, fields of a header."""
    for _ in range(random.choice((1, 1, 2, 4))):
        places = [match.span() for match in TOKEN.finditer(data)]
        lines = data.splitlines(keepends=True)
        kind = random.choice(("value", "value", "value", "copy", "remove", "nest", "line", "line"))
        if kind == "line" and len(lines) > 1:
            at = random.randrange(len(lines))
            moved = lines[at] if random.random() < 0.3 else lines.pop(at)
            if random.random() < 0.7:
                lines.insert(random.randint(0, len(lines)), moved)
            data = b"".join(lines)
        elif places:
            (start, end), other = random.choice(places), random.choice(places)
            depth = random.choice(DEPTHS)
            new = {
                "copy": data[slice(*other)],
                "remove": b"",
                "nest": b"[" * depth + data[start:end] + b"]" * depth,
            }.get(kind, random.choice(VALUES).encode())
            data = data[:start] + new + data[end:]
    return data


def damage_header(at: int, size: int, random: Random, data: bytes) -> bytes:
    """Damage a text whose length stands before it, in `size` bytes (the lowest first) at offset `at`."""
    first = at + size
    length = int.from_bytes(data[at:first], "little")
    header, rest = data[first : first + length], data[first + length :]
    kind = random.choice(("text", "text", "text", "length", "pickle"))
    if kind == "length":
        length = random.choice((0, 1, length - 1, length + 8, 10_000, 1 << 27, 1 << 40, (1 << 64) - 1))
    elif kind == "pickle":
        header, rest = header.replace(b"<u2", b"|O").replace(b"<u4", b"|O"), PICKLE + rest
    else:
        header = damage_text(random, header.rstrip())
        header += b" " * (-len(header) % random.choice((1, 8))) + b"\n"
        length = len(header)
    return data[:at] + (length % (1 << 8 * size)).to_bytes(size, "little") + header + rest
