"""What starting up costs: names are there at once, and torch's compiler is loaded by those alone who compile."""

import subprocess
import sys

EVERYTHING = """
import sys
import splitfg
assert "torch" not in sys.modules, "importing splitfg loads torch"
for name in splitfg.__all__:
    getattr(splitfg, name)
"""

AN_ESTIMATE = """
import torch
torch.manual_seed(0)
network = splitfg.Split(torch.nn.Linear(3, 4), splitfg.LinearHead(torch.nn.Linear(4, 2)))
batch = torch.randn(5, 3), torch.randint(0, 2, (5,))
splitfg.SplitFG(K=2)(network, *batch, generator=torch.Generator())
"""

NO_COMPILER = 'assert "torch._dynamo" not in sys.modules, "the compiler is loaded"'


def test_importing_and_estimating_load_no_compiler():
    code = EVERYTHING + AN_ESTIMATE + NO_COMPILER
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
