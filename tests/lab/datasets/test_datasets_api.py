import subprocess
import sys

import batchmaker.lab.datasets as datasets


def test_every_public_name_is_there():
    assert all(hasattr(datasets, name) for name in datasets.__all__)
    assert len(set(datasets.__all__)) == len(datasets.__all__)


def test_each_room_file_keeps_clear_of_torch():
    program = (
        "import sys, types; package = types.ModuleType('batchmaker'); "
        f"package.__path__ = {[str(p) for p in sys.modules['batchmaker'].__path__]!r}; "
        "sys.modules['batchmaker'] = package; import batchmaker.lab.datasets; print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
