"""A Hub on this machine, and processes that speak to it with and without the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import TOKEN, serve
from remote_code import WITHOUT_PACKAGE

import hf_deco


class Client:
    """Processes of somebody with a home of their own, whose Hub is the one on this machine."""

    def __init__(self, folder, url):
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
        self.env |= {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "HF_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        self.env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}

    def run(self, code, argument, package=True):
        """Run code in a process whose `argument` is given, and return what it leaves in `result`."""
        head = "" if package else WITHOUT_PACKAGE
        head += "import json, sys\nargument = json.loads(sys.argv[1])\n"
        tail = "\njson.dump(result, open(sys.argv[2], 'w'))\n"
        answer = self.folder / "answer.json"
        source = str(Path(hf_deco.__file__).parents[1])
        env = self.env | ({"PYTHONPATH": source} if package else {})
        command = [sys.executable, "-c", head + code + tail, json.dumps(argument), str(answer)]
        done = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def loopback():
    hub, url, server = serve()
    hub.url = url
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def client(loopback, tmp_path_factory):
    return Client(tmp_path_factory.mktemp("client"), loopback.url)


@pytest.fixture(scope="session")
def make_checkpoint(make_model):
    """Save a tiny random model and its processor in a folder."""

    def make(folder, **kwargs):
        model = make_model(**kwargs)
        names = [f"item {row}" for row in range(model.config.num_items)]
        processor = hf_deco.DecoProcessor(
            names, model.catalog_codes, model.config.codebook_sizes, titles=[name.title() for name in names]
        )
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return folder

    return make
