import getpass
import json
import os
import socket
from pathlib import Path

import torch

import lmkit
from lmkit.measure.environment import describe_environment, device_name, gpu_state, usable_cpus


def test_the_environment_is_json_says_what_matters_and_does_not_name_this_machine():
    environment = describe_environment()
    text = json.dumps(environment)
    assert json.loads(text) == environment
    # The distribution's version may lack the build, "+cu132".
    assert environment["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert environment["cpu"]["usable"] == usable_cpus()
    assert environment["cpu"]["memory_bytes"] > 10**8
    assert len(environment["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for secret in (socket.gethostname(), str(Path(lmkit.__file__).parent), os.getcwd(), str(Path.home())):
        assert secret not in text or secret == "/"
    assert f"/{getpass.getuser()}/" not in text


def test_device_name_and_state_without_a_gpu():
    assert device_name("cpu")
    if not torch.cuda.is_available():
        assert gpu_state() == []
