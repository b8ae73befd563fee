"""Token files in several shards on the command line."""

import json
from pathlib import Path

from byte_tokenizers import of_bytes

END = "<|endoftext|>"


def test_shards_are_encoded_and_inspected(terminal, tmp_path):
    tokenizer = of_bytes(END)
    tokenizer.save(tmp_path / "t.json")
    (tmp_path / "a.txt").write_text(f"one fish{END}two fish{END}" * 10)
    encode = "data encode a.txt fish --tokenizer t.json --format bin --shard-tokens 64 --json"
    made = json.loads(terminal(encode))
    names = [f"fish_{number:06d}.bin" for number in range(3)]
    assert made["output"] == names
    assert (made["num_tokens"], made["num_documents"], made["num_bytes"]) == (180, 20, 160)
    terminal.refuses(encode, code="output.exists", says=[names[0]])
    whole = "data encode a.txt a.npy --tokenizer t.json --shard-tokens 64"
    terminal.refuses(whole, code="encode.shard_tokens", says=["--shard-tokens"])

    found = json.loads(terminal("data inspect fish_000000.bin fish_000001.bin --json"))
    assert (found["num_tokens"], found["dtype"], found["vocab_size"]) == (128, "uint16", 257)
    assert found["tokenizer_sha256"] == ""
    found = json.loads(terminal("data", "inspect", "fish_*.bin", "--tokenizer", "t.json", "--json"))
    assert (found["num_tokens"], found["num_documents"], found["num_bytes"]) == (180, 20, 160)
    assert found["tokenizer_sha256"] == tokenizer.sha256
    assert "one fish" in found["preview"]
    for command in ("verify fish_*.bin", "verify fish_000002.bin"):
        assert json.loads(terminal(f"{command} --json"))["ok"]
    Path("fish_000002.bin").write_bytes(Path("fish_000002.bin").read_bytes()[:-1])
    terminal.refuses(
        "data inspect fish_000002.bin", code="tokens.damaged", says=["fish_000002.bin"], exit_code=1
    )
